"""What keeps requests apart that must never match."""

from dejakv.config.find import MediaPolicy
from dejakv.engines.base import Prepared
from dejakv.identity import digest_of, media_key


def space_of(prepared: Prepared, media: MediaPolicy) -> str:
    """What separates requests that must never match: partition, epoch and, with `media="exact"`, the media."""
    request = prepared.request
    digests = [item.digest for item in request.media] or [span.digest for span in prepared.spans]
    apart = media_key(digests) if media == "exact" else ("media" if digests else "")
    return digest_of("space", request.partition, prepared.epoch, apart)[:40]
