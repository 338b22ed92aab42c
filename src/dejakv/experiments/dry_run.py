"""Would the levels have hit, and would the donor's answer have been right? Known without running the decoder.

Every sample is looked up as in a live run; a would-be hit is judged by the data set's answers: it is false if the
donor's question has another right answer than this one. (Not for blend and top_layer, which do not give the donor's answer.)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dejakv import __version__
from dejakv.build import build_cache
from dejakv.datasets.base import Sample
from dejakv.engines.base import NO_STATE, Completion, check_top_layer, costs_of
from dejakv.errors import InputError
from dejakv.experiments.compare import check_ran
from dejakv.experiments.prompting import Prompter
from dejakv.experiments.scoring import same, wilson
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.shares import share_figures
from dejakv.experiments.summary import counted
from dejakv.experiments.watch import Watch
from dejakv.records import APPROXIMATE
from dejakv.shares import Shares
from dejakv.store.memory import MemoryStore


def dry_run(
    settings: RunSettings, chosen: Sequence[Sample], engine: Any, prompter: Prompter, watch: Watch
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary and one line a sample. Only the tokenizer, the embedding table and the tower are used."""
    config = replace(settings.cache, error_bound=None)  # nothing runs from which a gate could learn
    check_top_layer(engine, config)
    cache = build_cache(config, engine, store=MemoryStore(), background=False)  # it stores no state
    shares = Shares()
    lines: list[dict[str, Any]] = []
    not_run: dict[str, str] = {}
    watch.stage(f"{settings.dataset}, dry run")
    for number, sample in enumerate(chosen, start=1):
        try:
            prepared = engine.prepare(prompter.request(sample))
        except InputError as error:
            not_run[sample.id] = str(error)
            lines.append({"id": sample.id, "question": sample.question, "answer": sample.answer, "error": str(error)})
            watch.sample(number, len(chosen), None)
            continue
        shares.add(prepared.token_ids, prepared.request.partition, prepared.spans)
        prepared = replace(prepared, epoch=engine.epoch)
        decision = cache.find(prepared, costs=costs_of(engine, settings.cache.costs, timed=False))
        planned = decision.plan
        hit = planned.method in ("exact", *APPROXIMATE)
        donor = planned.donors[0] if hit else None
        right = None
        if donor is not None and not planned.piecewise and sample.answer is not None and donor.answer is not None:
            right = same(donor.answer, sample.answer)
        lines.append(
            {
                "id": sample.id,
                "question": sample.question,
                "answer": sample.answer,
                "provenance": f"hit ({planned.match.provenance})" if hit and planned.match else "miss",
                "level": planned.match.level if hit and planned.match else "",
                "score": planned.match.score if planned.match else None,
                "donor": donor.chunk if donor else None,
                "donor_answer": donor.answer if donor else None,
                "right": right,
                "reason": planned.reason,
                "plan": planned.name,
                "plans": str(decision),
                "statuses": dict(decision.statuses),
                "lookup_ms": 1e3 * decision.seconds,
            }
        )
        cache.record(prepared, decision, planned, _not_run(sample, len(prepared.token_ids)))
        watch.sample(number, len(chosen), None)
    cache.close()
    check_ran(not_run, len(chosen))
    summary = _summary(settings, [line for line in lines if "error" not in line])
    return {**summary, "not_run": not_run, **share_figures(shares.total, shares.complete)}, lines


def _not_run(sample: Sample, tokens: int) -> Completion:
    """A placeholder for the answer: the data set's own."""
    return Completion(sample.answer or "", (), tokens, 0, capture=lambda: NO_STATE)


def _summary(settings: RunSettings, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    hits = [line for line in lines if line["level"]]
    levels = sorted({line["level"] for line in hits})
    return {
        "cache_mode": "dry-run",
        "model": settings.model,
        "dataset": settings.dataset,
        "media": settings.cache.media,
        "samples": len(lines),
        "hit_rate": len(hits) / len(lines),
        "hit_rate_interval": wilson(len(hits), len(lines)),
        **_false_hits(hits),
        "by_level": {
            level: {"hits": sum(line["level"] == level for line in hits)}
            | _false_hits([line for line in hits if line["level"] == level])
            for level in levels
        },
        "not_used": counted(line["reason"] for line in lines if line["reason"]),
        "plans": dict(Counter(line["plan"] for line in lines).most_common()),
        "lookup_ms": {"mean": sum(line["lookup_ms"] for line in lines) / len(lines)},
        "dejakv_version": __version__,
    }


def _false_hits(hits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    judged = [line["right"] for line in hits if line["right"] is not None]
    wrong = len(judged) - sum(judged)
    return {
        "judged": len(judged),
        "false_hits": wrong if judged else None,
        "false_hit_rate": wrong / len(judged) if judged else None,
        "false_hit_interval": wilson(wrong, len(judged)) if judged else None,
    }
