"""An engine by name, as `--engine` gives it. Nothing heavy is imported before it is asked for."""

from typing import Any

from dejakv.config import SemanticCacheConfig
from dejakv.encoder_cache import VisualKVCache
from dejakv.encoder_cache.disk import DiskTier
from dejakv.experiments.settings import RunSettings


def open_engine(settings: RunSettings) -> Any:
    """Loads the model. Raises ModelError or MissingExtraError."""
    registry = encoder_registry(settings.cache)
    if settings.engine == "vllm":
        from dejakv.engines.vllm import VLLMEngine

        return VLLMEngine.from_pretrained(
            settings.model,
            dtype=settings.dtype,
            trust_remote_code=settings.trust_remote_code,
        )
    from dejakv.engines.transformers import TransformersEngine

    return TransformersEngine.from_pretrained(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        attn=settings.attn,
        trust_remote_code=settings.trust_remote_code,
        encoder_cache=registry,
    )


def encoder_registry(config: SemanticCacheConfig) -> VisualKVCache:
    """The registry of encoder outputs; with `enable_fusion_cache` and a folder it outlives the process."""
    tier = DiskTier.open(config.fusion_cache_dir) if config.enable_fusion_cache and config.fusion_cache_dir else None
    return VisualKVCache(max_entries=1_000_000, max_vram_bytes=config.encoder_bytes, disk=tier)


def open_templates(settings: RunSettings) -> Any:
    """What renders prompts for the model: its processor if it has one with a chat template, else its tokenizer."""
    from transformers import AutoProcessor, AutoTokenizer

    from dejakv.models import resolve

    where = str(resolve(settings.model))
    options = {"trust_remote_code": settings.trust_remote_code}
    try:
        processor: Any = AutoProcessor.from_pretrained(where, **options)
    except (ValueError, OSError, KeyError):
        processor = None
    if getattr(processor, "chat_template", None):
        return processor
    return AutoTokenizer.from_pretrained(where, **options)
