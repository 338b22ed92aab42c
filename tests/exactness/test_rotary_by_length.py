"""Rotary tables that depend on a prompt's length: state is shared between prompts with the same tables, and no others."""

from typing import Any

import pytest
import torch
from tests.conftest import soak_rounds
from tests.tiny_models import LLAMA_SHAPE, Numbers, alone, generated, number_prompt, right, tiny_llama
from transformers import Phi3Config, Phi3ForCausalLM

import dejakv
from dejakv.records import Record

LIMIT = 64
TABLES = {
    "rope_type": "longrope", "factor": 8.0, "rope_theta": 10000.0, "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5],
}  # fmt: skip


def llama(seed: int) -> Any:
    return tiny_llama(seed, original_max_position_embeddings=LIMIT, rope_parameters=dict(TABLES))


def phi3(seed: int) -> Any:
    torch.manual_seed(seed)
    settings = {**LLAMA_SHAPE, "original_max_position_embeddings": LIMIT, "rope_parameters": dict(TABLES)}
    return Phi3ForCausalLM(Phi3Config(**settings)).eval()


def dynamic(seed: int) -> Any:
    tables = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return tiny_llama(seed, max_position_embeddings=LIMIT, rope_parameters=tables)


def served(model: Any, lengths: list[int], seed: int, **options: Any) -> tuple[int, int]:
    """A prompt of each length, each beginning as the longest does: wrong answers and hits."""
    records: list[Record] = []
    ids, wrong = number_prompt(max(lengths), seed), 0
    with dejakv.attach(model, Numbers(), on_record=records.append) as cache:
        for length in lengths:
            wrong += not right(model, ids[:, :length], **options)
            cache.flush()
    return wrong, sum(record.computed_tokens < record.prompt_tokens for record in records)


@pytest.mark.parametrize("make", [llama, phi3], ids=["llama", "phi3"])
@pytest.mark.parametrize(
    ("lengths", "hits"),
    [
        ([40, 120], 0),
        ([120, 40], 0),
        ([30, 50], 1),
        ([58, 60], 1),  # answers grow over the limit
        ([80, 120, 120], 2),
        ([LIMIT, LIMIT + 1, LIMIT, LIMIT + 1], 1),  # one token over the limit is computed in full
        ([40, 120, 50, 130], 2),
    ],
    ids=str,
)
def test_longrope_reuses_between_prompts_on_the_same_side_of_the_limit(
    make: Any, lengths: list[int], hits: int
) -> None:
    for seed in range(soak_rounds()):
        assert served(make(seed), lengths, seed) == (0, hits)


@pytest.mark.parametrize("make", [llama, phi3], ids=["llama", "phi3"])
def test_beams_rotate_a_prompt_just_over_the_limit_as_the_model_does(make: Any) -> None:
    for seed in range(soak_rounds()):
        wrong, hits = served(make(seed), [LIMIT + 1, LIMIT + 1, 40, 90], seed, num_beams=3)
        assert (wrong, hits) == (0, 1)


def test_dynamic_tables_are_the_same_for_short_prompts() -> None:
    for seed in range(soak_rounds()):
        assert served(dynamic(seed), [30, 50, 50], seed) == (0, 2)


def test_dynamic_tables_that_grow_are_never_mixed() -> None:
    for seed in range(soak_rounds()):
        kept, untouched = dynamic(seed), dynamic(seed)
        lengths = [40, 100, 50, 100, 120, 70, 100, 100]
        records: list[Record] = []
        ids = number_prompt(max(lengths), seed)
        with dejakv.attach(kept, Numbers(), on_record=records.append) as cache:
            for length in lengths:
                got = generated(kept, ids[:, :length])
                want = generated(untouched, ids[:, :length])
                assert torch.equal(got, want), (seed, length)
                cache.flush()
        assert records[2].computed_tokens < 50, "short prompts are served as ever"


def test_rows_of_a_padded_batch_go_to_the_model_since_they_share_tables() -> None:
    model = llama(0)
    records: list[Record] = []
    ids = torch.cat([number_prompt(100, 0), number_prompt(100, 1)])
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    call: Any = lambda: model.generate(  # noqa: E731
        input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    with dejakv.attach(model, Numbers(), on_record=records.append):
        assert torch.equal(call(), alone(model, call))
    assert "rotary table" in records[-1].reason


def test_the_epoch_is_stable_and_restarts_find_their_state(tmp_path: Any) -> None:
    from dejakv.config import SemanticCacheConfig

    config = SemanticCacheConfig(semantic_text=False, cache_dir=str(tmp_path / "cache"))
    records: list[Record] = []
    for length in (100, 40, 100, 40):
        model = llama(0)
        with dejakv.attach(model, Numbers(), config, on_record=records.append):
            assert right(model, number_prompt(120, 0)[:, :length])
    assert [record.method for record in records] == ["none", "none", "exact", "exact"]
