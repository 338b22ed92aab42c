"""The seam of encoders, and the unit vectors that pass between them and indexes."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import ConfigError, InputError
from dejakv.identity import digest_of
from dejakv.request import DEFAULT_PARTITION, Media

Vector = NDArray[np.float32]
Hit = tuple[str, float]

ANY = -2.0
"""Below every cosine: no threshold."""

WHOLE_BELOW = 256 * 1024**2
SAMPLES = 4096


class TextEncoder(Protocol):
    """Encoder of texts as unit vectors. Implementations are thread-safe.

    `fingerprint` covers everything that the vectors depend on. It is stored with them, because only
    vectors of the same fingerprint can be compared.
    """

    @property
    def fingerprint(self) -> str:
        """Return the digest of everything that the vectors depend on."""
        ...

    def encode(self, text: str) -> Vector:
        """Encode a text as a `[dim]` float32 vector of length 1.

        Raises
        ------
        InputError
            If the text has no direction, as an empty one.
        """
        ...


class ImageEncoder(Protocol):
    """Encoder of pictures as unit vectors, with the same rules as `TextEncoder`."""

    @property
    def fingerprint(self) -> str:
        """Return the digest of everything that the vectors depend on."""
        ...

    def encode(self, media: Media, partition: str = DEFAULT_PARTITION) -> Vector:
        """Encode a picture as a `[dim]` float32 vector of length 1.

        Parameters
        ----------
        media : Media
            The picture.
        partition : str
            Partition within which the result may be remembered.

        Raises
        ------
        InputError
            If the data is not a picture.
        """
        ...


def unit_vector(vector: Any, dim: int, owner: str = "the index") -> Vector:
    """Scale a vector to length 1.

    Parameters
    ----------
    vector : array_like
        The components.
    dim : int
        Number of components that the vector must have.
    owner : str
        The vector's user, as error messages name it.

    Returns
    -------
    NDArray, shape [dim]
        The vector as contiguous float32 of length 1.

    Raises
    ------
    ConfigError
        If the vector has another shape.
    InputError
        If the vector has no direction: it is zero, or contains NaN or infinity.

    Examples
    --------
    >>> unit_vector([3, 4], 2).tolist() == [np.float32(0.6), np.float32(0.8)]
    True
    """
    array = np.asarray(vector, dtype=np.float32)
    if array.ndim != 1 or array.shape[0] != dim:
        raise ConfigError(
            f"a vector of shape {tuple(array.shape)} does not fit {owner} of dimension {dim}: "
            "use the encoder that the index was made for, or make the index with the encoder's "
            "dimension"
        )

    with np.errstate(over="ignore"):
        square = float(array.dot(array))
    # The usual case in float32; the bounds keep its square root and inverse exact enough.
    if 1e-30 < square < 1e30:
        return array * np.float32(square**-0.5)
    # The squared length does not fit float32, or there is none.
    wide = array.astype(np.float64)
    length = float(np.linalg.norm(wide))
    if not 0.0 < length < np.inf:
        raise InputError(
            f"a vector for {owner} has no direction (it is zero, or contains NaN or infinity): "
            "check the encoder's input, and skip the request for this level"
        )

    return (wide / length).astype(np.float32)


def normalized(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale vectors `[..., dim]` to length 1, as float32. A vector of zeros stays as it is.

    Examples
    --------
    >>> normalized(np.array([[0.0, 2.0], [0.0, 0.0]], np.float32)).tolist()
    [[0.0, 1.0], [0.0, 0.0]]
    """
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)


def module_fingerprint(module: Any) -> str:
    """Digest the structure, parameters and buffers of a torch module: 32 hexadecimal digits.

    Names, shapes, types and values count. All values are read up to 256 MiB (0.2 s). Of larger
    models 4,096 to 8,191 values of each longer tensor are read, evenly spread: training changes
    nearly all of them.
    """
    import torch

    state = {
        name: tensor for name, tensor in module.state_dict().items() if hasattr(tensor, "numel")
    }
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    parts: list[str | bytes] = [repr(module)]
    # Sorted: the order of a state dictionary depends on how the module was built.
    for name in sorted(state):
        tensor = state[name].detach()
        parts.append(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}")
        flat = tensor.reshape(-1)
        if total > WHOLE_BELOW:
            flat = flat[:: max(1, flat.numel() // SAMPLES)]
        # As bytes: numpy has no bfloat16.
        parts.append(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())

    return digest_of(*parts)[:32]


_encoding = threading.Lock()


@contextmanager
def torch_threads(count: int = 1) -> Generator[None]:
    """Limit torch's threads within a `with` block, and restore their number afterwards.

    Small models lose more by contended threads than they gain. Blocks of several threads run one
    after another, because the number belongs to the whole process.
    """
    import torch

    with _encoding:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def encoder_remedy(setting: str) -> str:
    """Return the remedy for an encoder that cannot be loaded, as the end of an error message."""
    return (
        f'; or set {setting}="model" (--{setting.replace("_", "-")} model), which needs no download'
    )
