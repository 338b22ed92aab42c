"""Models whose layers keep recurrent state: an exact hit begins where a snapshot of it stands."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.documents import COSTS
from tests.tiny_models import Numbers, request, small_model

import dejakv
from dejakv.blend.prune import PruneConfig
from dejakv.config import SemanticCacheConfig
from dejakv.engines.base import Prepared, Refusal
from dejakv.engines.transformers import TransformersEngine
from dejakv.records import Record
from dejakv.store.base import KV, SNAPSHOT
from dejakv.store.selection import Selection

pytestmark = pytest.mark.filterwarnings("ignore")
"""Types warn that faster kernels are not installed."""

NO_SNAPSHOT = "no snapshot of it stands within"


class Chat:
    """A model asked alone and while attached: both answers are the same."""

    def __init__(self, model: Any, **settings: Any) -> None:
        self.model = model
        self.records: list[Record] = []
        self.config = SemanticCacheConfig(semantic_text=False, costs=COSTS, **settings)

    def attached(self) -> Any:
        return dejakv.attach(self.model, Numbers(), self.config, on_record=self.records.append)

    def ask(self, cache: Any, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Record]:
        arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, **options}
        expected = type(self.model).generate(self.model, ids, **arguments)
        got = self.model.generate(ids, **arguments)
        assert torch.equal(got, expected)
        cache.flush()
        return got, self.records[-1]


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(5, 90, (1, count), generator=torch.Generator().manual_seed(seed))


def kinds(cache: Any) -> list[str]:
    return sorted(meta.kind for meta in cache.store.metas())


def test_a_hybrid_begins_at_the_longest_snapshot() -> None:
    chat = Chat(small_model("bamba", False), generated_text="keep")
    with chat.attached() as cache:
        first = tokens(70, 1)
        answer, record = chat.ask(cache, first)
        assert (record.method, record.computed_tokens) == ("none", 70)
        _, record = chat.ask(cache, first)
        assert (record.method, record.computed_tokens) == ("exact", 1)
        # The next turn begins with the answer, whose last token was never computed.
        turn = torch.cat([answer, tokens(20, 2)], dim=1)
        _, record = chat.ask(cache, turn)
        assert (record.method, record.computed_tokens) == ("prefix", 21)
        _, record = chat.ask(cache, turn, num_beams=2)
        assert (record.method, record.computed_tokens) == ("exact", 1)

        # The last message is edited: the longest prefix is that turn's, the snapshot the answer's.
        _, record = chat.ask(cache, torch.cat([turn[:, :84], tokens(30, 5)], dim=1))
        assert (record.method, record.computed_tokens) == ("prefix", 41)

        # A prompt parts from a stored one where no snapshot stands: the next one finds it there.
        system = turn[:, :66]
        _, record = chat.ask(cache, torch.cat([system, tokens(30, 3)], dim=1))
        assert (record.method, record.computed_tokens) == ("none", 96)
        assert NO_SNAPSHOT in record.reason
        _, record = chat.ask(cache, torch.cat([system, tokens(30, 4)], dim=1))
        assert (record.method, record.computed_tokens) == ("prefix", 32)

        assert SNAPSHOT in kinds(cache)
        cache.purge(Selection("default"))
        assert kinds(cache) == []


def test_a_missing_or_damaged_snapshot_is_computed_in_full(tmp_path: Path) -> None:
    chat, prompt = Chat(small_model("lfm2_moe", False), cache_dir=str(tmp_path)), tokens(40, 1)
    with chat.attached() as cache:
        chat.ask(cache, prompt, max_new_tokens=1)
        assert kinds(cache) == [KV, SNAPSHOT]
    # After a restart it is there, and damage is found when it is read.
    with chat.attached() as cache:
        _, record = chat.ask(cache, prompt, max_new_tokens=1)
        assert (record.method, record.computed_tokens) == ("exact", 1)
        snapshot = next(meta for meta in cache.store.metas() if meta.kind == SNAPSHOT)
        cache.store.delete(snapshot.id)
        _, record = chat.ask(cache, prompt, max_new_tokens=1)
        assert (record.method, record.computed_tokens) == ("none", 40)
        assert NO_SNAPSHOT in record.reason
        _, record = chat.ask(cache, prompt, max_new_tokens=1)
        assert (record.method, record.computed_tokens) == ("exact", 1)


def test_what_reads_its_state_for_single_tokens_alone_continues_by_them() -> None:
    chat = Chat(small_model("jamba", False), generated_text="keep")
    with chat.attached() as cache:
        answer, _ = chat.ask(cache, tokens(40, 1))
        turn = torch.cat([answer, tokens(20, 2)], dim=1)
        _, record = chat.ask(cache, turn)
        assert (record.method, record.computed_tokens) == ("prefix", 21)
        # So many that the whole prompt is faster.
        _, record = chat.ask(cache, torch.cat([turn, tokens(100, 3)], dim=1))
        assert (record.method, record.computed_tokens) == ("none", 164)


def test_low_precision_begins_at_whole_units() -> None:
    chat = Chat(small_model("bamba", False, max_position_embeddings=1024).to(torch.bfloat16))
    arguments = {"max_new_tokens": 4, "do_sample": False}
    with chat.attached() as cache:
        prompt = tokens(300, 1)
        answers = [chat.model.generate(prompt, **arguments) for _ in range(2)]
        cache.flush()
    assert torch.equal(*answers)
    assert [record.computed_tokens for record in chat.records] == [300, 44]


def test_after_a_cast_what_continues_by_single_tokens_is_never_computed_in_units() -> None:
    """Its scan of several tokens ignores the state before them: a second unit would be wrong."""
    model = small_model("jamba", False, max_position_embeddings=1024)
    chat, prompt = Chat(model), tokens(300, 1)
    with chat.attached() as cache:
        chat.ask(cache, tokens(40, 1))
        model.to(torch.bfloat16)
        for _ in range(2):
            chat.ask(cache, prompt)


def prepared(engine: TransformersEngine, **wishes: Any) -> Prepared:
    return Prepared(replace(request("a prompt"), **wishes), tuple(range(5, 45)), epoch=engine.epoch)


@pytest.mark.parametrize("name", ["bamba", "jamba"])
def test_a_model_with_such_layers_is_not_pruned(name: str) -> None:
    engine = TransformersEngine(small_model(name, False), Numbers())
    engine.pruning = PruneConfig()
    completion = engine.run(prepared(engine))
    assert (completion.approximate, len(completion.token_ids) > 0) == (False, True)


def test_nothing_is_copied_of_a_prompt_of_which_nothing_is_stored() -> None:
    engine = TransformersEngine(small_model("lfm2_moe", False), Numbers())
    assert engine.run(prepared(engine)).snapshots
    assert not engine.run(prepared(engine, no_store=True)).snapshots


def test_a_blend_of_such_a_model_is_refused_with_the_reason() -> None:
    engine = TransformersEngine(small_model("lfm2_moe", False), Numbers())
    refusal = engine.blend(Prepared(request("5 6 7"), (5, 6, 7)), ())
    assert isinstance(refusal, Refusal)
    assert "recurrent state" in refusal.reason
    assert "use exact reuse" in refusal.reason


def test_costs_tell_the_bytes_of_a_snapshot_and_of_a_token() -> None:
    engine = TransformersEngine(small_model("bamba", False), Numbers())
    completion, costs = engine.run(prepared(engine)), engine.costs(timed=False)
    assert costs is not None
    (capture,) = completion.snapshots.values()
    snapshot, rows = capture(), completion.capture()
    assert snapshot is not None
    assert rows is not None
    assert costs.snapshot_bytes == snapshot.nbytes > 0
    assert costs.token_bytes == rows.nbytes / completion.prompt_tokens > 0


def test_without_the_check_at_loading_nothing_is_reused() -> None:
    engine = TransformersEngine(small_model("lfm2_moe", False), Numbers(), check=False)
    assert "check at loading" in engine.no_reuse
