"""What a blend starts from: each token's state is its donor token's, moved, however it lies in the donors."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_harness import tokens

from dejakv.blend.blend import find
from dejakv.blend.settings import BlendConfig
from dejakv.blend.slices import SLICED
from dejakv.blend.token_map import Donors
from dejakv.engines.tensors import to_store
from dejakv.engines.vllm.blend.drafts import Drafting
from dejakv.engines.vllm.pages import Buffers
from dejakv.store.base import Chunk, ChunkMeta

LAYERS, HEADS, WIDTH = 3, 2, 4
CONFIG = BlendConfig(max_share=1.0)
A, B = tokens(200, 1), tokens(150, 2)


def embed(ids: Any) -> Any:
    return np.random.default_rng(0).standard_normal((512, 8)).astype(np.float32)[ids]


def moved(keys: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Stands for a rotation: it shows each row's way."""
    keys += (target - source)[:, None]


def chunk_of(ids: list[int], number: int, position: int = 0) -> Chunk:
    state = torch.randn(2, LAYERS, HEADS, len(ids), WIDTH, generator=torch.Generator().manual_seed(number))
    meta = ChunkMeta(str(number), "default", "", tuple(ids), "", "", position=position, generation=number)
    return Chunk(meta, to_store(state))


SHUFFLED = np.random.default_rng(3).permutation(A).tolist()


@pytest.mark.parametrize("first", [0, 70])
@pytest.mark.parametrize(
    "prompt",
    [
        A[40:] + B[:100] + tokens(20, 4),  # runs that move by one distance each
        [token for pair in zip(A, B, strict=False) for token in pair],  # rows here and there
        A[:80] + SHUFFLED[:60] + B[30:],
    ],
)
def test_each_tokens_state_is_its_donors_moved(prompt: list[int], first: int) -> None:
    donors = [chunk_of(A, 1), chunk_of(B, 2, position=7)]
    by_id = {chunk.meta.id: chunk for chunk in donors}
    drafting = Drafting(CONFIG, torch.float32, torch.device("cpu"), embed, moved, Buffers(1 << 20))
    metas = [chunk.meta for chunk in donors]
    draft = drafting.draft(prompt, first, len(prompt), metas, lambda id, _: (by_id[id],))
    among = Donors.of(A, B, first=[0, 7])
    found, _ = find(np.asarray(prompt), among, embed, CONFIG, None, [False, False], first)
    source = found.source[first:]
    assert (np.diff(source) == 1).sum() > 2 * SLICED or prompt[1] == B[0]
    states = torch.cat(
        [torch.from_numpy(chunk.tensor.data.copy()).view(2, LAYERS, HEADS, -1, WIDTH) for chunk in donors], 3
    )
    wanted = states[:, :, :, torch.from_numpy(source)]
    wanted[0] += torch.from_numpy(np.arange(first, len(prompt)) - among.positions[source])[:, None]
    torch.testing.assert_close(draft.state[:, :, :, first:], wanted)


def wholly_read(checked: int, checkable: int, *donors: Chunk) -> tuple[list[str], str | None]:
    """Which donors of a prompt of 250 tokens are read whole, and which of them is the proof."""
    by_id, whole = {chunk.meta.id: chunk for chunk in donors}, list[str]()

    def read(id: str, rows: Any) -> tuple[Chunk]:
        if rows is None:
            whole.append(id)
        return (by_id[id],)

    device, buffers = torch.device("cpu"), Buffers(1 << 20)
    drafting = Drafting(CONFIG, torch.float32, device, embed, moved, buffers, None, checked, checkable)
    prompt = A[100:] + B[50:]
    draft = drafting.draft(prompt, 0, len(prompt), [chunk.meta for chunk in donors], read)
    return whole, draft.proof.meta.id if draft.proof else None


@pytest.mark.parametrize(
    ("checked", "checkable", "whole", "proof"),
    [
        (0, 256, ["1", "2"], "2"),  # the second is longer, and shows more
        (190, 256, ["2"], "2"),
        (200, 256, [], None),
        (100, 160, ["1"], "1"),  # both are longer than what there are blocks for: the first shows as much
        (160, 160, [], None),  # the longest check that these blocks allow was made already
    ],
)
def test_a_donor_is_read_whole_where_the_model_can_be_checked_further_with_it(
    checked: int, checkable: int, whole: list[str], proof: str | None
) -> None:
    donors = [chunk_of(A[:180], 1), chunk_of(B + A[:50], 2)]
    donors = [Chunk(replace(chunk.meta, generation=0), chunk.tensor) for chunk in donors]
    assert wholly_read(checked, checkable, *donors) == (whole, proof)


def test_state_that_is_not_exact_proves_nothing() -> None:
    assert wholly_read(0, 256, chunk_of(A, 1), chunk_of(B, 2)) == ([], None)
