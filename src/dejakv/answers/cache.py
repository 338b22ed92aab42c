"""The cache of answers: look-up, storage, removal, and the decorator.

Questions are found by the levels and judged by the guards of `HierarchicalCache`, and stored with
their answers in its store, without any state of a model.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from inspect import iscoroutinefunction, signature
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.decide.answers import answer_key
from dejakv.decide.counts import CacheCounts
from dejakv.decide.guards.base import Guard
from dejakv.decide.levels.base import Level, Query
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.levels.semantic import SemanticTextCache
from dejakv.decide.plan import ReuseRequest
from dejakv.engines.base import NO_STATE, Completion, Prepared
from dejakv.errors import ConfigError, InputError
from dejakv.identity import DEFAULT_PARTITION, digest_of, exact_key
from dejakv.request import Request, Sampling
from dejakv.store.budgets import now
from dejakv.store.selection import PurgeResult, Selection
from dejakv.store.store import Store
from dejakv.vectors.base import TextEncoder
from dejakv.vectors.text import text_encoder

log = logging.getLogger("dejakv.answers")

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_FIXED = {
    "reuse": "adopt",
    "answers": "keep",
    "exact_prefix": False,
    "copied_text": False,
    "min_gain": 0,
}
"""Settings that an answer cache decides itself: there is no state, so no prefix and no gain."""

_KEY = answer_key(Sampling(), "answers")
"""Key of every answer: what shapes an answer beside the question is in the context."""


@dataclass(frozen=True)
class AnswerHit:
    """A stored answer, and why it is returned.

    Attributes
    ----------
    answer : str
        The stored answer.
    method : {"exact", "adopt"}
        `exact`: the very question was asked before. `adopt`: a similar one, so the answer is
        approximate.
    level : str
        Level that found the question: `exact_text` (equal but for case or white space),
        `semantic_text`.
    score : float
        Cosine of the two questions, 1 for equal text.
    question : str
        The earlier question.
    id : str
        Id of the stored answer, for `Selection(donors=(id,))`.
    age : float
        Seconds since it was stored.
    """

    answer: str
    method: str
    level: str
    score: float
    question: str
    id: str
    age: float

    @property
    def approximate(self) -> bool:
        """Whether the answer is that of another question."""
        return self.method != "exact"

    @property
    def label(self) -> dict[str, Any]:
        """Origin of the answer, as plain values for a response's metadata."""
        return {
            "method": self.method,
            "level": self.level,
            "score": self.score,
            "question": self.question,
            "id": self.id,
        }


class CachedText(str):
    """An answer of a decorated function that came from the cache: text with its `hit`."""

    hit: AnswerHit

    @classmethod
    def of(cls, hit: AnswerHit) -> "CachedText":
        """Return the hit's answer as text that carries the hit.

        Parameters
        ----------
        hit : AnswerHit
            A hit of the cache.

        Returns
        -------
        CachedText
            The answer.
        """
        text = cls(hit.answer)
        text.hit = hit
        return text


class AnswerCache:
    """Answers by question, for equal questions and for similar ones that the guards accept.

    Thread-safe. Partitions never see each other, nor do contexts: an answer is returned only for
    the context in which it was given.

    Parameters
    ----------
    store : str, Path or Store, optional
        A folder, bucket or open store, as the setting `store`; None: the memory of this process.
    encoder : TextEncoder, optional
        Encoder of the questions, in place of the setting `index_encoder`. `ModelTextEncoder(embed,
        fingerprint)` makes one of any function.
    guards : Sequence[Guard]
        Further judges of a similar question. One takes the place of the default guard of its name.
    max_entries : int
        Most answers; the least recently used leave first. 0: no limit.
    **settings : Any
        Settings of `SemanticCacheConfig`: `similarity_threshold`, `ttl`, `max_bytes`, `partitions`,
        `quotas`, `lexical_guard`... `semantic_text=False` needs no encoder, and answers only
        questions that are equal but for case and white space.

    Raises
    ------
    ConfigError
        For a wrong setting, and for an error bound without a certificate, since nothing here can
        check an answer. Vectors of another encoder are no error: their questions are found by
        equal text alone, and a warning tells how many they are.
    MissingExtraError, ModelError
        If the encoder is not installed or cannot be loaded.
    StoreError
        If the store cannot be opened.

    Examples
    --------
    >>> cache = AnswerCache(semantic_text=False, ttl=3600)
    >>> cache.put("Where is the cat?", "On the mat.")
    True
    >>> cache.get("Where is the cat?").answer
    'On the mat.'
    >>> hit = cache.get("where is  the cat?")
    >>> hit.approximate, hit.question
    (True, 'Where is the cat?')
    >>> cache.get("Where is the cat?", partition="another tenant") is None
    True
    >>> cache.close()
    """

    def __init__(
        self,
        store: str | Path | Store | None = None,
        *,
        encoder: TextEncoder | None = None,
        guards: Sequence[Guard] = (),
        max_entries: int = 10_000,
        **settings: Any,
    ) -> None:
        if fixed := sorted(_FIXED.keys() & settings):
            raise ConfigError(f"an answer cache decides {fixed[0]} itself: leave it out")

        opened = store if isinstance(store, Store) else None
        place = None if opened is not None or store is None else str(store)
        values = {"semantic_text": True, "store": place, "max_cached_blocks": max_entries}
        config = SemanticCacheConfig.from_dict({**values, **settings, **_FIXED})
        if config.labels_online:
            raise ConfigError(
                f"error_bound={config.error_bound} needs labels, and an answer cache computes "
                "none: leave error_bound out"
            )

        self.config = config
        # The levels are made here, equal text first; the settings' own would embed stored texts.
        settings_alone = replace(config, exact_text=False, semantic_text=False)
        self._cache = build_cache(
            settings_alone,
            store=opened,
            levels=_levels(config, encoder),
            guards=guards,
            background=False,
        )
        self.store = self._cache.store
        if config.semantic_text:
            self._warn_of_encoders()

    def get(
        self,
        question: str,
        *,
        partition: str = DEFAULT_PARTITION,
        context: str = "",
        threshold: float | None = None,
        similar: bool = True,
    ) -> AnswerHit | None:
        """Return the stored answer to a question, or to a similar one.

        Parameters
        ----------
        question : str
            The part of the request that varies.
        partition : str
            Whose question it is.
        context : str
            Everything else that shapes the answer: model, system prompt, earlier messages, tools,
            temperature. A stored answer of another context is not returned.
        threshold : float, optional
            Least cosine of a similar question; it can only be stricter than the setting.
        similar : bool
            False: only the very question hits, and nothing is embedded.

        Returns
        -------
        AnswerHit or None
            None for a miss. Missing, damaged and expired answers are misses, never errors.

        Raises
        ------
        InputError
            For a question, partition or context that is no valid text.
        ConfigError
            If the encoder's vectors have another dimension than the stored ones.
        """
        prepared = _prepared(question, partition, context)
        ask = ReuseRequest("adopt", threshold, answers=_KEY)
        if not similar:
            # By its own id alone: the levels are not asked.
            own = exact_key(partition, prepared.epoch, prepared.token_ids, ())
            ask = ReuseRequest("exact", named=(own,), answers=_KEY)

        plan = self._cache.find(prepared, ask).plan
        if plan.answer is None or plan.match is None:
            return None
        donor = plan.donors[0]
        # No state is read, which is what counts as a use otherwise.
        self.store.touch(donor.id)
        return AnswerHit(
            plan.answer.text,
            plan.method,
            plan.match.level,
            plan.match.score,
            donor.prompt,
            donor.id,
            max(0.0, now() - donor.created),
        )

    def put(
        self,
        question: str,
        answer: str,
        *,
        partition: str = DEFAULT_PARTITION,
        context: str = "",
        ttl: float | None = None,
        similar: bool = True,
    ) -> bool:
        """Store an answer, in place of an earlier one to the very question.

        Give finished answers alone (`finished_text`): what is stored is returned to the next who
        asks.

        Parameters
        ----------
        question : str
            As for `get`.
        answer : str
            The answer.
        partition, context : str
            As for `get`.
        ttl : float, optional
            Seconds of use; it can only be shorter than the setting.
        similar : bool
            False: the question is not embedded, and similar ones do not find it.

        Returns
        -------
        bool
            Whether the answer is stored. False for an empty question or answer, and where it is
            refused: `store.stats().refused` counts the reasons, such as `full` and `too_large`.

        Raises
        ------
        InputError
            For a value that is no valid text, or a `ttl` that is not above zero.
        """
        prepared = _prepared(question, partition, context, ttl)
        if not isinstance(answer, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"an answer is text, not a {type(answer).__name__}: give its text "
                "(finished_text(response), for a response in OpenAI's form)"
            )
        if self._cache.off or not question.strip() or not answer.strip():
            return False

        decision = replace(
            self._cache.finder.decide_full(prepared, "stored"),
            ask=ReuseRequest("adopt", answers=_KEY),
        )
        if not similar:
            # As for a text without a direction.
            decision.query.encoded["text"] = None
        # The store keeps the first state of an id, and of answers the latest counts.
        self.store.delete(decision.entry.id)
        completion = Completion(answer, (), len(prepared.token_ids), 0, capture=lambda: NO_STATE)
        self._cache.keep_exact(decision, completion, answer=answer)
        return self.store.meta(decision.entry.id) is not None

    def invalidate(self, selection: Selection, *, dry_run: bool = False) -> PurgeResult:
        """Remove answers, to the last byte.

        Parameters
        ----------
        selection : Selection
            Which ones: by `partition`, by `donors` (the `id` of a hit), by `older_than` (seconds),
            by context (`epoch=cache.epoch(context)`). Without a condition: all.
        dry_run : bool
            Report without removing.

        Returns
        -------
        PurgeResult
            What was removed, or would be: `prompts` counts the answers.

        Raises
        ------
        StoreError
            If answers or traces remain.

        Examples
        --------
        >>> with AnswerCache(semantic_text=False) as cache:
        ...     stored = cache.put("Who wrote Emma?", "Charlotte Brontë.")
        ...     wrong = Selection(donors=(cache.get("Who wrote Emma?").id,))
        ...     cache.invalidate(wrong, dry_run=True).prompts, len(cache)
        ...     cache.invalidate(wrong).prompts, len(cache)
        (1, 1)
        (1, 0)
        """
        return self._cache.purge(selection, dry_run=dry_run)

    async def aget(self, question: str, **options: Any) -> AnswerHit | None:
        """Run `get` in a thread.

        Parameters
        ----------
        question : str
            As for `get`.
        **options : Any
            The other arguments of `get`.

        Returns
        -------
        AnswerHit or None
            None for a miss.
        """
        return await asyncio.to_thread(self.get, question, **options)

    async def aput(self, question: str, answer: str, **options: Any) -> bool:
        """Run `put` in a thread.

        Parameters
        ----------
        question, answer : str
            As for `put`.
        **options : Any
            The other arguments of `put`.

        Returns
        -------
        bool
            Whether the answer is stored.
        """
        return await asyncio.to_thread(self.put, question, answer, **options)

    async def ainvalidate(self, selection: Selection, *, dry_run: bool = False) -> PurgeResult:
        """Run `invalidate` in a thread.

        Parameters
        ----------
        selection : Selection
            Which answers.
        dry_run : bool
            Report without removing.

        Returns
        -------
        PurgeResult
            What was removed, or would be.
        """
        return await asyncio.to_thread(self.invalidate, selection, dry_run=dry_run)

    def cached(
        self,
        *,
        partition: str | Callable[..., str] = DEFAULT_PARTITION,
        context: str | Callable[..., str] = "",
    ) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
        """Decorate a function, or a coroutine function, that answers its first argument.

        Its other arguments are part of the context, by their `repr`, and so is its name. An
        exception, None and an empty text are not stored. A hit is a `CachedText`, whose `hit` has
        the label; what the function itself returns has no `hit`.

        Parameters
        ----------
        partition, context : str or Callable[..., str]
            As for `get`, or a function of the call's arguments.

        Returns
        -------
        Callable
            The decorator. The decorated function raises InputError for a question that is no text,
            and for an answer that is neither text nor None.

        Examples
        --------
        >>> cache = AnswerCache(semantic_text=False)
        >>> @cache.cached(context="model-1", partition=lambda question, user: user)
        ... def ask(question: str, user: str) -> str:
        ...     return f"an answer for {user}"
        >>> ask("Where is it?", "ann"), ask("Where is it?", "ann").hit.method
        ('an answer for ann', 'exact')
        """

        def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
            bind = signature(function).bind

            def address(*args: Any, **kwargs: Any) -> tuple[str, str, str]:
                """Return the question of a call, its partition and its context."""
                bound = bind(*args, **kwargs)
                bound.apply_defaults()
                (_, question), *others = bound.arguments.items()
                owner = partition(*args, **kwargs) if callable(partition) else partition
                about = context(*args, **kwargs) if callable(context) else context
                name = f"{function.__module__}.{function.__qualname__}"
                return question, owner, digest_of("call", name, about, repr(others))

            @wraps(function)
            def cached_call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
                question, owner, about = address(*args, **kwargs)
                if (hit := self.get(question, partition=owner, context=about)) is not None:
                    return cast(Result, CachedText.of(hit))
                result = function(*args, **kwargs)
                if result is not None:
                    self.put(question, cast(str, result), partition=owner, context=about)
                return result

            @wraps(function)
            async def cached_coroutine(*args: Any, **kwargs: Any) -> Any:
                question, owner, about = address(*args, **kwargs)
                hit = await self.aget(question, partition=owner, context=about)
                if hit is not None:
                    return CachedText.of(hit)
                result = await cast(Any, function)(*args, **kwargs)
                if result is not None:
                    await self.aput(question, result, partition=owner, context=about)
                return result

            wrapper = cached_coroutine if iscoroutinefunction(function) else cached_call
            return cast(Callable[Parameters, Result], wrapper)

        return decorate

    def epoch(self, context: str) -> str:
        """Return the name under which answers of a context are stored, for `Selection(epoch=)`.

        Parameters
        ----------
        context : str
            As for `get`.

        Returns
        -------
        str
            32 hexadecimal digits.
        """
        return _epoch(context)

    def stats(self, partition: str | None = None) -> CacheCounts:
        """Return counters since the opening: look-ups, hits by level, rejections by guard.

        Parameters
        ----------
        partition : str or None
            None sums over all partitions.

        Returns
        -------
        CacheCounts
            The counters. `store.stats()` has entries, bytes, evictions and refusals.
        """
        return self._cache.stats(partition)

    def close(self) -> None:
        """Close the cache and its store."""
        self._cache.close()

    def __len__(self) -> int:
        return self.store.stats().entries

    def __enter__(self) -> "AnswerCache":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _warn_of_encoders(self) -> None:
        embedder = self._cache.finder.embedder
        foreign, total = 0, 0
        for meta in self.store.metas():
            foreign, total = foreign + (meta.embedder != embedder), total + 1
        if foreign:
            log.warning(
                "%d of %d stored answers have vectors of another encoder, which are not compared: "
                "these answers are returned for equal questions alone. Store them again, or remove "
                "them (invalidate)",
                foreign,
                total,
            )


class _StoredVectors(SemanticTextCache):
    """Level that compares stored questions by their stored vectors alone.

    Without one of this encoder a question is left out: to embed thousands of them again at each
    opening takes minutes.
    """

    embeds_stored = False

    def encode(self, query: Query) -> None:
        """Compute the vector of a question that is asked; that of a stored one is stored."""
        # A request from the store has no id.
        if not query.request.id:
            query.encoded.setdefault("text", None)
        super().encode(query)


def _levels(config: SemanticCacheConfig, encoder: TextEncoder | None) -> list[Level]:
    levels: list[Level] = [ExactTextCache()] if config.exact_text else []
    if config.semantic_text:
        if encoder is None:
            encoder = text_encoder(config.index_encoder, threads=config.encoder_threads)
        threshold, window = config.similarity_threshold, config.chunk_window
        levels.append(_StoredVectors(encoder, threshold, window, index=config.index))
    return levels


def _prepared(question: str, partition: str, context: str, ttl: float | None = None) -> Prepared:
    request = Request("answer", question, question, partition=partition, ttl=ttl)
    # A digest stands for the tokens: there is no tokenizer, and equal questions have equal ones.
    digest = bytes.fromhex(digest_of("question", question))
    token_ids = tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 32, 4))
    return Prepared(request, token_ids, epoch=_epoch(context))


def _epoch(context: str) -> str:
    return digest_of("answers", context)[:32]
