"""What a log of requests would save: where tokens stood before, and what reuse would compute.

No prompt is computed. A blend computes what is new and, up to the share of its quality, more of
what stood at another place.
"""

import datetime
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from dejakv.blend.recomputed import count_of
from dejakv.blend.settings import QUALITIES
from dejakv.datasets.entries import MOONCAKE_BLOCK, Entry
from dejakv.decide.costs import ReuseCosts
from dejakv.errors import count_noun
from dejakv.experiments.reports.plain_words import share
from dejakv.experiments.shares import TokenShare, TokenShares
from dejakv.experiments.table import TextTable
from dejakv.request import DEFAULT_PARTITION

QUARTERS = 4
MAX_NAMED_TENANTS = 5
"""Tenants that are named, those with the most tokens."""


@dataclass
class SavingsCounter:
    """Counter of requests in the order of their arrival; tenants share nothing.

    Attributes
    ----------
    shares : TokenShares
        Tokens of all prompts and how many of them stood before.
    whole_text : bool
        Whether the tokens themselves are known, and not prefix blocks or lengths alone.
    prefixes_known : bool
        Whether at least prefix blocks are known.
    quarters : list[TokenShare]
        Tokens of the quarters of the prompts.
    by_tenant : defaultdict[str, TokenShare]
        Tokens of each tenant that has a name.
    by_hour : defaultdict[int, TokenShare]
        Tokens of each hour of the day, UTC.
    arrivals : Counter[int]
        Requests of each minute.
    snapshots : int
        Most snapshots that a model with recurrent layers leaves: one at the end of each different
        prompt, and one where it parts from an earlier one.
    """

    shares: TokenShares = field(default_factory=TokenShares)
    whole_text: bool = True
    prefixes_known: bool = True
    quarters: list[TokenShare] = field(default_factory=lambda: [TokenShare()] * QUARTERS)
    by_tenant: defaultdict[str, TokenShare] = field(
        default_factory=lambda: defaultdict[str, TokenShare](TokenShare)
    )
    by_hour: defaultdict[int, TokenShare] = field(
        default_factory=lambda: defaultdict[int, TokenShare](TokenShare)
    )
    arrivals: Counter[int] = field(default_factory=Counter[int])
    snapshots: int = 0
    _each: list[TokenShare] = field(default_factory=list[TokenShare])
    _whole: set[int] = field(default_factory=set[int])
    _blocks: defaultdict[str, set[int]] = field(
        default_factory=lambda: defaultdict[str, set[int]](set)
    )

    def add(self, ids: Sequence[int], entry: Entry) -> None:
        """Count a prompt's token ids.

        Of a prompt that comes again as a whole, exact reuse computes the last token, not the last
        block.
        """
        token_share, covered = self.shares.add_by_place(ids, entry.tenant or DEFAULT_PARTITION)
        prefix = np.arange(len(covered)) < token_share.prefix

        ends = np.linspace(0, len(covered), QUARTERS + 1).astype(int)
        for number, (begin, end) in enumerate(pairwise(ends)):
            marked = (int(np.count_nonzero(marks[begin:end])) for marks in (prefix, covered))
            self.quarters[number] += TokenShare(int(end - begin), *marked)

        # Hashes and not prompts: what is remembered of a long log must fit into memory.
        whole = hash((entry.tenant, *ids))
        repeats_whole, _ = whole in self._whole, self._whole.add(whole)
        self._add(
            replace(token_share, prefix=token_share.anywhere) if repeats_whole else token_share,
            entry,
        )

    def add_trace(self, entry: Entry) -> None:
        """Count a request of which only prefix blocks or its length are known."""
        self.whole_text = False
        self.prefixes_known = self.prefixes_known and bool(entry.blocks)
        seen = self._blocks[entry.tenant]
        # Each id names the whole beginning, so the first unknown one ends the prefix.
        prefix_blocks = next(
            (place for place, block in enumerate(entry.blocks) if block not in seen),
            len(entry.blocks),
        )

        seen.update(entry.blocks)

        # The last token is always computed: the answer begins with its logits.
        prefix = max(0, min(prefix_blocks * MOONCAKE_BLOCK, entry.tokens - 1))
        token_share = TokenShare(entry.tokens, prefix, prefix)
        self.shares.total += token_share
        self._add(token_share, entry)

    def _add(self, token_share: TokenShare, entry: Entry) -> None:
        self._each.append(token_share)
        if token_share.prefix < token_share.tokens - 1:
            self.snapshots += 1 + (token_share.prefix > 0)
        if entry.tenant:
            self.by_tenant[entry.tenant] += token_share
        if entry.time is not None:
            self.by_hour[datetime.datetime.fromtimestamp(entry.time, datetime.UTC).hour] += (
                token_share
            )
            self.arrivals[int(entry.time // 60)] += 1

    def __add__(self, other: "SavingsCounter") -> "SavingsCounter":
        """Return the counts of two streams that share nothing; no request can be added to them."""
        return SavingsCounter(
            TokenShares(self.shares.total + other.shares.total),
            self.whole_text and other.whole_text,
            self.prefixes_known and other.prefixes_known,
            [
                quarter + other_quarter
                for quarter, other_quarter in zip(self.quarters, other.quarters, strict=True)
            ],
            _summed(self.by_tenant, other.by_tenant),
            _summed(self.by_hour, other.by_hour),
            self.arrivals + other.arrivals,
            self.snapshots + other.snapshots,
            self._each + other._each,
        )

    def figures(self, costs: ReuseCosts | None = None) -> dict[str, Any]:
        """Return the figures as JSON has them.

        What the log does not tell is None, and a way of reuse of which nothing is known is missing.

        Parameters
        ----------
        costs : ReuseCosts, optional
            Measured costs of the model, for seconds and bytes.

        Returns
        -------
        dict
            Tokens of all prompts, those in prefixes and anywhere, and their shares; the same tokens
            by `quarters`, `by_tenant` and `by_hour`; `computed` tokens by way of reuse; `arrivals`
            a minute (median and most). With `costs` also the mean `seconds` of a request's prefill
            by way of reuse, and `store_bytes` of all distinct state; of a model with recurrent
            layers also `snapshots`: their most number (`count`), and the bytes of one (`bytes`) and
            of a token's other state (`token_bytes`).
        """
        total, each = self.shares.total, self._each
        rows = {"full": [request_share.tokens for request_share in each]}
        if self.prefixes_known:
            rows["exact"] = [request_share.tokens - request_share.prefix for request_share in each]

        # Lengths and prefix blocks do not tell what stands elsewhere in a prompt.
        if self.whole_text:
            for name, quality in QUALITIES.items():
                rows[f"blend {name}"] = [
                    _blended(request_share, quality.share) for request_share in each
                ]

        counts = sorted(self.arrivals.values())
        arrivals = (
            {"minutes": len(counts), "median": counts[len(counts) // 2], "most": counts[-1]}
            if counts
            else None
        )
        tenants = sorted(self.by_tenant.items(), key=lambda item: (-item[1].tokens, item[0]))
        figures: dict[str, Any] = {
            "prompt_tokens": total.tokens,
            "tokens_prefix": total.prefix if self.prefixes_known else None,
            "tokens_anywhere": total.anywhere if self.whole_text else None,
            "share_prefix": total.share_prefix if self.prefixes_known else None,
            "share_anywhere": total.share_anywhere if self.whole_text else None,
            "whole_text": self.whole_text,
            "prefixes_known": self.prefixes_known,
            "quarters": [vars(part) for part in self.quarters] if self.whole_text else [],
            "by_tenant": {name: self._known(part) for name, part in tenants},
            "by_hour": {
                str(hour): self._known(part) for hour, part in sorted(self.by_hour.items())
            },
            "arrivals": arrivals,
            "computed": {name: sum(computed) for name, computed in rows.items()},
        }
        if costs is not None and self.prefixes_known:
            figures["seconds"] = {
                name: self._seconds(name, computed, costs) for name, computed in rows.items()
            }
            figures["store_bytes"] = round((total.tokens - total.prefix) * costs.token_bytes)
            if costs.snapshot_bytes:
                figures["snapshots"] = {
                    "count": self.snapshots,
                    "bytes": costs.snapshot_bytes,
                    "token_bytes": costs.token_bytes,
                }

        return figures

    def _known(self, part: TokenShare) -> dict[str, int | None]:
        """Return the counts of a part, None for what the log does not tell."""
        prefix, anywhere = self.prefixes_known or None, self.whole_text or None
        return {
            "tokens": part.tokens,
            "prefix": prefix and part.prefix,
            "anywhere": anywhere and part.anywhere,
        }

    def _seconds(self, way: str, rows: Sequence[int], costs: ReuseCosts) -> float:
        """Return the mean seconds of a request's prefill, each by the fastest of its plans.

        The planner chooses in the same way.
        """
        times: list[float] = []
        for request_share, computed in zip(self._each, rows, strict=True):
            plans = [costs.full(request_share.tokens)]
            if way != "full" and request_share.prefix:
                plans.append(costs.prefix(request_share.prefix, request_share.tokens))
            if way.startswith("blend") and request_share.anywhere > request_share.prefix:
                plans.append(costs.blending(computed, request_share.tokens, request_share.anywhere))
            times.append(min(plans))

        return fmean(times) if times else 0.0


K = TypeVar("K")


def _summed(
    first: Mapping[K, TokenShare], second: Mapping[K, TokenShare]
) -> defaultdict[K, TokenShare]:
    return defaultdict(
        TokenShare,
        {
            key: first.get(key, TokenShare()) + second.get(key, TokenShare())
            for key in {**first, **second}
        },
    )


def _blended(request_share: TokenShare, quality_share: float) -> int:
    """Return the tokens of a blend: what is new, and at least its share behind the exact prefix."""
    return max(
        request_share.tokens - request_share.anywhere,
        min(
            count_of(quality_share, request_share.tokens, request_share.prefix),
            request_share.tokens - request_share.prefix,
        ),
    )


def sheets(figures: Mapping[str, Any]) -> list[TextTable]:
    """Return tables: where tokens stood, and what each way of reuse would compute."""
    total, prefix, anywhere = (
        max(1, figures["prompt_tokens"]),
        figures["tokens_prefix"],
        figures["tokens_anywhere"],
    )
    elsewhere = anywhere - prefix if figures["whole_text"] else None
    where = [
        (
            "in prefixes of earlier prompts",
            prefix,
            "`exact` and prefix caching compute none of these",
        ),
        (
            "elsewhere in earlier prompts",
            elsewhere,
            "`blend` reuses most of these; answers are approximate",
        ),
        ("new", total - anywhere if anywhere is not None else None, "always computed"),
    ]
    seconds: Mapping[str, float] = figures.get("seconds") or {}
    ways = [
        (name, share(count / total), *((f"{seconds[name]:.3f}",) if seconds else ()))
        for name, count in figures["computed"].items()
    ]

    columns = ("reuse", "tokens computed", *(("seconds to prefill a request",) if seconds else ()))
    stood = [
        (name, "unknown" if part is None else share(part / total), note)
        for name, part, note in where
    ]
    return [TextTable("", ("tokens", "share", ""), stood), TextTable("", columns, ways)]


def savings_sentences(figures: Mapping[str, Any]) -> list[str]:
    """Say how savings differ by quarter of a prompt, by tenant and by hour.

    Arrivals a minute and bytes of the store follow. What the log does not tell has no sentence.
    """
    lines: list[str] = []
    if figures["quarters"]:
        each = ", ".join(_share_text(part) for part in figures["quarters"])
        lines.append(f"prefixes + elsewhere, by quarter of a prompt: {each}")
    if tenants := figures["by_tenant"]:
        named = ", ".join(
            f"{name} {_share_text(part)}"
            for name, part in list(tenants.items())[:MAX_NAMED_TENANTS]
        )
        more = (
            f", and {len(tenants) - MAX_NAMED_TENANTS} more in estimate.json"
            if len(tenants) > MAX_NAMED_TENANTS
            else ""
        )
        lines.append(f"by tenant ({len(tenants)}, which share nothing): {named}{more}")

    if len(hours := figures["by_hour"]) > 1 and figures["prefixes_known"]:
        # By what is reused anywhere, or in prefixes where no more is known.
        ranked = sorted(
            hours.items(),
            key=lambda item: (item[1]["anywhere"] or item[1]["prefix"]) / max(1, item[1]["tokens"]),
        )
        lowest_hour, highest_hour = (
            f"{_share_text(part)} at {int(hour):02d} h" for hour, part in (ranked[0], ranked[-1])
        )
        lines.append(f"by hour of the day (UTC): from {lowest_hour} to {highest_hour}")

    if arrivals := figures["arrivals"]:
        minutes = count_noun(arrivals["minutes"], "minute")
        lines.append(
            f"arrivals: {arrivals['median']} a minute in the median of {minutes} with any,"
            f" {arrivals['most']} at most"
        )
    if "store_bytes" in figures:
        lines.append(f"a store of all of it takes {figures['store_bytes'] / 1e9:,.2f} GB")
    if snapshots := figures.get("snapshots"):
        tokens = snapshots["bytes"] / max(1, snapshots["token_bytes"])
        lines.append(
            f"and at most {snapshots['count'] * snapshots['bytes'] / 1e9:,.2f} GB of"
            f" {count_noun(snapshots['count'], 'snapshot')} of its recurrent layers: each takes"
            f" {snapshots['bytes'] / 1e6:,.2f} MB, as the other state of {tokens:,.0f} tokens does;"
            " `exact` begins at them, so that the first prompt that parts from another is computed"
            " in full"
        )
    return lines


def _share_text(part: Mapping[str, int | None]) -> str:
    tokens, prefix, anywhere = max(1, part["tokens"] or 0), part["prefix"], part["anywhere"]
    if prefix is None:
        return "unknown"
    return (
        f"{prefix / tokens:.0%} +"
        f" {'unknown' if anywhere is None else f'{(anywhere - prefix) / tokens:.0%}'}"
    )
