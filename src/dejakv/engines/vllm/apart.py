"""A blend as if its prompt had never been computed: vLLM's prefix cache and the connector hold its exact state by then.

It runs under a name of its own, so that vLLM finds the exact prefix that there was before and no more. Like a repetition it is told its
donors, and is neither looked up, counted nor stored; nobody finds its blocks.
"""

from collections.abc import Sequence
from dataclasses import replace

from dejakv.engines.base import Accept, Completion, OnToken, Prepared
from dejakv.engines.vllm import compat, named
from dejakv.engines.vllm.engine import VLLMEngine
from dejakv.engines.vllm.found import Found
from dejakv.request import Sampling
from dejakv.reuse.blend import BlendConfig, BlendReport
from dejakv.store.base import Chunk


class Apart(VLLMEngine):
    """An engine for one blend, over what another one shares.

    kept  tokens of the exact prefix that there was
    """

    def __init__(self, engine: VLLMEngine, kept: int) -> None:
        vars(self).update(vars(engine))
        self._kept = kept
        self._name = f"{self._own}-apart-{next(self._shared.numbers)}"

    def blend(
        self,
        prepared: Prepared,
        donors: Sequence[Chunk],
        config: BlendConfig,
        *,
        sampling: Sampling | None = None,
        on_token: OnToken | None = None,
        accept: Accept | None = None,
    ) -> Completion | BlendReport:
        """See `VLLMEngine.blend`. Raises: InputError."""
        why = named.why_not(prepared, donors, self._shared.settings, self.epoch, config)
        if why:
            return BlendReport(len(prepared.token_ids), reason=why)
        metas = [donor.meta for donor in donors[: self.most_donors]]
        wish = named.wish_for(metas, super()._salt(prepared), self.epoch)
        side = compat.scheduler_of(self._shared.llm).connector.scheduler_side
        with self._shared.lock:
            if self._kept:
                prefix = replace(prepared, token_ids=prepared.token_ids[: self._kept], inputs=None)
                self._run(prefix, {"mode": "off", "no_store": True}, Sampling(1), None)
            side.repeating = Found("blend", tuple(wish["donors"]), len(prepared.token_ids), "named", 1.0)
            try:
                return named.with_report(self._run(prepared, wish, sampling, on_token, config))
            finally:
                side.repeating = None

    def _salt(self, prepared: Prepared) -> str:
        return f"{self._name}:{prepared.request.partition}"
