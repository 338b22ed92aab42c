"""Loading a checkpoint with transformers: the model in evaluation mode, and its processor."""

from pathlib import Path
from typing import Any

from dejakv.errors import ModelError
from dejakv.models.gguf import SUFFIX, load_gguf
from dejakv.models.lckv.register import register
from dejakv.models.resolving import names, resolve


def load(name_or_path: str | Path, **options: Any) -> tuple[Any, Any]:
    """(model, processor) of a bundled or fetched name, a local folder, a GGUF file or a hub id. For a text model the
    processor is a tokenizer.

    `options` go to `from_pretrained` of the model (dtype, attn_implementation, trust_remote_code, ...); without them
    the weights stay in the checkpoint's own type on the CPU.

    Raises: ModelError if the name is unknown, files are missing, or the weights cannot be read.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    found = resolve(name_or_path)
    if isinstance(found, Path) and found.suffix == SUFFIX:
        return load_gguf(found, **options)
    where = str(found)
    register()
    remote = {"trust_remote_code": options.get("trust_remote_code", False)}
    try:
        config = AutoConfig.from_pretrained(where, **remote)
        multimodal = hasattr(config, "vision_config") or hasattr(config, "audio_config")
        loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
        model = loader.from_pretrained(where, **options)
        processor = (AutoProcessor if multimodal else AutoTokenizer).from_pretrained(where, **remote)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        known = ", ".join(names())
        raise ModelError(
            f"model {str(name_or_path)!r} does not load ({error}): give a complete checkpoint folder, a hub id that "
            f"can be reached from here, or a model of this package ({known})"
        ) from error
    return model.eval(), processor
