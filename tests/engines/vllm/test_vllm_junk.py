"""Whatever clients put into `kv_transfer_params`: every request is answered as without it, and the engine goes on."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm import SamplingParams
from vllm_harness import BLENDING, Engine, running, tokens

from dejakv.errors import ConfigError
from dejakv.experiments.vllm_engine import KV_CONNECTOR

REQUESTS, BATCH = 600, 30
PROMPTS = [tokens(70, seed) for seed in range(6)]
NESTED: Any = "x"
for _ in range(200):
    NESTED = [NESTED]
ATOMS = (
    None, True, False, 0, 1, -1, 0.5, 1e308, float("nan"), float("inf"), -0.0, 2**64 - 1, -(2**63), "", "exact", "off", "blend", "EXACT",
    "dejakv", "\ud800", "\x00", "a" * 100_000, "../../etc/passwd", "{0}%s", b"\xff", [], {}, [[]], {"": {}}, (), [None] * 300, NESTED,
)  # fmt: skip
NAMES = ("mode", "threshold", "no_store", "ttl", "donors", "donor", "Mode", "", "dejakv", 7, None, 2**63, "\udfff")
OTHERS = (
    {"do_remote_prefill": False}, {"do_remote_decode": True}, {"remote_block_ids": [1, 2]}, {"remote_engine_id": "x"}, {"dejakv": None},
)  # fmt: skip


def junk(rng: random.Random, depth: int = 0) -> Any:
    """A value of any kind."""
    if depth > 2 or rng.random() < 0.6:
        return rng.choice(ATOMS)
    if rng.random() < 0.5:
        return [junk(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(NAMES): junk(rng, depth + 1) for _ in range(rng.randrange(4))}


def parameters(rng: random.Random) -> Any:
    """Parameters of a request: of a right form with wrong values, or of no form."""
    ours = {rng.choice(NAMES[:5]): junk(rng, 1) for _ in range(rng.randrange(4))}
    return {**rng.choice((*OTHERS, {})), "dejakv": ours if rng.random() < 0.7 else junk(rng)}


@pytest.fixture(params=["alone with blends", "below MultiConnector"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    ours = {"store": str(tmp_path / "ours")}
    theirs = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "theirs")},
    }
    multi = [{**KV_CONNECTOR, "kv_connector_extra_config": ours}, theirs]
    more = BLENDING if request.param == "alone with blends" else {}
    with running(extra=ours | more, multi=multi if "Multi" in request.param else None) as started:
        yield started


def test_no_parameters_end_the_engine(engine: Engine) -> None:
    """Finished and aborted requests; what the client is told can be sent to it."""
    rng, llm = random.Random(7), engine.llm.llm_engine
    truth = {number: engine.ask([prompt], max_tokens=3)[0].tokens for number, prompt in enumerate(PROMPTS)}
    told, exact = list[dict[str, Any]](), 0
    for batch in range(REQUESTS // BATCH):
        asked: dict[str, tuple[int, Any]] = {}
        for each in range(BATCH):
            name, number, params = f"{batch}-{each}", rng.randrange(len(PROMPTS)), parameters(rng)
            sampling = SamplingParams(
                temperature=0, max_tokens=3, ignore_eos=True, extra_args={"kv_transfer_params": params}
            )
            llm.add_request(name, {"prompt_token_ids": PROMPTS[number]}, sampling)
            asked[name] = number, params
        gone = rng.sample(sorted(asked), 3)
        steps = 0
        while llm.has_unfinished_requests():
            steps += 1
            for output in llm.step():
                if not output.finished or output.request_id in gone:
                    continue
                number, params = asked.pop(output.request_id)
                heard = output.kv_transfer_params
                assert (heard is not None) == ("dejakv" in params), params
                told.append(heard["dejakv"])
                if not told[-1]["approximate"]:
                    exact += 1
                    assert list(output.outputs[0].token_ids) == list(truth[number]), params
            if steps == 2:
                llm.abort_request(gone)
        assert set(asked) <= set(gone)
    assert exact > REQUESTS // 2
    assert len({each["reason"][:9] for each in told}) > 8, "mistakes of many kinds, each with its reason"
    for each in told:
        json.dumps(each).encode()
        msgspec.msgpack.encode(each)
    engine.reset_prefix_cache()


@pytest.mark.parametrize("nested", [False, True])
def test_two_of_ours_below_multi_connector_are_refused(tmp_path: Path, nested: bool) -> None:
    """Both would answer under one name, and vLLM ends its engine then."""
    two: list[dict[str, Any]] = [
        {**KV_CONNECTOR, "kv_connector_extra_config": {"store": str(tmp_path / name)}} for name in ("one", "two")
    ]
    if nested:
        below = {"connectors": two[1:]}
        two[1] = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": below}
    with pytest.raises(ConfigError, match=r"has DejaKVConnector twice.*leave one out"), running(multi=two):
        pass
