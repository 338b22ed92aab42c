"""A blend as if its prompt had never been computed: vLLM's prefix cache and the connector hold its exact state by then.

It runs under a name of its own, so that vLLM finds the exact prefix that there was before and no more. Like a repetition it is told its
donors, and is neither looked up, counted nor stored; nobody finds its blocks.
"""

from dataclasses import replace
from typing import Any

from dejakv.engines.base import Completion, OnToken, Prepared
from dejakv.engines.vllm import compat
from dejakv.engines.vllm.engine import VLLMEngine
from dejakv.engines.vllm.found import Found
from dejakv.request import Sampling
from dejakv.reuse.blend import BlendConfig


class Apart(VLLMEngine):
    """An engine for one blend, over what another one shares.

    kept  tokens of the exact prefix that there was
    """

    def __init__(self, engine: VLLMEngine, kept: int) -> None:
        vars(self).update(vars(engine))
        self._kept = kept
        self._name = f"{self._own}-apart-{next(self._shared.numbers)}"

    def _run(
        self,
        prepared: Prepared,
        wish: dict[str, Any],
        sampling: Sampling | None,
        on_token: OnToken | None,
        blending: BlendConfig | None = None,
    ) -> Completion:
        if blending is None:
            return super()._run(prepared, wish, sampling, on_token)
        side = compat.scheduler_of(self._shared.llm).connector.scheduler_side
        if self._kept:
            prefix = replace(prepared, token_ids=prepared.token_ids[: self._kept], inputs=None)
            super()._run(prefix, {"mode": "off", "no_store": True}, Sampling(1), None)
        side.repeating = Found("blend", tuple(wish["donors"]), len(prepared.token_ids), "named", 1.0)
        try:
            return super()._run(prepared, wish, sampling, on_token, blending)
        finally:
            side.repeating = None

    def _donors_salt(self, prepared: Prepared) -> str:
        return super()._salt(prepared)

    def _salt(self, prepared: Prepared) -> str:
        return f"{self._name}:{prepared.request.partition}"
