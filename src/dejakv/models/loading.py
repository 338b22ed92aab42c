"""Models by name or path: what a `--model` value means, and loading it with transformers."""

import difflib
from pathlib import Path
from typing import Any

from dejakv.errors import ModelError
from dejakv.models.gguf import SUFFIX, load_gguf
from dejakv.models.lckv import register
from dejakv.models.table import known, names, path


def resolve(name_or_path: str | Path) -> Path | str:
    """A bundled or fetched name, a local folder or a GGUF file gives its path, anything else is a hub id.

    Raises: MissingExtraError for a bundled name without `dejakv-models`; ModelError for a damaged model, one that is not fetched
    yet (naming the command), a folder without config.json, a path that does not exist, and a name that looks like a misspelled
    one of this package.
    """
    text = str(name_or_path)
    if text in names():
        return path(text)
    choice = known()
    local = Path(text).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelError(f"{text} is a folder without config.json: give the folder of a checkpoint, or {choice}")
        return local
    if local.suffix == SUFFIX and local.is_file():
        return local
    is_path = isinstance(name_or_path, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1
    if is_path or local.suffix == SUFFIX:
        raise ModelError(f"no checkpoint at {text}: give an existing folder or GGUF file, a hub id, or {choice}")
    if not text.strip():
        raise ModelError(f"the model's name is empty: give a folder, a hub id, or {choice}")
    if "/" not in text and difflib.get_close_matches(text.lower(), names(), n=1, cutoff=0.6):
        raise ModelError(f"unknown model {text!r}: choose {choice}, a folder, or a hub id")
    return text


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
        raise ModelError(
            f"model {str(name_or_path)!r} does not load ({error}): give a complete checkpoint folder, a hub id that "
            f"can be reached from here, or a model of this package ({', '.join(names())})"
        ) from error
    return model.eval(), processor
