"""What keeps requests apart that must never match."""

from dejakv.config.find import MediaPolicy
from dejakv.engines.base import Prepared
from dejakv.identity import digest_of, media_key
from dejakv.store.base import ChunkMeta


def space_of(prepared: Prepared, media: MediaPolicy) -> str:
    """What separates requests that must never match: partition, epoch and, with `media="exact"`, the media."""
    request = prepared.request
    digests = [item.digest for item in request.media] or [span.digest for span in prepared.spans]
    apart = media_key(digests) if media == "exact" else ("media" if digests else "")
    return _space(request.partition, prepared.epoch, apart)


def moved(meta: ChunkMeta, partition: str) -> str:
    """The space of a stored prompt in another partition, under the policy for media that it was stored with."""
    digests = [span.digest for span in meta.spans]
    ways = (media_key(digests), "media", "")
    apart = next((way for way in ways if _space(meta.partition, meta.epoch, way) == meta.space), ways[0])
    return _space(partition, meta.epoch, apart)


def _space(partition: str, epoch: str, apart: str) -> str:
    return digest_of("space", partition, epoch, apart)[:40]
