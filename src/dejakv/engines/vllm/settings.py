"""Keys of the connectors' `kv_connector_extra_config`, and choices of a request."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import field_validator

from dejakv.config import (
    REMOVED_SETTINGS,
    BlendSettings,
    BudgetSettings,
    GeneratedText,
    LifetimeSettings,
    SemanticCacheConfig,
    check_bucket,
)
from dejakv.decide.plan import ReuseRequest
from dejakv.errors import ConfigError
from dejakv.settings import (
    Address,
    Count,
    NumberRange,
    Place,
    Positive,
    Seconds,
    Share,
    from_mapping,
    is_memory,
    strict_dataclass,
)
from dejakv.trust.settings import BoundSettings

if TYPE_CHECKING:
    from dejakv.blend.settings import BlendConfig
    from dejakv.encoder_cache import VisualKVCache

Mode = Literal["off", "exact", "blend"]
MODES: tuple[Mode, ...] = ("off", "exact", "blend")
Timeout = Annotated[float, NumberRange(0, above=True)]
_FORMER = {"store_dir": "store"}

_TEXT = (
    "the connector finds copied text and the donors that a request names: compare prompts in "
    "other words before vLLM, with "
    "`similarity_threshold` and `index_encoder` in DEJAKV_ADOPT"
)
_ALONE = "run the other connector alone, or both below vLLM's MultiConnector with mode exact"
LEFT_HERE: dict[str, str] = {
    "inner": _ALONE,
    "inner_isolated": _ALONE,
    "promote": "a client sends the prompt again with mode exact and max_tokens=1 when the server "
    "is idle",
    **dict.fromkeys(
        (
            "index_encoder", "encoder_threads", "similarity_threshold", "chunk_window",
            "lexical_guard", "cross_encoder", "paraphrase_threshold",
        ),
        _TEXT,
    ),
}  # fmt: skip
"""Keys of earlier versions, and what took the place of each."""


@strict_dataclass(former_names=_FORMER)
class ConnectorSettings(BlendSettings, BudgetSettings, BoundSettings):
    """Keys of `kv_connector_extra_config`, beside those of its base classes."""

    mode: Literal["exact", "blend"] = "exact"
    """default mode of a request: `exact` or `blend`"""
    modes: tuple[Mode, ...] = ()
    """modes open to requests; by default `off`, `exact` and `mode`"""
    min_tokens: Count = 16
    """least tokens of a prompt to look up or store"""
    min_new_tokens: Count = 16
    """least tokens not stored yet for a prompt to be stored"""
    generated_text: GeneratedText = "off"
    """`keep`: store the state of answers too, as their blocks fill, so that a chat's next prompt
    computes its new messages alone; `off`: that of prompts"""
    max_pending_bytes: Count = 2 * 1024**3
    """saves under way; what is beyond it is saved in a later step, or not and counted. As much for
    the state that blends start from; a longer prompt is not blended"""
    pinned_bytes: Count = 1024**3
    """pinned host memory that workers on GPUs reserve for copies of state, all ranks together;
    where it has no room, copies are slower"""
    refresh_s: Seconds = 5.0
    """seconds between searches for other processes' prompts; 0 never"""
    lookup_timeout_s: Timeout = 0.5
    """a lookup that takes longer is a miss"""
    load_timeout_s: Timeout = 10.0
    """a load whose data takes longer to read is a miss"""
    unlabelled_answers: bool = False
    """blend also for answers of which vLLM shows no label: streams, beams and further prompts of
    one call, without `dejakv.adopt.ServerMiddleware`. False: these are computed exactly"""
    copied_text: bool = True
    """let blend search for runs of tokens anywhere in stored prompts, beside a request's named
    donors"""
    blend_max_share: Share = 0.8
    """largest share of rows to compute in a blend; a prompt that needs more is computed in full"""
    blend_tail: Positive = 16
    """last tokens of the prompt, computed by vLLM itself after a blend, at least 1"""

    @field_validator("mode", mode="before")
    @classmethod
    def _refuse_adopt(cls, mode: object) -> object:
        if mode == "adopt":
            raise ConfigError(
                "mode='adopt' rewrites the prompt before vLLM sees it: use dejakv.adopt, or "
                "`dejakv run"
                " --engine vllm --reuse adopt`"
            )
        return mode

    def __post_init__(self) -> None:
        # For its errors alone: settings that do not fit end the start.
        if self.may_blend:
            self.blend_config()
        if self.error_bound is not None and self.certificate is None:
            raise ConfigError(
                f"error_bound={self.error_bound} is kept by a certificate here: make one with "
                f"`dejakv certify --engine vllm`, and name its "
                "file in certificate"
            )

        defaults = (ConnectorSettings.blend_tail, ConnectorSettings.blend_max_share)
        if self.certificate is not None and (self.blend_tail, self.blend_max_share) != defaults:
            raise ConfigError(
                "certificates are of the default blend_tail and blend_max_share: leave both out"
            )
        self.cache_config()

    def blend_config(self) -> "BlendConfig":
        """Return the settings of the worker's blends; a ConfigError tells what does not fit."""
        from dejakv.blend.settings import BlendConfig

        quality = self.blend
        return BlendConfig(
            map=self.blend_map,
            selector=quality.selector,
            share=quality.share,
            foreign_context=self.foreign_context,
            max_share=self.blend_max_share,
        )

    @property
    def allowed(self) -> frozenset[str]:
        """Modes open to requests in `kv_transfer_params.dejakv.mode`."""
        return frozenset(self.modes or ("off", "exact", self.mode)) | {self.mode}

    @property
    def may_blend(self) -> bool:
        """Whether any request may ask for a blend."""
        return "blend" in self.allowed

    def cache_config(self) -> SemanticCacheConfig:
        """Return the same settings for levels, guards and planner.

        Raises
        ------
        ConfigError
            For settings that do not fit each other.
        """
        shared = {
            item.name: getattr(self, item.name)
            for part in (BlendSettings, BudgetSettings, BoundSettings)
            for item in fields(part)
        }
        if self.max_bytes:
            shared["memory_bytes"] = min(self.memory_bytes, self.max_bytes)

        # With "blend" the index of copied text is filled at the start, if only some requests ask.
        return SemanticCacheConfig(
            **shared,
            copied_text=self.copied_text,
            semantic_text=False,
            reuse="blend" if self.may_blend else "exact",
        )

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> "ConnectorSettings":
        """Read `kv_connector_extra_config`.

        Raises: ConfigError for an unknown key, listing the known, or a removed one.
        """
        return from_mapping(
            cls, extra, "kv_connector_extra_config", {**REMOVED_SETTINGS, **LEFT_HERE}
        )


@strict_dataclass(former_names=_FORMER)
class EncoderSettings(LifetimeSettings):
    """Keys of `ec_connector_extra_config`, beside `ttl` (`LifetimeSettings`)."""

    store: Place | None = None
    """place of outputs that outlive the process, as the other connector's; None: this process's
    memory"""
    max_bytes: Positive = 1024**3
    """maximum bytes of outputs in memory"""
    max_entries: Positive = 10_000
    """maximum outputs in memory"""
    disk_bytes: Count = 8 * 1024**3
    """maximum bytes of outputs in `store`"""
    feed: Address | None = None
    """of a bucket, as the other connector's"""
    policy: Literal["lfu", "lru"] = "lfu"
    """eviction policy: `lfu` or `lru`"""
    lookup_timeout_s: Timeout = 0.5
    """a lookup that takes longer is a miss"""

    def __post_init__(self) -> None:
        check_bucket(self.store, feed=self.feed)

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> "EncoderSettings":
        """Read `ec_connector_extra_config`; a ConfigError names an unknown key."""
        return from_mapping(cls, extra, "ec_connector_extra_config")

    def open(self) -> "VisualKVCache":
        """Open the registry of encoder outputs with these budgets."""
        from dejakv.encoder_cache import VisualKVCache

        return VisualKVCache(
            self.max_entries,
            self.max_bytes,
            policy=self.policy,
            disk=self.store,
            disk_bytes=self.disk_bytes,
            feed=self.feed,
            ttl=self.ttl,
        )


@strict_dataclass(former_names=_FORMER)
class TierSettings(BudgetSettings):
    """Keys of a `DejaKVTier`, beside vLLM's for every tier."""

    memory_bytes: Count = 0
    """bytes of the store to keep in memory too, beside vLLM's `cpu_bytes_to_use`"""
    load_timeout_s: Timeout = ConnectorSettings.load_timeout_s
    """a load from a bucket whose data takes longer to read is a miss"""

    def __post_init__(self) -> None:
        if self.store is None or is_memory(self.store):
            raise ConfigError(
                "a tier in memory would be a second cpu_bytes_to_use: set store to a folder or a "
                "bucket"
            )
        if self.min_tokens or self.second_sight:
            raise ConfigError(
                "vLLM offers a tier chunks of a prompt, and each once: leave min_tokens and "
                "second_sight out"
            )
        self.cache_config()

    def cache_config(self) -> SemanticCacheConfig:
        """Return the settings of the store; a ConfigError tells what does not fit."""
        shared = {item.name: getattr(self, item.name) for item in fields(BudgetSettings)}
        return SemanticCacheConfig(**shared)

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> "TierSettings":
        """Read a tier's configuration; a ConfigError names an unknown key."""
        return from_mapping(cls, extra, "the tier of type DejaKVTier")


@dataclass(frozen=True)
class RequestOptions:
    """Choices of a request in `kv_transfer_params.dejakv`.

    They are untrusted input: any mistake becomes `problem`, and the request runs without reuse and
    says why. A further field, `quiet`, is read by `RequestState.informs_client`: the client did not
    ask for information about an exact answer.

    Attributes
    ----------
    mode : Mode
        How state may be reused.
    threshold : float or None
        Least share of copied text, from 0 to 1; it only tightens the server's. None without one.
    no_store : bool
        Whether the prompt's state must not be stored.
    donors : tuple[str, ...]
        Ids of the only donors beside exact ones, best first.
    ttl : float or None
        Seconds after which the prompt's state expires; None for the server's.
    labelled : bool
        The sender shows the label of an approximate answer, also where vLLM does not.
    problem : str
        Why the choices could not be read; empty if they could.
    """

    mode: Mode = "exact"
    threshold: float | None = None
    no_store: bool = False
    donors: tuple[str, ...] = ()
    ttl: float | None = None
    labelled: bool = False
    problem: str = ""

    def reuse_request(self) -> ReuseRequest:
        """Convert the choices for the finder."""
        return ReuseRequest(self.mode, self.threshold, self.donors, self.no_store)

    @classmethod
    def from_params(cls, params: object, settings: ConnectorSettings) -> "RequestOptions":
        """Read and check a request's `kv_transfer_params`. Never raises."""
        choices = choices_in(params)
        if choices is None and (params is None or isinstance(params, Mapping)):
            return cls(settings.mode)

        def refuse(why: str) -> "RequestOptions":
            # Choices that cannot be read may have asked for no_store.
            return cls("off", no_store=True, problem=why)

        if not isinstance(choices, Mapping):
            return refuse("kv_transfer_params.dejakv is no object")
        choices = cast(Mapping[str, Any], choices)
        field_names = {"mode", "threshold", "no_store", "donors", "ttl", "labelled", "quiet"}
        unknown_names = sorted(repr(name) for name in set(choices) - field_names)
        if unknown_names:
            return refuse(
                f"unknown field {unknown_names[0]}: a request chooses mode, threshold, no_store, "
                "ttl and donors"
            )

        # Each error names the choices that there are, since the client cannot see the
        # server's settings.
        mode = choices.get("mode", settings.mode)
        if mode not in MODES:
            return refuse(f"unknown mode {mode!r}: choose from {', '.join(MODES)}")
        if mode not in settings.allowed:
            return refuse(
                f"mode {mode!r} is not allowed here: the server allows "
                f"{', '.join(sorted(settings.allowed))}"
            )

        threshold = choices.get("threshold")
        if threshold is not None and not (_is_number(threshold) and 0.0 <= threshold <= 1.0):
            return refuse(
                f"threshold {threshold!r} is no share of a prompt: give a number from 0 to 1"
            )

        no_store = choices.get("no_store", False)
        if not isinstance(no_store, bool):
            return refuse(f"no_store {no_store!r} is neither true nor false")

        labelled = choices.get("labelled", False)
        if not isinstance(labelled, bool):
            return refuse(f"labelled {labelled!r} is neither true nor false")

        ttl = choices.get("ttl")
        if ttl is not None and not (_is_number(ttl) and ttl > 0):
            return refuse(f"ttl {ttl!r} is no time: give seconds, more than 0")

        donors = [] if choices.get("donors") is None else choices["donors"]
        if not isinstance(donors, list) or not all(
            isinstance(donor, str) for donor in cast(list[Any], donors)
        ):
            return refuse("donors is no list of strings")
        named = tuple(cast(list[str], donors))
        if len(named) > settings.blend_donors:
            return refuse(
                f"{len(named)} donors: the server takes state of at most "
                f"blend_donors={settings.blend_donors}"
            )
        return cls(
            cast(Mode, mode),
            None if threshold is None else float(threshold),
            no_store,
            named,
            None if ttl is None else float(ttl),
            labelled,
        )


def choices_in(params: object) -> object:
    """Return what connector parameters of any kind hold for DejaKV; None without any."""
    return cast(Mapping[str, Any], params).get("dejakv") if isinstance(params, Mapping) else None


def _is_number(value: object) -> bool:
    """Whether a float can hold it: integers in JSON have any length."""
    # Not isinstance, to which True is an int.
    return type(value) in (int, float) and abs(cast(float, value)) <= sys.float_info.max
