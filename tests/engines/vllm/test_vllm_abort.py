"""Clients that leave: vLLM goes on with nothing of theirs."""

from typing import Any

from vllm_harness import EXTENSION, Engine, running, tokens

A = tokens(900, 1)
BLENDS = [f"blend-{number}" for number in range(10)]


def params(mode: str, count: int) -> Any:
    from vllm import SamplingParams

    wish = {"kv_transfer_params": {"dejakv": {"mode": mode, "no_store": True}}}
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, extra_args=wish)


def used(engine: Engine) -> float:
    """Share of vLLM's KV blocks that requests hold."""
    return engine.metrics()["vllm:kv_cache_usage_perc"]


def counted(engine: Engine, name: str) -> float:
    return engine.metrics().get(name, 0)


def test_aborted_blends_stop_at_the_next_step() -> None:
    """Ten blends are under way, of which a step computes 256 rows; their blocks are free in the step after the abort."""
    extra = {"modes": ["off", "exact", "blend"], "lookup_timeout_s": 30.0, "load_timeout_s": 60.0}
    with running(extra=extra, worker_extension_cls=EXTENSION, max_num_batched_tokens=256, max_num_seqs=32) as engine:
        engine.ask([A])
        engine.settle()
        engine.reset_prefix_cache()
        llm = engine.llm.llm_engine
        llm.add_request("decode", {"prompt_token_ids": tokens(40, 7)}, params("off", 200))
        llm.step()
        llm.step()
        before = used(engine)
        for number, name in enumerate(BLENDS):
            llm.add_request(name, {"prompt_token_ids": tokens(30, 30 + number) + A[100 + number :]}, params("blend", 1))
        while used(engine) < 10 * before:  # each holds 26 blocks or more
            llm.step()
        llm.step()
        llm.abort_request(BLENDS)
        for _ in range(2):
            llm.step()
        assert used(engine) <= 2 * before
        loads = counted(engine, "vllm:dejakv_loads")
        assert counted(engine, "vllm:dejakv_load_failures") >= 1, "a busy machine may not have found all donors yet"
        for _ in range(10):
            llm.step()
        assert counted(engine, "vllm:dejakv_loads") == loads, "nothing is blended for a client that has left"
