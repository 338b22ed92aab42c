# pyright: reportMissingImports=false
"""Vectors from the input embeddings and the vision tower of the model that vLLM serves in this process."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.engines.vllm.offline import Offline
from dejakv.errors import InputError
from dejakv.index.base import normalized
from dejakv.request import Media


class ModelEmbeddings:
    """The part of the engine that makes vectors. The decoder never runs."""

    _shared: Offline

    def _render(self, prompt: dict[str, Any], media: tuple[Media, ...]) -> Any:
        raise NotImplementedError

    def embed_tokens(self, token_ids: tuple[int, ...]) -> NDArray[np.float32]:
        """Input embeddings `[tokens, hidden]` float32."""
        import torch

        with torch.inference_mode():
            rows = self._model().embed_input_ids(torch.tensor(token_ids, dtype=torch.long))
        return rows.float().cpu().numpy()

    def embed_text(self, text: str) -> NDArray[np.float32]:
        """Mean-pooled, normalized input embedding of a text, `[hidden]` float32."""
        ids = tuple(self._shared.llm.get_tokenizer().encode(text, add_special_tokens=False))
        if not ids:
            raise InputError("an empty text has no embedding: give a question")
        return normalized(self.embed_tokens(ids).mean(axis=0))

    def embed_image(self, media: Media) -> NDArray[np.float32]:
        """Mean-pooled, normalized output of the served model's own vision tower, `[dim]` float32."""
        import torch

        placeholder = str(getattr(self._shared.llm.get_tokenizer(), "image_token", None) or "<image>")
        rendered = self._render({"prompt": placeholder}, (media,))
        (item,) = rendered["mm_kwargs"]["image"]
        values = {name: element.data for name, element in item.items()}
        batched = {n: v[None] if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        with torch.inference_mode():
            (rows,) = self._model().embed_multimodal(**batched)
        return normalized(rows.float().mean(dim=0).cpu().numpy())

    def _model(self) -> Any:
        from dejakv.engines.vllm.bind import bound_runner

        return bound_runner(self._shared.llm.llm_engine.vllm_config).get_model()
