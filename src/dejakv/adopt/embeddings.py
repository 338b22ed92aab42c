"""The served model's input embeddings, read from its weight files: for text embeddings in a process without the model."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import ModelError
from dejakv.vectors.base import normalized

_SUFFIX = "embed_tokens.weight"


class InputEmbeddings:
    """Looks up rows of the embedding table, which is read at once (vocabulary x hidden, float32): a first request that waits
    for it would miss.

    epoch  names the table for whoever keeps vectors made with it

    Raises: ModelError if the folder's weight files hold no input embeddings.
    """

    def __init__(self, folder: Path, tokenizer: Any, epoch: str) -> None:
        self.folder = folder
        self.epoch = epoch
        self._tokenizer = tokenizer
        self._table = self._read()

    def embed_text(self, text: str) -> NDArray[np.float32]:
        """Mean of a text's token embeddings, of length one: `[hidden]` float32."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            return np.zeros(self._table.shape[1], dtype=np.float32)
        return normalized(self._table[ids].mean(axis=0))

    def _read(self) -> NDArray[np.float32]:
        from safetensors import safe_open

        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name.endswith(_SUFFIX):
                        return file.get_tensor(name).float().numpy()
        raise ModelError(
            f"no input embeddings (*{_SUFFIX}) in {self.folder}: set index_encoder to a sentence-transformers model"
        )
