"""Speculative decoding, on the model of integers: what is stored of prompts and answers holds no state of a rejected draft."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy_engine
from toy_engine import BLOCK, ROW, ToyEngine, answer
from vllm.config import SpeculativeConfig
from vllm_harness import DOCS, tokens

from dejakv.engines.vllm.identity import server_epoch

DRAFTS = 3
PROMPTS = [tokens(length, 400 + length) for length in (40, BLOCK * 4, 77, 128)]
NEW = tokens(9, 22)


def right(engine: ToyEngine, *names: str) -> list[dict[str, Any]]:
    """What was told of these requests, each of which must have answered as full computation."""
    for name in names:
        asked = engine.asked[name]
        assert asked.tokens == answer(asked.prompt, asked.count, asked.weight)
    return [engine.asked[name].told for name in names]


@pytest.mark.parametrize("more", [{}, {"max_pending_bytes": 4 * BLOCK * ROW}], ids=["doubling", "two blocks at once"])
@pytest.mark.parametrize("budget", [24, 512])
def test_misses_hits_and_next_turns_answer_right(
    toy: Callable[..., ToyEngine], tmp_path: Path, budget: int, more: dict[str, Any]
) -> None:
    """Next turns begin with a whole answer, so that each of its stored pages is read."""
    extra = {"store": str(tmp_path), "generated_text": "keep", "memory_bytes": 0, "load_timeout_s": 60, **more}
    engine = toy(extra, drafts=DRAFTS, budget=budget, blocks=120)
    first = [engine.add(prompt, count=60 + number) for number, prompt in enumerate(PROMPTS)]
    engine.drain()
    assert {one["method"] for one in right(engine, *first)} == {"none"}
    assert engine.runner.rejected
    assert engine.runner.accepted

    engine.forget()
    again = [engine.add(prompt, count=20) for prompt in PROMPTS]
    engine.drain()
    reused = [one["tokens_reused"] for one in right(engine, *again)]
    # With little memory for saves a slow machine may store less of a prompt.
    short = 2 * BLOCK if more else 0
    assert all(0 <= len(prompt) - 1 - tokens <= short for prompt, tokens in zip(PROMPTS, reused, strict=True))

    engine = toy(extra, drafts=DRAFTS, budget=budget, blocks=120)
    for prompt in PROMPTS:
        length = 60 + PROMPTS.index(prompt)
        turn = [*prompt, *answer(prompt, length, engine.weight), *NEW]
        name = engine.add(turn, count=8)
        engine.drain()
        (told,) = right(engine, name)
        assert told["tokens_reused"] > len(prompt) - short


@pytest.mark.parametrize("answered", [1, 2, 9, 30])
def test_preempted_requests_go_on_as_they_began(toy: Callable[..., ToyEngine], answered: int) -> None:
    """Their drafts are forgotten with their blocks, and what was stored of the answer is right."""
    engine = toy({"generated_text": "keep", "load_timeout_s": 60}, drafts=DRAFTS, blocks=120)
    names = [engine.add(prompt, count=40) for prompt in PROMPTS]
    while any(len(engine.asked[name].tokens) < answered for name in names):
        engine.step()
    assert engine.reset(running=True)
    engine.forget()
    right(engine, *names)
    turns = [engine.add([*asked.prompt, *asked.tokens, *NEW]) for asked in map(engine.asked.get, names) if asked]
    engine.drain()
    assert all(told["tokens_reused"] for told in right(engine, *turns))


def test_many_hits_in_small_steps_come_to_their_end(toy: Callable[..., ToyEngine]) -> None:
    """vLLM schedules the last token behind a hit with drafts or not at all, and a limit below these would end its engine."""
    engine = toy({"load_timeout_s": 60}, drafts=DRAFTS, budget=16, blocks=120, seqs=8)
    for prompt in PROMPTS:
        engine.ask(prompt)
    engine.forget()
    hits = [engine.add(prompt, count=9) for prompt in PROMPTS for _ in range(3)]
    others = [engine.add(tokens(100, 60 + number), count=9) for number in range(4)]
    engine.drain()
    assert {one["method"] for one in right(engine, *hits, *others)} >= {"exact"}


def test_a_draft_model_is_part_of_the_names_of_what_its_layers_hold(tmp_path: Path) -> None:
    """By the content of its files. Drafts from the text alone leave nothing in the KV cache."""
    other = tmp_path / "other"
    shutil.copytree(DOCS, other)
    (other / "more.json").write_text("{}")

    def epoch(drafting: str, folder: Path | None = None, count: int = DRAFTS) -> str:
        config = copy.deepcopy(toy_engine._base_config())
        model = copy.copy(config.model_config) if folder else config.model_config
        model.model = str(folder or model.model)
        config.speculative_config = speculative = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=count,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        speculative.method, speculative.draft_model_config = drafting, model
        return server_epoch(config)

    alone = server_epoch(toy_engine._base_config())
    assert epoch("ngram") == alone
    assert epoch("draft_model", DOCS, 5) == epoch("draft_model", DOCS)
    assert len({alone, epoch("draft_model", DOCS), epoch("draft_model", other), epoch("eagle", DOCS)}) == 4
