"""From a vLLM request to the identities DejaKV keys by. What a client can choose never decides a partition or a medium."""

import hashlib
from typing import Any

import numpy as np
import torch

from dejakv.engines.base import Prepared
from dejakv.identity import Span, digest_of
from dejakv.request import DEFAULT_PARTITION, Request


def partition_of(cache_salt: str | None) -> str:
    """The tenant behind a `cache_salt`. The salt may be a secret, so only its digest is kept."""
    return DEFAULT_PARTITION if not cache_salt else "salt-" + digest_of("cache_salt", cache_salt)[:32]


def media_digest(item: Any) -> str:
    """SHA-256 of what the processor made of one medium: the tensors that the encoder gets.

    vLLM's own identifier is not used: a client may choose it (`uuid`), and two media under one uuid must not be taken for
    one another here.
    """
    sha = hashlib.sha256()
    for name in sorted(item):
        _update(sha, name, item[name].data)
    return sha.hexdigest()


def _update(sha: Any, name: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        for index, part in enumerate(value):
            _update(sha, f"{name}[{index}]", part)
        return
    if isinstance(value, torch.Tensor):
        header = f"{name}|{value.dtype}|{tuple(value.shape)}"
        flat = value.detach().cpu().contiguous().flatten()
        data = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    else:
        data = np.frombuffer(repr(value).encode(), np.uint8)
        header = f"{name}|{type(value).__name__}"
    sha.update(len(header).to_bytes(8, "little") + header.encode() + data.nbytes.to_bytes(8, "little"))
    sha.update(np.ascontiguousarray(data).data)


class AnonymousMedia(Exception):
    """A medium whose pixels are not at hand, so that nothing proves which medium it is."""


def spans_of(features: Any) -> tuple[Span, ...]:
    """Where each medium stands and what it is. Raises AnonymousMedia if a medium's data is not at hand."""
    spans: list[Span] = []
    for feature in features:
        if feature.data is None:
            raise AnonymousMedia("the media's data does not reach the scheduler in this configuration")
        spans.append(Span(feature.mm_position.offset, feature.mm_position.length, media_digest(feature.data)))
    return tuple(spans)


def prepare(request: Any, text: str, epoch: str, ttl: float | None = None) -> Prepared:
    """A vLLM request as the cache takes it. `text` is the prompt for the levels that compare text; `ttl` the request's own limit of
    what is kept of it, in seconds."""
    token_ids = tuple(request.prompt_token_ids)
    ours = Request(id=request.request_id, prompt=text, chunk=text, partition=partition_of(request.cache_salt), ttl=ttl)
    return Prepared(ours, token_ids, spans_of(request.mm_features), epoch=epoch)
