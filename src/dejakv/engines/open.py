"""Which model in which engine, and the engine by that choice. Nothing heavy is imported before it is asked for."""

from dataclasses import dataclass
from typing import Any, Literal

from dejakv.config import SemanticCacheConfig, switched_off
from dejakv.encoder_cache import VisualKVCache
from dejakv.settings import beside, check_fields, is_memory

EngineName = Literal["transformers", "vllm"]


@dataclass(frozen=True)
class ModelChoice:
    """A model, and how it is loaded.

    model              name from `dejakv models`, local folder, .gguf file or hub id
    engine             `transformers` or `vllm`
    dtype              `auto`, `fp32`, `bf16` or `fp16`
    device             `auto`, `cpu`, `cuda` or `cuda:N`; of the transformers engine
    attn               attention implementation of the transformers engine: `sdpa` or `eager`
    trust_remote_code  run Python code from the model's repository
    """

    model: str
    engine: EngineName = "transformers"
    dtype: str = "auto"
    device: str = "auto"
    attn: str = "sdpa"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_fields(self, flags=True)


def open_engine(choice: ModelChoice, cache: SemanticCacheConfig) -> Any:
    """Load the model, with the encoder registry and pruning of a cache's settings. Raises: ModelError, MissingExtraError."""
    # Before the heavy import: wrong settings of the cache fail at once.
    registry = encoder_registry(cache)
    from dejakv.engines.transformers import TransformersEngine

    return TransformersEngine.from_pretrained(
        choice.model,
        dtype=choice.dtype,
        device=choice.device,
        attn=choice.attn,
        trust_remote_code=choice.trust_remote_code,
        encoder_cache=registry,
        prune=cache.prune,
    )


def state_places(engine: EngineName, cache: SemanticCacheConfig) -> list[str]:
    """The places in which a run leaves state for the next one."""
    places = [cache.store, cache.disk_dir, cache.fusion_cache_dir, cache.fusion_states_dir]
    if engine == "vllm":
        places += [connector_place(store_place) for store_place in (cache.store, cache.disk_dir) if store_place]
    return [place for place in places if place and not is_memory(place)]


def connector_place(place: str) -> str:
    """The place of the store of vLLM's connector, beside that of a run."""
    return place if is_memory(place) else beside(place, "-vllm")


def encoder_registry(config: SemanticCacheConfig) -> VisualKVCache | None:
    """The registry of encoder outputs; with `enable_fusion_cache` and a folder it outlives the process. None where reuse is off."""
    if switched_off():
        return None
    disk = config.fusion_cache_dir if config.enable_fusion_cache else None
    lifetime = config.lifetime(config.ttl_encoder)

    return VisualKVCache(
        max_entries=1_000_000,
        max_vram_bytes=config.encoder_bytes,
        disk=disk,
        feed=config.feed,
        ttl=lifetime,
        parts=config.parts,
    )


def takes_pictures(choice: ModelChoice) -> bool:
    """Whether the model reads pictures, by its configuration; True if that cannot be read, which loading reports."""
    from dejakv.models import resolve
    from dejakv.models.gguf import is_gguf

    if is_gguf(resolve(choice.model)):
        return False
    config = _configuration(choice)
    return config is None or hasattr(config, "vision_config")


def hidden_size(choice: ModelChoice) -> int | None:
    """Return the width of the model's input embeddings, by its configuration; None if that does not tell."""
    config = _configuration(choice)
    text = config.get_text_config() if config is not None else None
    narrower = any(hasattr(text, name) for name in ("embedding_size", "word_embed_proj_dim"))
    return None if narrower else getattr(text, "hidden_size", None)


def _configuration(choice: ModelChoice) -> Any:
    """Read a model's configuration; None where there is none to read, as in a GGUF file."""
    from transformers import AutoConfig

    from dejakv.models import resolve
    from dejakv.models.gguf import is_gguf

    source = resolve(choice.model)
    if is_gguf(source):
        return None
    try:
        return AutoConfig.from_pretrained(str(source), trust_remote_code=choice.trust_remote_code)
    except (OSError, ValueError, KeyError):
        return None


def open_templates(choice: ModelChoice) -> Any:
    """The model's processor if it has one with a chat template, else its tokenizer: it renders prompts."""
    from transformers import AutoProcessor, AutoTokenizer

    from dejakv.models import resolve
    from dejakv.models.gguf import is_gguf, load_gguf_tokenizer

    model_source = resolve(choice.model)
    if is_gguf(model_source):
        return load_gguf_tokenizer(model_source)

    where = str(model_source)
    options = {"trust_remote_code": choice.trust_remote_code}
    try:
        processor: Any = AutoProcessor.from_pretrained(where, **options)
    except (ValueError, OSError, KeyError):
        processor = None
    # Some repositories keep the chat template with the tokenizer alone.
    if getattr(processor, "chat_template", None):
        return processor
    return AutoTokenizer.from_pretrained(where, **options)
