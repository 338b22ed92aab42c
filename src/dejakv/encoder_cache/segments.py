"""Clips by their segments, so that overlapping clips share: frames of a video, windows of a sound.

A segment is a unit that the tower encodes separately: a frame (or a temporal patch of frames) of most vision-language models, a
30-second window of Whisper-like audio towers. If a tower also looks at neighbours, `context` includes them in the key.

Missing segments of a clip are encoded in one call; segments that another caller is encoding are waited for.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from cachetools import LRUCache

from dejakv.encoder_cache.block import check_modality
from dejakv.encoder_cache.view import EncoderView, compute_content_hash
from dejakv.errors import InputError
from dejakv.identity import digest_of


def segment_hashes(segments: Sequence[bytes], context: int = 0) -> list[str]:
    """The content hash of each segment, including `context` neighbours on each side if the tower sees them.

    Raises InputError for a clip without segments or with an empty one.
    """
    if not segments or context < 0:
        raise InputError(
            f"a clip needs at least one segment and a context of 0 or more, not {len(segments)} and {context}"
        )
    own = [compute_content_hash(segment) for segment in segments]
    if not context:
        return own
    return [
        digest_of("segment", str(min(index, context)), *own[max(0, index - context) : index + context + 1])
        for index in range(len(own))
    ]


class SegmentedClips:
    """Whole clips over shared segments: a clip seen before is recognised by the digest of its file, without decoding it.

    The segments of `max_clips` clips are remembered (only hashes, about 100 bytes a segment).
    """

    def __init__(self, view: EncoderView, modality: str = "video", context: int = 0, max_clips: int = 1024) -> None:
        check_modality(modality)
        if max_clips < 1:
            raise InputError(f"max_clips is {max_clips}: give 1 or more")
        self._view = view
        self._modality = modality
        self._context = context
        self._clips: LRUCache[str, list[str]] = LRUCache(max_clips)
        self._lock = threading.Lock()

    def get_or_compute(
        self,
        raw_bytes: bytes,
        split: Callable[[bytes], Sequence[bytes]],
        compute: Callable[[list[bytes]], Sequence[Any]],
    ) -> list[Any]:
        """The embeddings of a clip's segments.

        split    decodes the clip's bytes into its segments' bytes; called only if the clip is new or a segment is missing
        compute  encodes the given segments, which are the missing ones
        """
        clip = compute_content_hash(raw_bytes)
        decoded: list[bytes] = []

        def segments() -> list[bytes]:
            if not decoded:
                decoded.extend(split(raw_bytes))
            return decoded

        with self._lock:
            hashes = self._clips.get(clip)
        if hashes is None:
            hashes = segment_hashes(segments(), self._context)
        embeddings = self._view.get_or_compute_many(
            hashes, self._modality, lambda unseen: compute([segments()[index] for index in unseen])
        )
        with self._lock:
            self._clips[clip] = hashes
        return embeddings
