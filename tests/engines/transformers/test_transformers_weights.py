"""The digest over a model's tensors, and the check that looks at a part of them."""

from collections.abc import Sequence

import pytest
import torch

from dejakv.engines.transformers.fingerprint.weights import TURNS, WeightDigest, unreadable, weighted_sum


def named(*tensors: torch.Tensor) -> tuple[list[str], Sequence[torch.Tensor]]:
    return [f"t{index}" for index in range(len(tensors))], tensors


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def test_the_digest_covers_every_row_of_a_large_table() -> None:
    table = torch.zeros(60_000, 64)
    before = WeightDigest(*named(table)).digest
    table[8_000:11_600] += 1.0  # of 60,000 rows: 16 pages of 4 KiB spread evenly would not see them
    assert WeightDigest(*named(table)).digest != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float64])
def test_names_shapes_types_and_values_count(dtype: torch.dtype) -> None:
    one = (some(6, 10) * 3).to(dtype)
    before = WeightDigest(*named(one)).digest
    assert WeightDigest(*named(one.clone())).digest == before
    assert WeightDigest(*named(one.reshape(10, 6))).digest != before
    assert WeightDigest(["other"], [one]).digest != before
    changed = one.clone()
    changed[3, 4] = ~changed[3, 4] if dtype == torch.bool else changed[3, 4] + 1
    assert WeightDigest(*named(changed)).digest != before


def test_a_shared_tensor_counts_once_and_empty_ones_do_no_harm() -> None:
    one, none = some(5, 5), torch.empty(0)
    weights = WeightDigest(["a", "b", "c", "d"], [one, one, none, None])
    assert weights.unchanged(["a", "b", "c", "d"], [one, one, none, None])
    assert not weights.unchanged(["a", "b", "c", "d"], [one, one.clone(), none, None])
    assert not weights.unchanged(["a", "b", "c"], [one, one, none])


def test_a_transposed_tensor_is_read_in_its_own_order() -> None:
    tall = some(700, 900)
    view = tall.T
    weights = WeightDigest(*named(view))
    assert weights.digest != WeightDigest(*named(tall.reshape(900, 700))).digest
    assert weights.unchanged(*named(view))
    tall.data.add_(1.0)
    assert not weights.unchanged(*named(view))


@pytest.mark.parametrize("place", [0, 1, 77_777, 4_999_999])
def test_one_element_is_seen_within_the_promised_number_of_checks(place: int) -> None:
    tensors = [some(1000, 5000), some(3, 3), some(2000, 600).T]
    weights = WeightDigest(*named(*tensors))
    for _ in range(3):
        assert weights.unchanged(*named(*tensors))
    tensors[0].data.view(-1)[place] += 1.0
    checks = [weights.unchanged(*named(*tensors)) for _ in range(TURNS)]
    assert not all(checks)


def test_weights_that_are_not_in_memory_are_told() -> None:
    assert unreadable(*named(some(3))) == ""
    assert "not in memory" in unreadable(*named(some(3), torch.empty(3, device="meta")))
    freed = some(3)
    freed.untyped_storage().resize_(0)
    assert "not in memory" in unreadable(*named(freed))
    assert "layout" in unreadable(*named(some(3, 3).to_sparse()))


@pytest.mark.parametrize("size", [0, 5, 8, 4099, (1 << 25) + 11])
def test_the_sum_that_devices_work_out_sees_every_byte(size: int) -> None:
    data = torch.arange(size, dtype=torch.int64).mul(7).remainder(251).to(torch.uint8)
    before = int(weighted_sum(data))
    assert int(weighted_sum(data.clone())) == before
    for place in {0, size // 3, size // 2, size - 1} if size else set():
        data[place] += 1
        assert int(weighted_sum(data)) != before
        data[place] -= 1
    if size > 16:
        swapped = data.clone()
        swapped[:8], swapped[8:16] = data[8:16], data[:8].clone()
        assert int(weighted_sum(swapped)) != before
