"""The part of an engine that answers prompts from other prompts' state: blends, and the top layer's KV."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dejakv.engines.base import Accept, Completion, OnToken, Prepared
from dejakv.engines.blending import later
from dejakv.engines.transformers.blending import plan_blend
from dejakv.engines.transformers.cost_meter import CostMeter
from dejakv.engines.transformers.first_logits import Declined
from dejakv.engines.transformers.planned import Planned
from dejakv.engines.transformers.top_layer import plan_top_layer, why_not
from dejakv.request import Sampling
from dejakv.reuse.blend import BlendConfig, BlendReport
from dejakv.reuse.top_layer import TopLayerConfig
from dejakv.store.base import Chunk
from dejakv.store.donors import Donor


class FromDonors:
    """`Blends` and `TakesTopLayer` of the transformers engine."""

    most_donors = None
    tells_first_token = True
    model: Any
    _meter: CostMeter

    def _run(
        self,
        prepared: Prepared,
        source: Any,
        sampling: Sampling | None,
        on_token: OnToken | None,
        accept: Accept | None = None,
    ) -> Completion:
        raise NotImplementedError

    def blend(
        self,
        prepared: Prepared,
        donors: Sequence[Donor],
        config: BlendConfig,
        *,
        sampling: Sampling | None = None,
        on_token: OnToken | None = None,
        accept: Accept | None = None,
    ) -> Completion | BlendReport:
        """See `Blends`."""
        begun = time.perf_counter()
        planned, report = plan_blend(self, prepared, donors, config)
        return self._from_donors(prepared, planned, report, begun, sampling, on_token, accept)

    def without_top_layer(self, *, unsound: bool) -> str:
        """See `TakesTopLayer`."""
        return why_not(self, unsound=unsound)

    def top_layer(
        self,
        prepared: Prepared,
        donors: Sequence[Chunk],
        config: TopLayerConfig,
        *,
        sampling: Sampling | None = None,
        on_token: OnToken | None = None,
        accept: Accept | None = None,
    ) -> Completion | BlendReport:
        """See `TakesTopLayer`."""
        begun = time.perf_counter()
        beams = (sampling or prepared.request.sampling).num_beams
        planned, report = plan_top_layer(self, prepared, donors, config, beams)
        return self._from_donors(prepared, planned, report, begun, sampling, on_token, accept)

    def _from_donors(
        self,
        prepared: Prepared,
        planned: Planned | None,
        report: BlendReport,
        begun: float,
        sampling: Sampling | None,
        on_token: OnToken | None,
        accept: Accept | None,
    ) -> Completion | BlendReport:
        """Runs what was planned since `begun`; the report alone where nothing was, or the first token was declined."""
        if planned is None:
            return report
        planning = time.perf_counter() - begun
        try:
            completion = self._run(prepared, planned, sampling, _labelled(on_token, planned.label), accept)
        except Declined as declined:
            return replace(report, reason=str(declined))
        if not completion.encoder_runs:
            self._meter.blended(planned.priced_rows(), report.tokens, planning - report.read_s + completion.ttft_s)
        loaded = completion.bytes_loaded + report.read_bytes
        completion = replace(completion, bytes_loaded=loaded, label=planned.label)
        return later(completion, planning, replace(planned.told(report), plan_s=planning))


def _labelled(on_token: OnToken | None, label: str) -> OnToken | None:
    """Hands the label out before the first token's text."""
    if on_token is None or not label:
        return on_token
    left = [label]

    def labelled(token: int, text: str) -> None:
        on_token(token, (left.pop() if left else "") + text)

    return labelled
