"""The choice of a model and an engine, and the engine made by it.

Nothing heavy is imported before it is asked for.
"""

from typing import Any, Literal

from dejakv.config import SemanticCacheConfig, switched_off
from dejakv.encoder_cache import VisualKVCache
from dejakv.settings import is_memory, sibling_place, strict_dataclass

EngineName = Literal["transformers", "vllm"]


@strict_dataclass(flags=True)
class ModelChoice:
    """A model, and how it is loaded."""

    model: str
    """name from `dejakv models`, local folder, .gguf file or hub id"""
    engine: EngineName = "transformers"
    """`transformers` or `vllm`"""
    dtype: str = "auto"
    """`auto`, `fp32`, `bf16` or `fp16`"""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`; of the transformers engine"""
    attn: str = "sdpa"
    """attention implementation of the transformers engine: `sdpa` or `eager`"""
    trust_remote_code: bool = False
    """run Python code from the model's repository"""


def open_engine(choice: ModelChoice, cache: SemanticCacheConfig) -> Any:
    """Load the model, with the encoder registry and pruning of a cache's settings.

    Raises
    ------
    ModelError
        The model is missing, damaged or unsupported.
    MissingExtraError
        A package that the model needs is not installed.
    """
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
    """Return the places in which a run leaves state for the next one."""
    places = [cache.store, cache.disk_dir, cache.fusion_cache_dir, cache.fusion_states_dir]
    if engine == "vllm":
        places += [
            connector_place(store_place)
            for store_place in (cache.store, cache.disk_dir)
            if store_place
        ]
    return [place for place in places if place and not is_memory(place)]


def connector_place(place: str) -> str:
    """Return the place of the vLLM connector's store, beside that of a run."""
    return place if is_memory(place) else sibling_place(place, "-vllm")


def encoder_registry(config: SemanticCacheConfig) -> VisualKVCache | None:
    """Make the registry of encoder outputs; None where reuse is switched off.

    With `enable_fusion_cache` and a folder its content outlives the process.
    """
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
    """Tell whether the model reads pictures, by its configuration.

    True if the configuration cannot be read: loading the model reports that.
    """
    from dejakv.models import resolve
    from dejakv.models.gguf import is_gguf

    if is_gguf(resolve(choice.model)):
        return False
    config = _configuration(choice)
    return config is None or hasattr(config, "vision_config")


def hidden_size(choice: ModelChoice) -> int | None:
    """Return the width of the model's input embeddings; None if it is unknown.

    It is unknown if the configuration cannot be read (a GGUF file has none) or has no
    `hidden_size`, and if it names a width of the embeddings beside that, as for ALBERT and OPT.
    """
    config = _configuration(choice)
    text = config.get_text_config() if config is not None else None
    # Some models embed at a smaller width than their layers have (ALBERT, OPT).
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
    """Return what renders prompts: the processor if it has a chat template, else the tokenizer."""
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
