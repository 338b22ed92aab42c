"""What each rule of `dejakv stabilize` would add to the prefixes of a log.

All requests are counted, each rule beside prefix caching of the same requests in the same order.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dejakv.datasets.base import Sample
from dejakv.datasets.messages import read_request, unnested
from dejakv.engines.base import Prepared
from dejakv.errors import DejaKVError
from dejakv.experiments.reports.plain_words import share
from dejakv.experiments.shares import prefix_tokens
from dejakv.experiments.table import TextTable
from dejakv.stabilize.rules import DEFAULT_RULES, RULES, PrefixStabilizer

AS_LOGGED, DEFAULT, ALL = "as logged", "default rules", "all rules"
COMBINED: Mapping[str, Sequence[str]] = {DEFAULT: DEFAULT_RULES, ALL: tuple(RULES)}

_BODY = ("messages", "system", "tools", "tool_choice")


@dataclass
class RuleCounts:
    """Counts of one rule, or of some together.

    Attributes
    ----------
    stabilizer : PrefixStabilizer
        The rules.
    changed : int
        Requests that they changed.
    tokens, prefix : int
        Tokens of all prompts, and those in prefix blocks of earlier prompts of the tenant.
    """

    stabilizer: PrefixStabilizer
    changed: int = 0
    tokens: int = 0
    prefix: int = 0
    _blocks: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set[int]))

    def add(self, ids: Sequence[int], tenant: str) -> None:
        """Count a prompt's tokens."""
        self.tokens += len(ids)
        self.prefix += prefix_tokens(np.asarray(ids, np.int64), self._blocks[tenant])


class RuleGains:
    """Counter of requests as they were logged, and as each rule would send them.

    Parameters
    ----------
    tokens_of : callable
        Returns a sample's tokens.
    """

    def __init__(self, tokens_of: Callable[[Sample], Prepared]) -> None:
        arms = {AS_LOGGED: (), **{name: (name,) for name in RULES}, **COMBINED}
        self.counts = {name: RuleCounts(PrefixStabilizer(rules)) for name, rules in arms.items()}
        self._tokens_of = tokens_of

    def add(self, sample: Sample, ids: Sequence[int], tenant: str) -> None:
        """Count a request.

        Parameters
        ----------
        sample : Sample
            The request as it was logged.
        ids : sequence of int
            Its tokens.
        tenant : str
            Whose it is.
        """
        tokens_of_prompt: dict[tuple[tuple[str, str], ...], Sequence[int]] = {sample.messages: ids}
        for counts in self.counts.values():
            sent = stabilized(sample, counts.stabilizer, tenant)
            counts.changed += sent is not sample
            if sent.messages not in tokens_of_prompt:
                tokens_of_prompt[sent.messages] = self._tokens_of(sent).token_ids
            counts.add(tokens_of_prompt[sent.messages], tenant)

    def figures(self) -> list[dict[str, Any]]:
        """Return a row for each rule as JSON has it; empty if none would change a request."""
        rows = [
            {
                "rules": name,
                "changed": counts.changed,
                "prompt_tokens": counts.tokens,
                "tokens_prefix": counts.prefix,
            }
            for name, counts in self.counts.items()
        ]
        return rows if any(row["changed"] for row in rows) else []


def stabilized(sample: Sample, stabilizer: PrefixStabilizer, tenant: str = "") -> Sample:
    """Return a conversation as a stabilizer would send it; the sample itself if nothing changes."""
    if not sample.messages or not stabilizer.rules or sample.fields.get("token_ids"):
        return sample
    logged = unnested(sample.fields)
    body, rest = {name: logged[name] for name in _BODY if name in logged}, logged
    if not isinstance(logged.get("messages"), list):
        # A data set, or another protocol's log: its messages have the system texts and tools.
        body = {"messages": [{"role": role, "content": text} for role, text in sample.messages]}
        rest = {}
    try:
        rewritten = stabilizer.rewrite(json.dumps(body, ensure_ascii=False).encode(), tenant)
        if not rewritten.changed:
            return sample
        read = read_request({**rest, **json.loads(rewritten.body)}, "the request")
    except (DejaKVError, ValueError):
        # A log may hold what no server takes: it stays as it is.
        return sample
    messages = tuple((message.role, message.text) for message in read)
    return replace(sample, messages=messages, question=messages[-1][1])


def gains_sheet(rows: Sequence[Mapping[str, Any]]) -> TextTable:
    """Return a table of what each rule adds to prefixes."""
    before = rows[0]["tokens_prefix"]
    columns = ("rule", "requests changed", "tokens in prefixes", "more")
    cells = [
        (
            row["rules"],
            f"{row['changed']:,}",
            share(row["tokens_prefix"] / max(1, row["prompt_tokens"])),
            f"{row['tokens_prefix'] - before:+,}",
        )
        for row in rows
    ]
    return TextTable("with `dejakv stabilize` before the server", columns, cells)
