"""Loads a processor, also where a part of it that pictures never need (video) lacks its dependency."""

import inspect
from typing import Any

from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

_OPTIONAL = ("video_processor", "audio_tokenizer")


def load_processor(where: str, trust_remote_code: bool = False) -> Any:
    """The model's own processor. Video processors of transformers need torchvision; without it the same processor is
    put together from its tokenizer and its picture part. Raises: whatever loading raises if that does not help."""
    try:
        return AutoProcessor.from_pretrained(where, trust_remote_code=trust_remote_code)
    except (ImportError, OSError) as error:
        if "video" not in str(error).lower() and "torchvision" not in str(error).lower():
            raise
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
        if type(config) not in PROCESSOR_MAPPING:
            raise
        kind: Any = PROCESSOR_MAPPING[type(config)]
        settings, _ = kind.get_processor_dict(where)
        accepted = inspect.signature(kind.__init__).parameters
        own = {name: value for name, value in settings.items() if name in accepted and not name.endswith("_processor")}
        return pictures_only(
            kind,
            image_processor=AutoImageProcessor.from_pretrained(where, trust_remote_code=trust_remote_code),
            tokenizer=AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code),
            **own,
        )


def pictures_only(kind: Any, **parts: Any) -> Any:
    """A processor of class `kind` whose video part is absent."""

    class PicturesOnly(kind):
        video_processor = None

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name not in _OPTIONAL]

    PicturesOnly.__name__ = kind.__name__
    absent = {name: None for name in _OPTIONAL if name in inspect.signature(kind.__init__).parameters}
    return PicturesOnly(**{**absent, **parts})
