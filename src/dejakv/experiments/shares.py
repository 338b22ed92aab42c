"""How much of a stream of prompts was asked before, in prefix blocks and anywhere.

Prefix caching serves prefix blocks. What stands anywhere but not in a prefix is what DejaKV can
save beyond that. No model is needed, only its tokenizer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.datasets.base import Sample
from dejakv.decide.copied.fingerprints import Hashes, media_token_ids, run_hashes
from dejakv.decide.part_order import SeenPrompts, arrange_frame
from dejakv.engines.base import Prepared
from dejakv.errors import InputError
from dejakv.experiments.samples import SamplePrompter, tokenizer_of
from dejakv.experiments.settings import RunSettings
from dejakv.identity import MediumSpan
from dejakv.request import DEFAULT_PARTITION

BLOCK = 16
"""Tokens in a prefix block: vLLM's default on a GPU."""

SHORTEST_COUNTED_RUN = 32
"""Tokens in the shortest run that counts as standing anywhere.

Shorter ones are mostly phrases of the language.
"""


@dataclass(frozen=True)
class TokenShare:
    """Tokens of one prompt or of many, and how many of them were in earlier ones of the partition.

    Attributes
    ----------
    tokens : int
        All tokens.
    prefix : int
        Tokens in blocks of 16 from the beginning, as an unlimited prefix cache serves them.
    anywhere : int
        Tokens in runs of 32 or more that stand at any place in any earlier prompt. Prefix blocks
        count too.
    """

    tokens: int = 0
    prefix: int = 0
    anywhere: int = 0

    def __add__(self, other: "TokenShare") -> "TokenShare":
        return TokenShare(
            self.tokens + other.tokens, self.prefix + other.prefix, self.anywhere + other.anywhere
        )

    @property
    def share_prefix(self) -> float:
        """Share of tokens in prefix blocks, [0, 1]."""
        return self.prefix / self.tokens if self.tokens else 0.0

    @property
    def share_anywhere(self) -> float:
        """Share of tokens that stand anywhere, [0, 1]."""
        return self.anywhere / self.tokens if self.tokens else 0.0


class TokenShares:
    """Shares of prompts that are measured one after the other; `total` is the sum so far.

    A prompt of 2,000 tokens takes about three milliseconds, and each remembered token 8 bytes.
    """

    def __init__(self, total: TokenShare = TokenShare()) -> None:
        self.total = total
        self._blocks: dict[str, set[int]] = {}
        self._runs: dict[str, _HashSet] = {}

    def add(
        self,
        ids: Sequence[int],
        partition: str = DEFAULT_PARTITION,
        spans: Sequence[MediumSpan] = (),
    ) -> TokenShare:
        """Count one prompt against the earlier ones of its partition, and remember it.

        As when a prompt is served, its last token never counts as found: it is computed for the
        answer. A picture's tokens are equal where the pictures are.

        Parameters
        ----------
        ids : sequence of int
            Token ids of the prompt.
        partition : str
            Whose prompt it is.
        spans : sequence of MediumSpan
            Where media stand in the tokens.
        """
        return self.add_by_place(ids, partition, spans)[0]

    def add_by_place(
        self,
        ids: Sequence[int],
        partition: str = DEFAULT_PARTITION,
        spans: Sequence[MediumSpan] = (),
    ) -> tuple[TokenShare, NDArray[np.bool_]]:
        """Count one prompt, as `add` does, and tell also which tokens stand in earlier ones."""
        tokens = media_token_ids(ids, spans)
        prefix = prefix_tokens(tokens, self._blocks.setdefault(partition, set()))
        covered = _covered(tokens, self._runs.setdefault(partition, _HashSet()))
        covered[:prefix] = True

        # The last token is computed for the answer, wherever it stood before.
        covered[-1:] = False

        share = TokenShare(len(tokens), prefix, int(np.count_nonzero(covered)))
        self.total += share
        return share, covered

    @property
    def figures(self) -> dict[str, float]:
        """Shares `share_prefix` and `share_anywhere` for a summary, [0, 1]."""
        return {
            "share_prefix": self.total.share_prefix,
            "share_anywhere": self.total.share_anywhere,
        }


def prefix_tokens(tokens: NDArray[np.int64], seen: set[int]) -> int:
    """Return the tokens in prefix blocks that were seen, and remember the prompt's in `seen`."""
    prefix, chain, unbroken = 0, 0, True
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        # With the hash before it, so that an equal one means an equal beginning.
        chain = hash((chain, tokens[start : start + BLOCK].tobytes()))
        unbroken = unbroken and chain in seen
        prefix += BLOCK * unbroken
        seen.add(chain)

    # Of a prompt that is known as a whole the last block is computed, as in vLLM.
    return prefix - BLOCK if prefix and prefix == len(tokens) else prefix


def _covered(tokens: NDArray[np.int64], seen: "_HashSet") -> NDArray[np.bool_]:
    """Tell which tokens stand in runs that were seen; the prompt's own runs are remembered then."""
    if len(tokens) < SHORTEST_COUNTED_RUN:
        return np.zeros(len(tokens), np.bool_)

    hashes = run_hashes(tokens, SHORTEST_COUNTED_RUN)
    seen_mask = seen.contains(hashes)
    seen.add(hashes[~seen_mask])

    # +1 where a seen run begins, -1 behind its end: the sum is above 0 within any of them.
    edges = np.zeros(len(tokens) + 1, np.int64)
    edges[: len(seen_mask)] += seen_mask
    edges[SHORTEST_COUNTED_RUN:] -= seen_mask
    return np.cumsum(edges)[:-1] > 0


class _HashSet:
    """Set of 64-bit hashes in sorted arrays, each at least twice as long as the next.

    It takes and gives whole vectors.
    """

    def __init__(self) -> None:
        self._arrays: list[Hashes] = []

    def contains(self, hashes: Hashes) -> NDArray[np.bool_]:
        member_mask = np.zeros(len(hashes), np.bool_)
        for sorted_hashes in self._arrays:
            # The place is clipped, as that of a hash above the largest is behind the array.
            member_mask |= (
                sorted_hashes[
                    np.minimum(np.searchsorted(sorted_hashes, hashes), len(sorted_hashes) - 1)
                ]
                == hashes
            )

        return member_mask

    def add(self, hashes: Hashes) -> None:
        """Add new hashes; repeated ones count once."""
        if not len(hashes):
            return
        merged = np.sort(hashes)
        # Merging arrays of like size keeps few of them, and moves each hash log n times.
        while self._arrays and len(self._arrays[-1]) < 2 * len(merged):
            # A stable sort merges two sorted arrays in linear time.
            merged = np.sort(np.concatenate((self._arrays.pop(), merged)), kind="stable")

        self._arrays.append(merged)


def shares_of(prompts: Iterable[Prepared]) -> dict[str, Any]:
    """Return `share_prefix` and `share_anywhere` of all prompts of a run, read in its order."""
    shares = TokenShares()
    for prepared in prompts:
        shares.add(prepared.token_ids, prepared.request.partition, prepared.spans)
    return shares.figures


def tokens_of_samples(settings: RunSettings) -> Callable[[Sample], Prepared]:
    """Return a function from a sample to its tokens, by the tokenizer of a run's model alone.

    Parts in any order stand as a cache arranges them.

    Raises
    ------
    ModelError
        For a missing tokenizer; the function raises an InputError for samples with pictures, whose
        tokens depend on the model.
    """
    tokenizer = tokenizer_of(settings)
    prompter = SamplePrompter.for_run(settings, tokenizer)
    seen = SeenPrompts()

    def tokenize(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def prepare(sample: Sample) -> Prepared:
        if sample.media:
            raise InputError(
                f"sample {sample.id} has pictures: name an image-text model with --model of"
                " dejakv run"
            )
        request = prompter.request(sample)
        # What the server ran: tokenizing its text again may give other ids.
        if sample.fields.get("token_ids"):
            return Prepared(request, tuple(sample.fields["token_ids"]))

        if request.order == "free":
            request = arrange_frame(request.frame, seen, tokenize, request.partition).reorder(
                request
            )
        ids = tokenize(request.prompt)
        seen.add(ids, request.partition)
        return Prepared(request, tuple(ids))

    return prepare


def tokenize_samples(
    samples: Iterable[Sample], settings: RunSettings
) -> Iterator[tuple[Sample, Prepared]]:
    """Yield the samples as tokens; the errors are those of `tokens_of_samples`."""
    prepare = tokens_of_samples(settings)
    for sample in samples:
        yield sample, prepare(sample)
