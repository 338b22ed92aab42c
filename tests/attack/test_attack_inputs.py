"""Hostile inputs to a server, of this process and another's: they are refused, and a server that is harmed is found out."""

import gc
import mmap
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.attack.weak import TINY
from tests.serving import Running, until

from dejakv.api_keys import bearer_key
from dejakv.attack.client import Pace, SpentError
from dejakv.attack.hostile_inputs import HostileInputs
from dejakv.attack.memory import resident, watched
from dejakv.attack.scene import Scene
from dejakv.attack.suite import ATTACKS, attack
from dejakv.attack.target import NO_KEYS, ONE_KEY, Target, open_target
from dejakv.server import bodies
from dejakv.server.gate import Gate
from dejakv.server.settings import ServerSettings

Scenes = Callable[..., Scene]


def test_hostile_inputs_are_refused(scene: Scenes) -> None:
    result = HostileInputs().run(scene())
    assert result.verdict == "held", result.reason


def test_an_input_that_fails_inside_is_found(scene: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = bodies._parsed

    async def fragile(model: Any, raw: bytes, *more: Any) -> Any:
        if b"\xff" in raw:
            raise RuntimeError("nobody expected this")
        return await parsed(model, raw, *more)

    monkeypatch.setattr(bodies, "_parsed", fragile)
    result = HostileInputs().run(scene())
    assert result.verdict == "broken"
    assert "broken UTF-8: status 500" in result.reason


def test_an_input_that_is_served_is_found(scene: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(gate: Gate, scope: Any) -> Any:
        """Reads the key, and counts no headers."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        return gate._keys.caller(bearer_key(given.decode()))

    monkeypatch.setattr(Gate, "_caller", careless)
    result = HostileInputs().run(scene())
    assert "hundreds of headers: status 200" in result.findings


@pytest.mark.skipif(resident() is None, reason="this system does not tell a process's memory")
def test_growth_of_memory_is_seen() -> None:
    """Pages of its own, and many: what other tests leave behind may be given back meanwhile."""
    gc.collect()
    with watched() as growth, mmap.mmap(-1, 512 << 20) as held:
        held[:: mmap.PAGESIZE] = b"x" * (len(held) // mmap.PAGESIZE)
        until(lambda: (growth.most or 0) > 48 << 20)


@pytest.fixture(scope="module")
def server(docs_engine: Any) -> Iterator[Running]:
    with Running(ServerSettings(api_keys="alpha,beta", costs=(1e-4, 0.0, 0.0, 0.0)), docs_engine) as running:
        yield running


def remote(running: Running, *keys: str | None, total: int = 2000) -> Target:
    return open_target(urlsplit(running.url), *keys, Pace(0.0, total))


def test_a_server_of_ones_own_is_attacked_from_outside(server: Running) -> None:
    target = remote(server, "alpha", "beta")
    with Scene(TINY, model=target.model, server=target) as scene:
        done = {one.name: one.result for one in attack(scene)}
    assert list(done) == [one.name for one in ATTACKS]
    assert target.model == "docs-lm"
    for one in ATTACKS:
        result = done[one.name]
        if one.name != "timing":  # a dozen times on a busy machine decide nothing
            assert result.verdict == ("held" if one.outside else "not applicable"), result.reason
    assert "not tried" in str(done["probing over HTTP"].figures["evictions, clearing"])
    target.close()


def test_no_more_is_sent_than_was_announced(server: Running) -> None:
    target = remote(server, "alpha", "beta", total=20)
    with Scene(TINY, model=target.model, server=target) as scene:
        done = list(attack(scene, [one for one in ATTACKS if one.outside]))
    assert {one.result.verdict for one in done} == {"not applicable"}
    assert all("20 requests" in one.result.reason for one in done)
    assert target.pace.sent == 20
    with pytest.raises(SpentError):
        target.first.get("/health")
    target.close()


def test_one_key_has_nobody_to_attack(server: Running) -> None:
    target = remote(server, "alpha", None)
    assert target.alone == ONE_KEY
    with Scene(TINY, model=target.model, server=target) as scene:
        done = {one.name: one.result for one in attack(scene, [one for one in ATTACKS if one.outside])}
    assert done["probing over HTTP"].reason == ONE_KEY
    assert "within a partition (AUC)" in done["timing"].figures
    assert done["poisoning"].verdict == "held"
    target.close()


def test_a_server_without_keys_has_one_partition(docs_engine: Any) -> None:
    with Running(ServerSettings(), docs_engine) as running:
        target = remote(running, None, None)
        assert target.alone == NO_KEYS
        target.close()
