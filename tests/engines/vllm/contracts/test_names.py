"""Requests for a blend share blended blocks through vLLM's prefix cache; nobody else sees them."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_harness import EXTENSION, Engine, Steps, greedy, recomputing_none, running, tokens

from dejakv.cache import HierarchicalCache
from dejakv.engines.vllm.blend.blend import BlendRunner
from dejakv.engines.vllm.blend.names import ApproximateNames
from dejakv.engines.vllm.request import RequestState
from dejakv.engines.vllm.settings import ConnectorSettings, RequestOptions

BLOCK = 32
DONORS = [tokens(230, seed) for seed in (701, 702, 703)]
PROMPT = tokens(30, 704) + DONORS[0][20:220] + DONORS[1][20:220] + DONORS[2][20:220] + tokens(24, 705)
FIRST = tokens(40, 706) + DONORS[0][20:212] + tokens(24, 707)
SECOND = FIRST + DONORS[1][20:212] + tokens(24, 708)
THIRD = SECOND + DONORS[2][20:212] + tokens(24, 709)
BLEND, EXACT, OFF = ({"mode": mode, "no_store": True} for mode in ("blend", "exact", "off"))
SETTINGS = {"modes": ["off", "exact", "blend"], "blend_max_share": 1.0, "max_generation": 2}
OPTIONS = {
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "enable_chunked_prefill": True,
    "num_gpu_blocks_override": 97,
}


@pytest.fixture(scope="module")
def events() -> list[Any]:
    """KV events as vLLM publishes them."""
    return []


@pytest.fixture(scope="module")
def started(events: list[Any]) -> Iterator[Engine]:
    from vllm.config import KVEventsConfig

    published = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with running(extra=SETTINGS, worker_extension_cls=EXTENSION, kv_events_config=published, **OPTIONS) as made:
        made.core.scheduler.kv_event_publisher.publish = lambda batch: events.extend(batch.events)
        made.ask(DONORS)
        made.settle()
        yield made


@pytest.fixture
def engine(started: Engine) -> Engine:
    """With nothing in vLLM's own cache."""
    started.settle()
    started.reset_prefix_cache()
    return started


@pytest.fixture
def steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    made = Steps(engine)
    monkeypatch.setattr(engine.llm.llm_engine, "step", made.step)
    yield made
    made.hook.remove()


def truth(engine: Engine, prompt: list[int]) -> tuple[int, ...]:
    """The answer of full computation, of which nobody else sees anything."""
    return engine.ask([prompt], wish=OFF, salt="truth")[0].tokens


def add(engine: Engine, name: str, prompt: list[int] = PROMPT, count: int = 6) -> None:
    engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, greedy(count, **BLEND))


def finish(engine: Engine) -> dict[str, dict[str, Any]]:
    """What each of the requests that are under way is told."""
    told: dict[str, dict[str, Any]] = {}
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            if output.finished:
                told[output.request_id] = output.kv_transfer_params["dejakv"]
    return told


def asking(name: str, prompt_tokens: int = 13) -> RequestState:
    """A request with hashes of 2 tokens each."""
    hashes = [bytes([number]) for number in range(prompt_tokens // 2)]
    request = SimpleNamespace(
        request_id=name, num_prompt_tokens=prompt_tokens, block_hashes=hashes, _block_hasher=lambda request: []
    )
    return RequestState(request, RequestOptions("blend"), None, 0.0)


@pytest.mark.parametrize("most", [0, 2])
def test_blocks_are_found_by_the_last_hash_of_their_tokens_and_waited_for_until_they_are_made(most: int) -> None:
    """Of four tokens each. 0: none is shared, so that nobody waits for one."""
    names, maker, other = ApproximateNames(ConnectorSettings(), 2, 4, most), asking("maker"), asking("other")
    assert names.rename(maker, 0)
    maker.blend_depth = 1
    names.note_blend(maker)
    assert names.awaits(other, 0) == names.awaits(other, 4) == (most > 0)
    assert not names.awaits(maker, 0)
    names.note_filed("maker")
    assert not names.awaits(other, 0)
    names.is_cached = set(maker.request.block_hashes[1::2]).__contains__
    assert names.find_approximate(other, 0) == ((12, 1) if most else (0, 0))
    assert names.find_approximate(other, 4) == ((8, 1) if most else (0, 0))
    assert names.find_approximate(asking("short", 12), 0)[0] == (8 if most else 0), "vLLM computes the last token"


def test_what_the_prefix_cache_holds_of_a_long_prompt_is_looked_at_where_it_ends() -> None:
    """In each step for each prompt that waits: not all of its blocks again."""
    names, waits, looked = ApproximateNames(ConnectorSettings(), 2, 4, 2), asking("waits"), list[bytes]()
    blocks = [number.to_bytes(2, "big") for number in range(2000)]
    waits.request.block_hashes, waits.request.num_prompt_tokens = blocks, 4001
    for held in (400, 401, 398, 1000, 0, 7):
        cached = set(blocks[1 : 2 * held : 2])
        names.is_cached = lambda name, cached=cached: bool(looked.append(name)) or name in cached
        assert names.count_cached(waits) == names.count_cached(waits) == 4 * held
        looked.clear()
        assert names.count_cached(waits) == 4 * held
        assert len(looked) <= 2


def test_choices_of_a_prompt_take_its_blocks_once(engine: Engine, steps: Steps) -> None:
    from vllm import SamplingParams

    blocks, computed = {}, {}
    for mode in ("off", "blend"):
        engine.reset_prefix_cache()
        used: list[float] = []
        steps.tokens, steps.then = [], lambda used=used: used.append(engine.metrics()["vllm:kv_cache_usage_perc"])
        wish = {"kv_transfer_params": {"dejakv": {"mode": mode, "no_store": True}}}
        params = SamplingParams(n=8, max_tokens=40, ignore_eos=True, extra_args=wish)
        (output,) = engine.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        assert output.kv_transfer_params["dejakv"]["approximate"] == (mode == "blend")
        blocks[mode], computed[mode] = max(used), sum(steps.tokens)
    assert 0 < blocks["blend"] <= 1.1 * blocks["off"]
    assert computed["blend"] < computed["off"]


def test_the_same_prompt_is_blended_once_and_all_are_told(engine: Engine) -> None:
    outputs = engine.ask([PROMPT] * 8, wish=BLEND)
    told = [output.told for output in outputs]
    assert all(one["method"] == "blend" and one["approximate"] and not one["bitwise"] for one in told)
    assert sorted(one["level"] for one in told) == ["copied"] + ["prefix"] * 7
    shared = (len(PROMPT) - 1) // BLOCK * BLOCK
    assert [one["tokens_reused"] for one in told if one["level"] == "prefix"] == [shared] * 7
    assert len({output.tokens for output in outputs}) == 1


def test_the_next_turn_shares_the_answer_and_an_exact_request_shares_nothing(engine: Engine) -> None:
    with recomputing_none():
        (first,) = engine.ask([FIRST], wish={"mode": "blend"}, max_tokens=80)
        assert first.tokens[:6] != truth(engine, FIRST), "the blend must be wrong, or this shows nothing"
        engine.settle()
        turn, before = [*FIRST, *first.tokens, *tokens(20, 710)], engine.metrics()
        (second,) = engine.ask([turn], wish={"mode": "blend"})
        engine.settle()
    stored = ("vllm:dejakv_saves", "vllm:dejakv_rows_kept")
    assert [engine.metrics().get(name) for name in stored] == [before.get(name) for name in stored]
    assert (second.told["level"], second.told["approximate"], second.told["tokens_recomputed"]) == ("prefix", True, 0)
    assert second.cached == (len(FIRST) + len(first.tokens) - 1) // BLOCK * BLOCK
    for prompt in (turn, FIRST):
        (exact,) = engine.ask([prompt], wish=EXACT)
        assert (exact.told["approximate"], exact.tokens) == (False, truth(engine, prompt))
    assert engine.ask([turn], wish=BLEND)[0].told["approximate"] is False, "what is exact is preferred"


def test_a_repeat_alone_is_computed_and_replaces(engine: Engine) -> None:
    """Beside another request it shares."""
    with recomputing_none():
        engine.ask([PROMPT], wish=BLEND)
        repeated, _ = engine.ask([PROMPT, tokens(100, 711)], wish=BLEND)
        assert (repeated.told["level"], repeated.told["approximate"]) == ("prefix", True)
        (alone,) = engine.ask([PROMPT], wish=BLEND)
        assert alone.told["reason"] == "computed in full: blended before"
        (after,) = engine.ask([PROMPT], wish=BLEND)
    assert (alone.cached, after.cached) == (0, (len(PROMPT) - 1) // BLOCK * BLOCK)
    for output in (alone, after):
        assert (output.told["approximate"], output.tokens) == (False, truth(engine, PROMPT))


def failing(*given: Any) -> Any:
    raise RuntimeError("no memory")


def test_a_blend_that_fails_behind_shared_blocks_leaves_the_answer_approximate(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks for it again, and it takes those blocks again."""
    prompt = tokens(20, 730) + SECOND
    with recomputing_none():
        engine.ask([prompt[: len(FIRST)]], wish=BLEND)
    before = engine.metrics()
    with monkeypatch.context() as patch:
        patch.setattr(BlendRunner, "begin", failing)
        (failed,) = engine.ask([prompt], wish={"mode": "blend"})
    assert failed.told["reason"] == "the load failed: RuntimeError"
    assert (failed.told["approximate"], failed.told["bitwise"], failed.told["level"]) == (True, False, "prefix")
    engine.settle()
    stored = ("vllm:dejakv_saves", "vllm:dejakv_rows_kept")
    assert [engine.metrics().get(name) for name in stored] == [before.get(name) for name in stored]
    (exact,) = engine.ask([prompt], wish=EXACT)
    assert (exact.cached, exact.tokens) == (0, truth(engine, prompt))


def test_a_blend_that_fails_behind_exact_blocks_leaves_exact_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(2 * BLOCK, 731) + PROMPT
    engine.ask([prompt[: 2 * BLOCK + 1]], wish=OFF)
    with monkeypatch.context() as patch:
        patch.setattr(BlendRunner, "begin", failing)
        (failed,) = engine.ask([prompt], wish=BLEND)
    assert (failed.told["reason"], failed.told["approximate"]) == ("the load failed: RuntimeError", False)
    (exact,) = engine.ask([prompt], wish=EXACT)
    assert (exact.cached, exact.tokens) == ((len(prompt) - 1) // BLOCK * BLOCK, truth(engine, prompt))


def test_a_retry_shares_what_the_client_left(engine: Engine) -> None:
    prompt = tokens(20, 716) + PROMPT
    add(engine, "left", prompt, 200)
    while not engine.llm.llm_engine.step():
        pass
    engine.llm.llm_engine.abort_request(["left"])
    (again,) = engine.ask([prompt], wish=BLEND)
    assert (again.told["level"], again.told["tokens_recomputed"]) == ("prefix", 0)


def waiting(engine: Engine, *names: str, look: threading.Event | None = None) -> None:
    """All of them have been looked up, or one that was added before and waited for `look`."""
    before = engine.metrics().get("vllm:dejakv_lookups", 0)
    for name in names:
        add(engine, name)
    if look is not None:
        look.set()
    while engine.metrics().get("vllm:dejakv_lookups", 0) < before + max(1, len(names)):
        engine.llm.llm_engine.step()


def test_one_who_waits_goes_on_when_the_maker_leaves(engine: Engine, held: Callable[[str], threading.Event]) -> None:
    """The others wait for that one. All would go on when their time is over."""
    go = held("get_parts")
    waiting(engine, "maker")
    waiting(engine, "second", "third")
    engine.llm.llm_engine.abort_request(["maker"])
    go.set()
    told = finish(engine)
    assert sorted(one["level"] for one in told.values()) == ["copied", "prefix"]


def test_who_came_before_the_maker_waits_until_its_blocks_are_filed(
    engine: Engine, held: Callable[[str], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks for it first, in the very step that files them."""
    go, look, began, find = held("get_parts"), threading.Event(), threading.Event(), HierarchicalCache.find

    def slow(cache: Any, *given: Any) -> Any:
        if not began.is_set():
            began.set()
            look.wait(60)
        return find(cache, *given)

    monkeypatch.setattr(HierarchicalCache, "find", slow)
    add(engine, "early")
    while not began.is_set():
        engine.llm.llm_engine.step()
    waiting(engine, "maker")
    waiting(engine, look=look)
    go.set()
    told = finish(engine)
    assert {name: one["level"] for name, one in told.items()} == {"maker": "copied", "early": "prefix"}


def test_nobody_waits_longer_than_a_load_may_take(
    engine: Engine, held: Callable[[str], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed in place of a blend that failed is exact for everybody."""
    go, clock, late = held("get_parts"), time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + late[0])
    waiting(engine, "maker")
    waiting(engine, "second", "third")
    late[0] = 100.0
    engine.llm.llm_engine.step()
    assert not any(tracked.waits_for_maker for tracked in engine.connector.scheduler_side.requests.values())
    go.set()
    told = finish(engine)
    assert (told["maker"]["reason"], told["maker"]["approximate"]) == ("the load took too long: 60 s", False)
    assert not any(told[name]["approximate"] for name in ("second", "third")), "they take what the maker computed"
    (exact,) = engine.ask([PROMPT], wish=EXACT)
    assert (exact.cached, exact.tokens) == ((len(PROMPT) - 1) // BLOCK * BLOCK, truth(engine, PROMPT))


def test_approximate_state_is_not_blended_for_ever(engine: Engine) -> None:
    """Here twice. Blocks that a later turn shares count as before."""
    first, second, third = (engine.ask([prompt], wish=BLEND)[0] for prompt in (FIRST, SECOND, THIRD))
    assert [first.told["approximate"], second.told["approximate"]] == [True, True]
    assert second.told["tokens_reused"] > len(FIRST) // BLOCK * BLOCK
    assert (third.told["reason"], third.cached) == ("computed in full: blended too often", 0)
    assert (third.told["approximate"], third.tokens) == (False, truth(engine, THIRD))
    engine.reset_prefix_cache()
    other = FIRST + DONORS[2][20:212] + tokens(24, 712)
    for prompt in (FIRST, SECOND[:-20] + tokens(20, 715), other):
        assert engine.ask([prompt], wish=BLEND)[0].told["approximate"]


def test_other_partitions_choices_and_weights_share_nothing(engine: Engine) -> None:
    engine.ask(DONORS, salt="two")
    engine.settle()
    engine.reset_prefix_cache()
    key = engine.ask([DONORS[0]], wish=EXACT)[0].told["donor"]
    wishes = [BLEND, BLEND, {**BLEND, "threshold": 0.1}, {**BLEND, "donors": [key]}]
    together = engine.ask([PROMPT] * 4, wish=wishes, salt=[None, "two", None, None])
    later = [engine.ask([PROMPT], wish={**BLEND, "threshold": 0.2})[0]]
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    later += engine.ask([PROMPT], wish=BLEND)
    assert [one.told["method"] for one in (*together, *later)] == ["blend"] * 6
    assert not any(one.told["level"] == "prefix" for one in (*together, *later))


@pytest.mark.parametrize("report", ["incremental", "full"])
def test_events_do_not_tell_of_them(engine: Engine, events: list[Any], report: str) -> None:
    """Not of those of the answer either, nor when they leave."""

    def ask(prompt: list[int]) -> list[int]:
        params = greedy(80, **BLEND)
        params.extra_args["kv_cache_report_mode"] = report
        (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert output.kv_transfer_params["dejakv"]["approximate"]
        return [*prompt, *output.outputs[0].token_ids]

    def hashes(kind: str) -> set[bytes]:
        return {one for event in events if type(event).__name__ == kind for one in event.block_hashes}

    exact, question = FIRST[: 2 * BLOCK], tokens(20, len(report))
    engine.ask([exact + tokens(1, 713)], wish=OFF)
    began = len(events)
    ask(ask(FIRST + question) + question)
    told = [event.token_ids for event in events[began:] if type(event).__name__ == "BlockStored"]
    assert told == ([exact] * len(told) if report == "full" else [])
    assert told or report != "full"
    for seed in range(5):
        engine.ask([tokens(900, 720 + seed)], wish=OFF)
    assert hashes("BlockRemoved")
    assert hashes("BlockRemoved") <= hashes("BlockStored")


def test_text_beside_shared_blocks_is_not_kept(engine: Engine) -> None:
    """Which donors went into those is not known. Without them it is kept. The last test here: later blends may take it."""
    prompt = FIRST + tokens(64, 717) + DONORS[1][20:212] + tokens(24, 718)
    engine.ask([FIRST], wish=BLEND)
    kept = []
    for _ in range(2):
        (output,) = engine.ask([prompt], wish={"mode": "blend"})
        assert output.told["level"] == "copied"
        kept.append(output.told["rows_kept"])
        engine.settle()
        engine.reset_prefix_cache()
    assert kept[0] == 0 < kept[1]
