"""Token ids as an array that can be compared: a picture's placeholders stand for that picture and for no other."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dejakv.identity import Span

Ids = NDArray[np.int64]


def with_media(token_ids: Sequence[int] | Ids, spans: Sequence[Span]) -> Ids:
    """Token ids `[n]` in which a picture's placeholders have ids of their own (negative), from its digest and their order: so
    a placeholder fits only the same row of the same picture."""
    ids = np.array(token_ids, dtype=np.int64)
    for span in spans:
        base = int(span.digest[:10], 16)
        ids[span.start : span.start + span.length] = -(base * (1 << 16) + np.arange(span.length) + 1)
    return ids
