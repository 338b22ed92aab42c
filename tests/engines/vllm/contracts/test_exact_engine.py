"""Exact reuse in a real engine with default settings: docs-lm in fp32, seen through its answers and its figures."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams
from vllm_harness import Engine, Output, running, tokens

LENGTHS = (17, 32, 33, 64, 300, 501, 700)
PROMPTS = [tokens(length, length) for length in LENGTHS]
LONGEST = PROMPTS[-1]
ROW = 2 * 4 * 2 * 64 * 4
"""Bytes of a token in docs-lm's cache."""
NEW = "no stored prompt begins like this one"


@pytest.fixture(scope="module")
def truth() -> list[tuple[int, ...]]:
    """The answers of an engine that reuses nothing, each prompt alone."""
    with running(connector=False, enable_prefix_caching=False) as engine:
        return [engine.ask([prompt])[0].tokens for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def engine(truth: Any, folder: str) -> Iterator[Engine]:
    with running(extra={"store_dir": folder}) as started:
        yield started


def again(engine: Engine, prompts: list[list[int]], **options: Any) -> list[Output]:
    """What prompts get that find nothing in vLLM's own cache, all in one batch."""
    engine.settle()
    engine.reset_prefix_cache()
    return engine.ask(prompts, **options)


def test_hits_answer_as_full_computation_and_are_counted(engine: Engine, truth: Any) -> None:
    first = again(engine, PROMPTS)
    assert [(one.told["method"], one.told["reason"], one.cached) for one in first] == [("none", NEW, 0)] * len(PROMPTS)
    hits = again(engine, PROMPTS)
    assert [(one.told["method"], one.told["level"]) for one in hits] == [("exact", "exact_text")] * len(PROMPTS)
    assert [one.computed for one in hits] == [1] * len(PROMPTS)
    assert [one.tokens for one in first] == [one.tokens for one in hits] == truth
    figures = engine.metrics()
    loaded = sum(length - 1 for length in LENGTHS) * ROW
    assert sum(one.told["bytes_loaded"] for one in hits) == figures["vllm:dejakv_loaded_bytes"] == loaded
    counts = [figures[f"vllm:dejakv_{name}"] for name in ("loads", "saves", "loaded_donors")]
    assert counts == [len(PROMPTS)] * 3
    assert figures["vllm:dejakv_lookups"] >= 2 * len(PROMPTS)
    assert not figures.get("vllm:dejakv_load_failures")
    assert not figures.get("vllm:dejakv_saves_dropped")


def test_hits_and_misses_share_a_step(engine: Engine, truth: Any) -> None:
    new = tokens(100, 7)
    mixed = again(engine, [LONGEST, new, PROMPTS[4], LONGEST + new], wish={"no_store": True})
    assert [one.told["level"] for one in mixed] == ["exact_text", "", "exact_text", "prefix"]
    assert [one.computed for one in mixed] == [1, 100, 1, 100]
    assert [mixed[0].tokens, mixed[2].tokens] == [truth[-1], truth[4]]


def test_samples_of_one_prompt_are_each_right_and_leave_no_block(engine: Engine, truth: Any) -> None:
    engine.settle()
    engine.reset_prefix_cache()
    params = SamplingParams(n=4, temperature=1.0, top_k=1, max_tokens=6, ignore_eos=True)
    (made,) = engine.llm.generate([{"prompt_token_ids": LONGEST}], params, use_tqdm=False)
    assert [tuple(one.token_ids) for one in made.outputs] == [truth[-1]] * 4
    engine.settle()
    assert engine.metrics()["vllm:kv_cache_usage_perc"] == 0


def test_who_did_not_ask_is_told_nothing(engine: Engine) -> None:
    """A router would take `kv_transfer_params` in a response for orders."""
    engine.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    (made,) = engine.llm.generate([{"prompt_token_ids": LONGEST}], params, use_tqdm=False)
    assert made.num_cached_tokens == len(LONGEST) - 1
    assert made.kv_transfer_params is None


def test_probabilities_of_the_prompt_need_all_of_it(engine: Engine) -> None:
    (output,) = again(engine, [LONGEST], prompt_logprobs=1)
    assert output.cached == 0
    assert output.told["reason"] == "prompt_logprobs need every prompt token computed"


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_costs_nothing(engine: Engine, truth: Any, level: int) -> None:
    """vLLM resets connectors when it goes to sleep. The weights are the same afterwards, so what is stored is found."""
    engine.settle()
    engine.core.sleep(level)
    engine.core.wake_up()
    outputs = engine.ask([LONGEST, tokens(80, level)])
    assert [output.told["method"] for output in outputs] == ["exact", "none"]
    assert outputs[0].tokens == truth[-1]
    assert again(engine, [tokens(80, level)])[0].told["method"] == "exact"


def test_a_sleep_ends_what_runs(engine: Engine, truth: Any) -> None:
    """Requests that vLLM aborts for a pause hold no block for a copy of their state: the reset would fail."""
    engine.reset_prefix_cache()
    greedy = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    engine.llm.llm_engine.add_request("one", {"prompt_token_ids": tokens(90, 9)}, greedy)
    while not engine.llm.llm_engine.step():  # its first token is out, and its state is not yet copied
        pass
    engine.core.sleep(1)
    engine.core.wake_up()
    engine.llm.llm_engine.abort_request(["one"])  # in one process, vLLM tells its own front nothing of it
    (output,) = engine.ask([LONGEST])
    assert (output.told["method"], output.tokens) == ("exact", truth[-1])


def test_weights_that_are_loaded_again_end_reuse_until_a_reset(engine: Engine, truth: Any) -> None:
    """The same checkpoint: packed weights of vLLM's CPU kernels are made anew then, and nobody can compare them."""
    engine.settle()
    engine.llm.collective_rpc("reload_weights")
    engine.ask([tokens(60, 8)])
    (output,) = again(engine, [LONGEST])
    assert (output.told["method"], output.tokens) == ("none", truth[-1])
    assert "without a reset" in output.told["reason"]
    engine.settle()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert [again(engine, [LONGEST])[0].told["method"] for _ in range(2)] == ["none", "exact"]


@pytest.mark.shows("exact", "generated", "drafts", model="docs-lm")
def test_a_restart_finds_all_of_it(engine: Engine, truth: Any, folder: str) -> None:
    """With speculative decoding from then on, by n-grams of the text, which have no state in the KV cache."""
    engine.ask(PROMPTS)
    engine.settle()
    engine.close()
    extra, chat = {"store_dir": folder, "generated_text": "keep"}, tokens(40, 6)
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    options = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "speculative_config": drafting}
    with running(extra=extra, **options) as other:
        hits = other.ask([*PROMPTS, tokens(300, 5)])
        # The next turn of a chat finds the whole pages of the answer, too.
        next_turn = [*chat, *other.ask([chat], max_tokens=70)[0].tokens, *tokens(9, 6)]
        second, full = (again(other, [next_turn], wish={"mode": mode})[0] for mode in ("exact", "off"))
        counted = other.metrics()
    accepted, drafted = (counted[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert 0 < accepted < drafted
    assert (second.cached, full.cached, second.tokens == full.tokens) == (96, 0, True)
    assert [one.told["method"] for one in hits] == ["exact"] * len(PROMPTS) + ["none"]
    assert [one.tokens for one in hits[:-1]] == truth
