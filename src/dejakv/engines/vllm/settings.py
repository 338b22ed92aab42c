"""Keys of the connectors' `kv_connector_extra_config`, and choices of a request."""

import sys
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from dejakv.config import (
    LEFT,
    BlendSettings,
    BudgetSettings,
    LifetimeSettings,
    SemanticCacheConfig,
    check_bucket,
    take_former,
)
from dejakv.decide.plan import ReuseRequest
from dejakv.errors import ConfigError
from dejakv.settings import Address, Count, NumberRange, Place, Positive, Seconds, Share, check_fields, from_mapping
from dejakv.trust.settings import BoundSettings

if TYPE_CHECKING:
    from dejakv.blend.settings import BlendConfig
    from dejakv.encoder_cache import VisualKVCache

Mode = Literal["off", "exact", "blend"]
MODES: tuple[Mode, ...] = ("off", "exact", "blend")
Timeout = Annotated[float, NumberRange(0, above=True)]

_TEXT = (
    "the connector finds copied text and the donors that a request names: compare prompts in other words before vLLM, with "
    "`similarity_threshold` and `index_encoder` in DEJAKV_ADOPT"
)
_ALONE = "run the other connector alone, or both below vLLM's MultiConnector with mode exact"
LEFT_HERE: dict[str, str] = {
    "inner": _ALONE,
    "inner_isolated": _ALONE,
    "promote": "a client sends the prompt again with mode exact and max_tokens=1 when the server is idle",
    **dict.fromkeys(
        (
            "index_encoder", "encoder_threads", "similarity_threshold", "chunk_window", "lexical_guard", "cross_encoder",
            "paraphrase_threshold",
        ),
        _TEXT,
    ),
}  # fmt: skip
"""Keys of earlier versions, and what took the place of each."""

NOT_QUANTIZED = (
    "kv_quantization is of the transformers engine: vLLM's blends are checked with stored exact state, and there would be none. Leave it "
    "out; compress, and vLLM's --kv-cache-dtype with mode exact, take fewer bytes too"
)


@dataclass(frozen=True)
class ConnectorSettings(BlendSettings, BudgetSettings, BoundSettings):
    """Keys of `kv_connector_extra_config`, beside those of its base classes.

    mode               default mode of a request: `exact` or `blend`
    modes              modes open to requests; by default `off`, `exact` and `mode`
    min_tokens         least tokens of a prompt to look up or store
    min_new_tokens     least tokens not stored yet for a prompt to be stored
    max_pending_bytes  saves under way; what is beyond it is saved in a later step, or not and counted. As much for the state that blends start
                       from; a longer prompt is not blended
    refresh_s          seconds between searches for other processes' chunks; 0 never
    lookup_timeout_s   a lookup that takes longer is a miss
    load_timeout_s     a load whose data takes longer to read is a miss
    unlabelled_answers  blend also for answers of which vLLM shows no label: streams, beams and further prompts of one call, without
                       `dejakv.adopt.ServerMiddleware`. False: these are computed exactly
    copied_text        let blend search for runs of tokens anywhere in stored prompts, beside a request's named donors
    blend_max_share    largest share of rows to compute in a blend; a prompt that needs more is computed in full
    blend_tail         last tokens of the prompt, computed by vLLM itself after a blend, at least 1
    """

    mode: Literal["exact", "blend"] = "exact"
    modes: tuple[Mode, ...] = ()
    min_tokens: Count = 16
    min_new_tokens: Count = 16
    max_pending_bytes: Count = 2 * 1024**3
    refresh_s: Seconds = 5.0
    lookup_timeout_s: Timeout = 0.5
    load_timeout_s: Timeout = 10.0
    unlabelled_answers: bool = False
    copied_text: bool = True
    blend_max_share: Share = 0.8
    blend_tail: Positive = 16
    store_dir: InitVar[str | None] = None

    def __post_init__(self, store_dir: str | None) -> None:
        take_former(self, store_dir, "store_dir")
        if self.mode == "adopt":
            raise ConfigError(
                "mode='adopt' rewrites the prompt before vLLM sees it: use dejakv.adopt, or `dejakv run"
                " --engine vllm --reuse adopt`"
            )

        check_fields(self)
        # For its errors alone: settings that do not fit end the start.
        if self.may_blend:
            self.blend_config()
        if self.error_bound is not None and self.certificate is None:
            raise ConfigError(
                f"error_bound={self.error_bound} is kept by a certificate here: make one with `dejakv certify --engine vllm`, and name its "
                "file in certificate"
            )

        defaults = (ConnectorSettings.blend_tail, ConnectorSettings.blend_max_share)
        if self.certificate is not None and (self.blend_tail, self.blend_max_share) != defaults:
            raise ConfigError("certificates are of the default blend_tail and blend_max_share: leave both out")
        self.cache_config()

    def blend_config(self) -> "BlendConfig":
        """Settings of the worker's blends. Raises ConfigError for settings that do not fit."""
        from dejakv.blend.settings import BlendConfig

        quality = self.blend
        return BlendConfig(
            map=self.blend_map,
            selector=quality.selector,
            share=quality.share,
            max_share=self.blend_max_share,
        )

    @property
    def allowed(self) -> frozenset[str]:
        """Modes open to requests in `kv_transfer_params.dejakv.mode`."""
        return frozenset(self.modes or ("off", "exact", self.mode)) | {self.mode}

    @property
    def may_blend(self) -> bool:
        return "blend" in self.allowed

    def cache_config(self) -> SemanticCacheConfig:
        """The same settings for levels, guards and planner. Raises ConfigError for settings that do not fit."""
        shared = {
            item.name: getattr(self, item.name)
            for part in (BlendSettings, BudgetSettings, BoundSettings)
            for item in fields(part)
        }
        if self.max_bytes:
            shared["memory_bytes"] = min(self.memory_bytes, self.max_bytes)

        return SemanticCacheConfig(
            **shared,
            copied_text=self.copied_text,
            semantic_text=False,
            reuse="blend" if self.may_blend else "exact",  # the index of copied text is filled at the start
        )

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> "ConnectorSettings":
        """Read `kv_connector_extra_config`. Raises: ConfigError for an unknown key, listing the known, or a removed one."""
        if "kv_quantization" in extra:
            raise ConfigError(NOT_QUANTIZED)
        return from_mapping(cls, extra, "kv_connector_extra_config", {**LEFT, **LEFT_HERE})


@dataclass(frozen=True)
class EncoderSettings(LifetimeSettings):
    """Keys of `ec_connector_extra_config`, beside `ttl` (`LifetimeSettings`).

    store             place of outputs that outlive the process, as the other connector's; None: this process's memory
    max_bytes         maximum bytes of outputs in memory
    max_entries       maximum outputs in memory
    disk_bytes        maximum bytes of outputs in `store`
    feed              of a bucket, as the other connector's
    policy            eviction policy: `lfu` or `lru`
    lookup_timeout_s  a lookup that takes longer is a miss
    """

    store: Place | None = None
    max_bytes: Positive = 1024**3
    max_entries: Positive = 10_000
    disk_bytes: Count = 8 * 1024**3
    feed: Address | None = None
    policy: Literal["lfu", "lru"] = "lfu"
    lookup_timeout_s: Timeout = 0.5
    store_dir: InitVar[str | None] = None

    def __post_init__(self, store_dir: str | None) -> None:
        take_former(self, store_dir, "store_dir")
        check_fields(self)
        check_bucket(self.store, feed=self.feed)

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> "EncoderSettings":
        return from_mapping(cls, extra, "ec_connector_extra_config")

    def open(self) -> "VisualKVCache":
        """The registry with these budgets."""
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


@dataclass(frozen=True)
class RequestOptions:
    """Choices of a request in `kv_transfer_params.dejakv`. Untrusted input: any mistake becomes `problem`, and the request runs
    without reuse and says why.

    labelled: who sends the request shows the label of an approximate answer, also where vLLM does not. `quiet`, read by
    `Tracked.tells`: the client did not ask for what is said of an exact one.
    """

    mode: Mode = "exact"
    threshold: float | None = None
    no_store: bool = False
    donors: tuple[str, ...] = ()
    ttl: float | None = None
    labelled: bool = False
    problem: str = ""

    def ask(self) -> ReuseRequest:
        """The same for the finder."""
        return ReuseRequest(self.mode, self.threshold, self.donors, self.no_store)

    @classmethod
    def of(cls, params: object, settings: ConnectorSettings) -> "RequestOptions":
        """Read and check a request's `kv_transfer_params`. Never raises."""
        choices = choices_in(params)
        if choices is None and (params is None or isinstance(params, Mapping)):
            return cls(settings.mode)

        def refuse(why: str) -> "RequestOptions":
            # What cannot be read may have asked for it.
            return cls("off", no_store=True, problem=why)

        if not isinstance(choices, Mapping):
            return refuse("kv_transfer_params.dejakv is no object")
        choices = cast(Mapping[str, Any], choices)
        field_names = {"mode", "threshold", "no_store", "donors", "ttl", "labelled", "quiet"}
        unknown_names = sorted(repr(name) for name in set(choices) - field_names)
        if unknown_names:
            return refuse(
                f"unknown field {unknown_names[0]}: a request chooses mode, threshold, no_store, ttl and donors"
            )

        mode = choices.get("mode", settings.mode)
        if mode not in MODES:
            return refuse(f"unknown mode {mode!r}: choose from {', '.join(MODES)}")
        if mode not in settings.allowed:
            return refuse(f"mode {mode!r} is not allowed here: the server allows {', '.join(sorted(settings.allowed))}")

        threshold = choices.get("threshold")
        if threshold is not None and not (_is_number(threshold) and 0.0 <= threshold <= 1.0):
            return refuse(f"threshold {threshold!r} is no share of a prompt: give a number from 0 to 1")

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
        if not isinstance(donors, list) or not all(isinstance(donor, str) for donor in cast(list[Any], donors)):
            return refuse("donors is no list of strings")
        named = tuple(cast(list[str], donors))
        if len(named) > settings.blend_donors:
            return refuse(
                f"{len(named)} donors: the server takes state of at most blend_donors={settings.blend_donors}"
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
    """What a request's connector parameters, whatever they are, hold for DejaKV; None without any."""
    return cast(Mapping[str, Any], params).get("dejakv") if isinstance(params, Mapping) else None


def _is_number(value: object) -> bool:
    """Whether a float can hold it: integers in JSON have any length."""
    # Not isinstance, to which True is an int.
    return type(value) in (int, float) and abs(cast(float, value)) <= sys.float_info.max
