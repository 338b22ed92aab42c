"""Conformance suite of engines. Subclass it, define `make`, and let pytest collect it.

The suite of an engine of one's own:

    class TestMine(EngineTests):
        def make(self) -> Engine: return MyEngine(...)
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from dejakv.blend.settings import BlendConfig
from dejakv.decide.plan import PrefixPlan
from dejakv.engines.base import Completion, Engine, Prepared
from dejakv.errors import InputError, ModelChangedError
from dejakv.request import Request, Sampling
from dejakv.store.base import StateInfo, StoredState
from dejakv.store.open import open_store

TEXT = " ".join(f"the {colour} {thing} is in the {place} ." for colour, thing, place in [
    ("red", "ball", "garden"), ("old", "book", "kitchen"),
    ("small", "key", "office"), ("green", "lamp", "hall"),
] * 3)  # fmt: skip


class EngineTests:
    """Tests of every engine.

    `make` is called once for the class; greedy answers must not depend on earlier runs. `text`
    gives prompts of some dozens of tokens that all begin alike and end differently.
    """

    sampling = Sampling(max_new_tokens=6)

    def make(self) -> Engine:
        """Make the engine under test."""
        raise NotImplementedError("a conformance suite needs `make`: return an engine")

    def text(self, topic: int) -> str:
        """Return the prompt of a topic."""
        return f"{TEXT} where is item {topic} ?"

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        """Yield the class's engine, and close it after the last test."""
        engine = cls().make()
        yield engine
        engine.close()

    def prepared(self, engine: Engine, topic: int) -> Prepared:
        """Return a prompt under the engine's epoch, as a pipeline hands it over."""
        prompt = engine.prepare(
            Request(f"r{topic}", self.text(topic), self.text(topic), sampling=self.sampling)
        )
        return replace(prompt, epoch=engine.epoch)

    def whole(self, engine: Engine, topic: int) -> Completion:
        """Run a topic's prompt by full computation."""
        return engine.full(self.prepared(engine, topic))

    def test_it_has_a_name_and_an_epoch_that_stays(self, engine: Engine) -> None:
        """Check that name and epoch are there, and that the epoch is equal when read twice."""
        assert engine.name
        assert engine.epoch
        # Read twice: an engine may compute it anew each time.
        assert engine.epoch == engine.epoch

    def test_preparing_is_repeatable_and_keeps_the_request(self, engine: Engine) -> None:
        """Check that equal requests get equal tokens, and others get other tokens."""
        first, second = self.prepared(engine, 1), self.prepared(engine, 1)
        assert first.token_ids == second.token_ids
        assert first.request == second.request
        assert all(type(token) is int and token >= 0 for token in first.token_ids)
        assert self.prepared(engine, 2).token_ids != first.token_ids

    @pytest.mark.parametrize("prompt", ["", "  \n"])
    def test_an_empty_prompt_is_refused(self, engine: Engine, prompt: str) -> None:
        """Check that `prepare` raises InputError, with "empty" in it, for a blank prompt."""
        with pytest.raises(InputError, match="empty"):
            engine.prepare(Request("r", prompt, prompt))

    def test_a_prompt_longer_than_the_context_is_refused(self, engine: Engine) -> None:
        """Check the refusal of prompts beyond the context."""
        with pytest.raises(InputError, match=r"context|long"):
            engine.prepare(Request("r", "red ball " * 100_000, "c"))

    def test_a_run_tells_what_it_took(self, engine: Engine) -> None:
        """Check the counts and times of a completion."""
        done = self.whole(engine, 1)
        assert 1 <= len(done.token_ids) <= self.sampling.max_new_tokens
        assert done.prompt_tokens == len(self.prepared(engine, 1).token_ids)
        assert 1 <= done.computed_tokens <= done.prompt_tokens
        assert 0 < done.ttft_s <= done.latency_s
        assert done.encoder_runs == 0

    def test_answers_repeat_greedy_or_sampled_by_a_seed(self, engine: Engine) -> None:
        """Check that answers repeat, greedy or with a seed, whatever ran between."""
        first = self.whole(engine, 1)
        # Another prompt between the two, whose state must not remain.
        self.whole(engine, 2)
        again = self.whole(engine, 1)
        assert (again.token_ids, again.text) == (first.token_ids, first.text)
        warm = replace(self.sampling, temperature=1.5, seed=7)
        runs = [engine.full(self.prepared(engine, 1).sampled(warm)).token_ids for _ in range(2)]
        assert runs[0] == runs[1]

    def test_every_token_is_streamed_and_the_pieces_make_the_text(self, engine: Engine) -> None:
        """Check the tokens and texts passed to `on_token`."""
        streamed: list[tuple[int, str]] = []
        done = engine.full(
            self.prepared(engine, 3), on_token=lambda token, text: streamed.append((token, text))
        )
        assert tuple(token for token, _ in streamed) == done.token_ids
        assert "".join(text for _, text in streamed).strip() == done.text.strip()

    def test_threads_get_their_own_answers(self, engine: Engine) -> None:
        """Check that concurrent runs answer as runs alone do."""
        alone = [self.whole(engine, topic).token_ids for topic in range(4)]
        with ThreadPoolExecutor(4) as threads:
            got = list(threads.map(lambda topic: self.whole(engine, topic).token_ids, range(4)))
        assert got == alone

    def test_state_that_was_captured_gives_the_same_answer(self, engine: Engine) -> None:
        """Check runs from a prefix of the prompt's own state."""
        stored_state = self.captured(engine, 4)
        done = self.whole(engine, 4)
        # All but one at most: the last token's logits must be computed.
        for prefix_length in (
            1,
            stored_state.meta.num_tokens // 2,
            stored_state.meta.num_tokens - 1,
        ):
            again = self.begun(engine, self.prepared(engine, 4), stored_state, prefix_length)
            assert again.token_ids == done.token_ids
            assert again.computed_tokens == done.prompt_tokens - prefix_length

    def test_another_prompt_goes_on_from_what_both_begin_with(self, engine: Engine) -> None:
        """Check a run from the common prefix of another prompt's state."""
        stored_state, prepared = self.captured(engine, 5), self.prepared(engine, 6)
        pairs = zip(stored_state.meta.token_ids, prepared.token_ids, strict=False)
        common = next(
            place
            for place, (stored_token, prompt_token) in enumerate(pairs)
            if stored_token != prompt_token
        )
        assert common > 8, "texts of a suite begin alike"
        again = self.begun(engine, prepared, stored_state, common)
        assert again.token_ids == self.whole(engine, 6).token_ids

    def test_a_changed_model_is_noticed_before_anything_is_computed(self, engine: Engine) -> None:
        """Check that a prompt of another epoch is refused before its first token."""
        # The base class's method fingerprints nothing.
        if type(engine).weights_changed is Engine.weights_changed:
            pytest.skip("this engine does not follow its weights")
        streamed: list[int] = []
        with pytest.raises(ModelChangedError):
            engine.run(
                replace(self.prepared(engine, 1), epoch="another"),
                on_token=lambda token, _: streamed.append(token),
            )

        assert not streamed

    def test_a_blend_from_the_prompts_own_state_answers_the_same(self, engine: Engine) -> None:
        """Check a blend from the prompt's own state, and the reason where nothing is blended."""
        if type(engine).blend is Engine.blend:
            pytest.skip("this engine does not blend")

        stored_state, whole = self.captured(engine, 7), self.whole(engine, 7)
        done = engine.blend(self.prepared(engine, 7), [stored_state], BlendConfig(share=0.0))
        assert isinstance(done, Completion)
        report = done.details["blend"]
        assert report.blended
        assert done.token_ids == whole.token_ids
        assert done.computed_tokens < done.prompt_tokens
        # State of another model is refused with a reason, and the prompt is answered in full.
        foreign = StoredState(replace(stored_state.meta, epoch="another"), stored_state.tensor)
        report = engine.blend(self.prepared(engine, 7), [foreign], BlendConfig()).details["blend"]
        assert not report.blended
        assert report.reason

    def test_token_and_text_embeddings(self, engine: Engine) -> None:
        """Check shapes, type and length of embeddings."""
        ids = self.prepared(engine, 1).token_ids[:5]
        rows = engine.embed_tokens(ids)
        assert rows.shape[0] == 5
        assert rows.dtype == np.float32
        text = engine.embed_text("the red ball")
        assert text.shape == rows.shape[1:]
        assert float(np.linalg.norm(text)) == pytest.approx(1.0, abs=1e-4)

    def begun(
        self, engine: Engine, prepared: Prepared, stored_state: StoredState, prefix_length: int
    ) -> Completion:
        """Run a prompt from its first `prefix_length` tokens in a stored state."""
        store = open_store()
        store.put(stored_state)
        ran = engine.run(prepared, PrefixPlan((stored_state.meta,), None, prefix_length), store)
        assert isinstance(ran, Completion), ran.reason
        return ran

    def captured(self, engine: Engine, topic: int) -> StoredState:
        """Return the stored state of a prompt: `[2, layers, kv_heads, tokens, head_dim]`.

        The test is skipped for an engine that hands out no state.
        """
        if engine.holds_state:
            pytest.skip("this engine keeps its state")
        prepared = self.prepared(engine, topic)

        tensor = engine.full(prepared).capture()
        if tensor is None:
            pytest.skip("this engine hands out no state")
        assert tensor.shape[0] == 2
        assert tensor.shape[3] == len(prepared.token_ids)
        text = prepared.request.prompt
        return StoredState(
            StateInfo(f"c{topic}", "default", engine.epoch, prepared.token_ids, text, text), tensor
        )
