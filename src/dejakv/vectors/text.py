"""Text encoders: a sentence-transformers model, or the served model's own input embeddings."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from dejakv.config import DEFAULT_ENCODER
from dejakv.errors import InputError, MissingExtraError, ModelError
from dejakv.identity import epoch_of
from dejakv.vectors.base import (
    TextEncoder,
    Vector,
    encoder_remedy,
    module_fingerprint,
    torch_threads,
    unit_vector,
)


class SentenceTransformerEncoder:
    """Text encoder by a sentence-transformers model. Needs the extra `embed`.

    A text longer than the model's limit is cut into pieces whose vectors are averaged, so that all
    of it counts.

    Parameters
    ----------
    name_or_path : str
        Hub name or local folder.
    device : str
        Torch device of the model.
    threads : int
        Torch threads of an encoding. A short text takes 8 ms on one thread and 300 ms on two
        contended ones.

    Raises
    ------
    MissingExtraError
        If sentence-transformers is not installed.
    ModelError
        If the model cannot be loaded.
    """

    def __init__(
        self, name_or_path: str = DEFAULT_ENCODER, *, device: str = "cpu", threads: int = 1
    ) -> None:
        self.name = name_or_path
        self._threads = threads
        self._model = load_sentence_transformer(name_or_path, device)
        self.fingerprint = epoch_of(
            {
                "kind": "sentence-transformers",
                "weights": module_fingerprint(self._model),
                "long": "pieces averaged",
            }
        )

    def encode(self, text: str) -> Vector:
        """Encode a text as a unit vector, the mean of its pieces' vectors.

        Raises
        ------
        InputError
            For a text without a direction, as an empty one.
        """
        pieces = self._pieces(text)
        with torch_threads(self._threads):
            rows: Any = self._model.encode(
                pieces, normalize_embeddings=True, show_progress_bar=False
            )

        return unit_vector(rows.mean(axis=0), rows.shape[1], f"the encoder {self.name!r}")

    def _pieces(self, text: str) -> list[str]:
        """Cut a text into parts within the model's limit, between words where there are enough."""
        if not text.strip():
            raise InputError(
                "an empty text has no embedding: give a question, or disable the semantic level"
            )

        # Two less, for the tokens that the model puts around a text.
        limit = int(self._model.max_seq_length or 512) - 2
        # A token has at least one character.
        if len(text) <= limit:
            return [text]
        tokens = len(
            self._model.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)[
                "input_ids"
            ]
        )
        if tokens <= limit:
            return [text]
        # A fifth is spare: parts of equal length differ in tokens.
        parts = -(-tokens * 5 // (limit * 4))

        words = text.split()
        # Some scripts have no spaces.
        units, glue = (words, " ") if len(words) >= 4 * parts else (list(text), "")
        bounds = [round(i * len(units) / parts) for i in range(parts + 1)]
        return [glue.join(units[a:b]) for a, b in pairwise(bounds)]


class ModelTextEncoder:
    """Text encoder by the served model's own input embeddings, averaged over the text.

    It needs no download and no second model, and takes about 0.05 ms. It sees the words but not
    their order, so it needs the lexical guard.

    Parameters
    ----------
    embed : Callable[[str], Any]
        `engine.embed_text`: takes a text and returns `[hidden]`.
    fingerprint : str
        Fingerprint of the served model (`engine.epoch`).
    """

    def __init__(self, embed: Callable[[str], Any], fingerprint: str) -> None:
        self._embed = embed
        self.fingerprint = epoch_of({"kind": "input embeddings, averaged", "model": fingerprint})

    def encode(self, text: str) -> Vector:
        """Encode a text as a unit vector, the mean of its tokens' embeddings.

        Parameters
        ----------
        text : str
            Text to encode.

        Returns
        -------
        Vector, shape [hidden]
            Float32 of length 1.

        Raises
        ------
        InputError
            For a text without a direction, as an empty one.
        """
        if not text.strip():
            raise InputError(
                "an empty text has no embedding: give a question, or disable the semantic level"
            )

        vector = np.asarray(self._embed(text), dtype=np.float32)
        return unit_vector(vector, vector.size, "the served model's embeddings")


def varying_part(text: str, window: int = 0) -> str:
    """Return the part of a text that is embedded: at most `window` characters (0: all), stripped.

    Behind a long common preamble all texts look alike. So levels compare a request's *chunk*
    (`--chunk-source`; the default is the question alone), and with `--chunk-window N` its first N
    characters.

    Examples
    --------
    >>> varying_part(" Where is the cat?", window=5)
    'Where'
    """
    part = text.strip()
    return part[:window].rstrip() if window else part


def text_encoder(
    name: str, *, embed: Callable[[str], Any] | None = None, fingerprint: str = "", threads: int = 0
) -> TextEncoder:
    """Make the encoder that `--index-encoder` names.

    Parameters
    ----------
    name : str
        `model`, or the hub name or folder of a sentence-transformers model.
    embed : Callable, optional
        `engine.embed_text`, which `model` needs.
    fingerprint : str
        `engine.epoch`, for `model`.
    threads : int
        Torch threads of a sentence encoder; 0 means one.

    Raises
    ------
    MissingExtraError
        If sentence-transformers is needed and not installed.
    ModelError
        If the model cannot be loaded, or `model` is named without `embed`.
    """
    if name != "model":
        return SentenceTransformerEncoder(name, threads=max(1, threads))
    if embed is None:
        raise ModelError(
            "the index encoder 'model' needs the served model's embeddings, which this engine "
            "does not provide: "
            f"set index_encoder (--index-encoder) to {DEFAULT_ENCODER}"
        )

    return ModelTextEncoder(embed, fingerprint)


_loaded: WeakValueDictionary[tuple[str, str], Any] = WeakValueDictionary()
_ahead: dict[tuple[str, str], Any] = {}
"""Encoders that were looked at before the served model is loaded, until they are used."""


def sentence_width(name_or_path: str, setting: str = "index_encoder") -> int | None:
    """Return the components of an encoder's vectors, None if the model does not tell.

    The loaded model is kept for its first user. Raises as `load_sentence_transformer` does.
    """
    model = _ahead[name_or_path, "cpu"] = load_sentence_transformer(name_or_path, "cpu", setting)
    # The method's name changed with 5.1.
    width = (
        getattr(model, "get_embedding_dimension", None) or model.get_sentence_embedding_dimension
    )
    return width()


def load_sentence_transformer(
    name_or_path: str, device: str, setting: str = "index_encoder"
) -> Any:
    """Load a sentence-transformers model, shared by all users of the name while one of them exists.

    Parameters
    ----------
    name_or_path : str
        Hub name or local folder.
    device : str
        Torch device.
    setting : str
        Setting that named the model, for messages.

    Raises
    ------
    MissingExtraError
        If sentence-transformers is not installed.
    ModelError
        If the model cannot be loaded.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        purpose = f"the encoder {name_or_path!r}"
        raise MissingExtraError(
            "sentence-transformers", "embed", purpose, encoder_remedy(setting)
        ) from None

    key = (name_or_path, device)
    if (cached_model := _ahead.pop(key, None) or _loaded.get(key)) is not None:
        return cached_model
    # Only a name of the hub needs the network; a folder must load without.
    if not Path(name_or_path).expanduser().exists():
        from dejakv.models.loading import without_network

        without_network()

    try:
        model = _loaded[key] = SentenceTransformer(name_or_path, device=device)
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        # The error of a download is ninety lines long.
        raise ModelError(
            f"the encoder {name_or_path!r} cannot be loaded ({type(error).__name__}: {reason}): "
            "give a sentence-transformers "
            f"name that can be downloaded, or a local folder{encoder_remedy(setting)}"
        ) from None

    return model
