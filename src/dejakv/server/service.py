"""What the endpoints share: from a checked body to a request, through the queue, to an answer."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HttpRequest

from dejakv.errors import InputError
from dejakv.pipeline import Answer
from dejakv.request import Media, Request, Sampling
from dejakv.server.settings import ServerSettings
from dejakv.server.worker import Job, Worker

CLIENT_GONE = 499
_NAMES_A_PARTITION = 10_000


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


class Service:
    """The worker, what renders prompts, and the names that clients gave their entries."""

    def __init__(self, worker: Worker, templates: Any, settings: ServerSettings, model_name: str) -> None:
        self.worker = worker
        self.templates = templates
        self.settings = settings
        self.model_name = model_name
        self._names: dict[str, OrderedDict[str, str]] = {}
        self._count = 0

    def request(
        self,
        prompt: str,
        chunk: str,
        partition: str,
        sampling: Sampling,
        media: tuple[Media, ...] = (),
        reuse: Any = None,
        threshold: float | None = None,
    ) -> Request:
        """A request with an id of its own. Raises InputError for more tokens than the server gives."""
        if sampling.max_new_tokens > self.settings.max_new_tokens:
            raise InputError(
                f"max_new_tokens={sampling.max_new_tokens} is over this server's limit of {self.settings.max_new_tokens}"
            )
        self._count += 1
        name = f"r{self._count}"
        return Request(name, prompt, chunk, media, partition, sampling, reuse=reuse, threshold=threshold)

    async def answer(self, http: HttpRequest, request: Request, *, no_store: bool = False) -> Answer:
        """The whole answer. Raises ClientGone, after stopping the work, if the client leaves."""
        job = self.worker.submit(request, no_store=no_store)
        waiting = asyncio.create_task(job.answer())
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=0.25)
                if done:
                    return waiting.result()
                if await http.is_disconnected():
                    raise ClientGone
        finally:
            job.cancel()
            waiting.cancel()

    async def pieces(self, job: Job) -> AsyncIterator[str | Answer]:
        """Pieces of a queued job; leaving the loop cancels it."""
        async for piece in job.stream():
            yield piece

    def name_entry(self, partition: str, chunk_id: str, wanted: str | None) -> str:
        """The key the client knows an entry by: the one it gave, or `p` and the beginning of its digest."""
        key = wanted or public_key(chunk_id)
        names = self._names.setdefault(partition, OrderedDict())
        names[chunk_id] = key
        names.move_to_end(chunk_id)
        if len(names) > _NAMES_A_PARTITION:
            names.popitem(last=False)
        return key

    def entry_name(self, partition: str, chunk_id: str) -> str:
        """What the client of this partition calls an entry."""
        return self._names.get(partition, {}).get(chunk_id) or public_key(chunk_id)

    def forget_names(self, partition: str) -> None:
        self._names.pop(partition, None)


def public_key(chunk_id: str) -> str:
    """`p` and 16 hexadecimal digits."""
    return f"p{chunk_id[:16]}"
