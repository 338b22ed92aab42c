"""Vectors from the served model's own input embeddings and vision tower, for levels that compare."""

from collections.abc import Sequence
from threading import RLock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.engines.transformers.vision import Vision
from dejakv.errors import InputError
from dejakv.index.base import normalized
from dejakv.request import DEFAULT_PARTITION, Media


class Embeddings:
    """The part of an engine that makes vectors. The decoder never runs."""

    model: Any
    tokenizer: Any
    vision: Vision | None
    _lock: RLock

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    def _check_model(self, expected: str = "") -> None:
        raise NotImplementedError

    def embed_tokens(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Input embeddings `[tokens, hidden]` float32 of plain tokens; the decoder does not run."""
        with torch.inference_mode():
            ids = torch.tensor(list(token_ids), dtype=torch.long, device=self.device)
            return self.model.get_input_embeddings()(ids).float().cpu().numpy()

    def embed_text(self, text: str) -> NDArray[np.float32]:
        """Mean of a text's input embeddings at length 1, `[hidden]` float32. Raises: InputError for an empty text."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise InputError("an empty text has no embedding: give a text")
        return normalized(self.embed_tokens(ids).mean(0))

    def forget(self, partition: str | None) -> None:
        """See `Forgets`: pictures."""
        if self.vision is not None:
            with self._lock:
                self.vision.forget(partition)

    def embed_image(self, media: Media, partition: str = DEFAULT_PARTITION) -> NDArray[np.float32]:
        """Mean of the picture's rows at length 1, `[hidden]` float32. The tower runs if the registry does not hold it;
        the run is counted with the next request. Raises: InputError."""
        if self.vision is None:
            raise InputError(f"{type(self.model).__name__} takes no pictures: choose an image-text model")
        with self._lock:
            self._check_model()
            features = self.vision.features(media, partition)
            self.vision.uncounted += self.vision.take_runs()
        rows = features[0] if features.dim() == 3 else features
        return normalized(rows.float().mean(0).numpy())
