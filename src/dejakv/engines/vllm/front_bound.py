"""An error bound in front of vLLM's server: what may be served approximately, and the labels that say so.

A label is two requests of the front's own to the server behind it, one in full and one from reuse, when no client's request is
running. Their priority is the lowest where vLLM schedules by priority. They wait in bounds, and are lost at a shutdown.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dejakv.build import build_gate
from dejakv.config import SemanticCacheConfig
from dejakv.engines.vllm.adopt import MODEL
from dejakv.engines.vllm.front_facts import Served
from dejakv.engines.vllm.inside import ask
from dejakv.engines.vllm.label_requests import Both, seen_of, told_in
from dejakv.engines.vllm.limits import NOTHING, Limit, Would
from dejakv.errors import ConfigError, InputError
from dejakv.guards.bounded import Asked, Bounded
from dejakv.identity import digest_of
from dejakv.trust.audits import SECONDS, Audit, Audits
from dejakv.trust.differs import Seen, differs_of

log = logging.getLogger("dejakv.trust")


class _Unlabelled(Exception):
    """There is no label, for a reason that the outcome has no part in."""


class FrontBound:
    """The gate of one front, and who waits for a label. Its methods are called in one event loop; `bounded` by any thread.

    config   with an error bound
    seconds  for which the two requests of a label may take

    Raises: ConfigError for a way to differ that no response can tell, StoreError for a folder that cannot be used.
    """

    def __init__(self, config: SemanticCacheConfig, *, seconds: float = SECONDS) -> None:
        differs = differs_of(config.differs)
        if differs.logits:
            raise ConfigError(
                f"differs={config.differs!r} compares distributions, and vLLM's responses have none: choose first, answer, tool or a "
                "function"
            )
        if config.cache_dir is not None:  # no store of the front's makes it
            Path(config.cache_dir).expanduser().mkdir(mode=0o700, parents=True, exist_ok=True)
        gate = build_gate(config)
        assert gate is not None
        self.gate = gate
        self.bounded = Bounded(gate, self._epoch_of)
        self.audits = Audits[Both](gate, differs)
        self.served = Served(f"unknown:{secrets.token_hex(16)}")
        self._seconds = seconds
        self._classes: dict[str, tuple[str, str]] = {}
        self._running = 0
        self._labelling: asyncio.Task[None] | None = None

    def limit(self, model: str, partition: str) -> Limit:
        """Of which blends of a model's are served now, as far as it is known what their evidence is kept under."""
        known = self._classes.get(model)
        if known is None:
            return Limit()
        epoch, setting = known
        risk = self.gate.limit(partition=partition, epoch=epoch, method="blend", setting=setting)
        return Limit(NOTHING if risk is None else risk, epoch, setting)

    def learn_class(self, model: str, would: Would) -> None:
        """What the evidence of a served model's blends is kept under."""
        self._classes[model] = (would.epoch, would.setting)

    def begin(self) -> None:
        """A client's request begins to run."""
        self._running += 1

    def end(self, app: Any) -> None:
        """It has ended: labels are made if nothing else runs."""
        self._running -= 1
        idle = self._labelling is None or self._labelling.done()
        if not self._running and idle and len(self.audits):
            self._labelling = asyncio.get_running_loop().create_task(self._label(app))

    async def close(self) -> None:
        """Loses what waits, and the label that is being made."""
        if self._labelling is not None:
            self._labelling.cancel()
            await asyncio.gather(self._labelling, return_exceptions=True)
        self.audits.close()
        self.gate.close()

    def report(self) -> dict[str, Any]:
        """What is known of all partitions together, for the operator."""
        report = self.gate.known()
        told = {} if report is None else asdict(report)
        told.pop("classes", None)
        return {**told, "waiting": len(self.audits)}

    def _epoch_of(self, prepared: Asked) -> str:
        return digest_of("front", self.served.epoch, str(prepared.request.metadata.get(MODEL, "")))[:32]

    async def _label(self, app: Any) -> None:
        """Labels what waits, while no client's request runs."""
        while not self._running and (audit := self.audits.take()) is not None:
            try:
                wrong = await self._wrong(app, audit)
            except _Unlabelled:
                self.audits.lose(audit)
                continue
            except Exception as error:  # nobody waits for it: what goes wrong must not reach a request that comes next
                log.warning("a label failed and counts as wrong: %s: %s", type(error).__name__, error, exc_info=error)
                wrong = True
            except BaseException:  # the server shuts down
                self.audits.learn(audit, True)
                raise
            await asyncio.to_thread(self.audits.learn, audit, wrong)

    async def _wrong(self, app: Any, audit: Audit[Both]) -> bool:
        both = audit.decision
        async with asyncio.timeout(self._seconds):
            full, _ = await _answer(app, both.scope, both.full)
            reused, told = await _answer(app, both.scope, both.reused)
        if both.approximate and not told.get("approximate"):
            raise _Unlabelled
        return await asyncio.to_thread(self.audits.differs.wrong, audit.request, full, reused)


async def _answer(app: Any, scope: Mapping[str, Any], body: Mapping[str, Any]) -> tuple[Seen, dict[str, Any]]:
    status, answer = await ask(app, scope, body)
    if status != 200:
        raise InputError(f"vLLM answered {status} to a request of a label")
    return seen_of(answer), told_in(answer)
