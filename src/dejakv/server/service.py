"""Common steps of the endpoints: limits, the queue, and the clients' names for their entries."""

import asyncio
import time
from dataclasses import replace
from typing import Annotated, Any

from cachetools import FIFOCache
from fastapi import Depends
from starlette.requests import Request as HttpRequest

from dejakv import tracing
from dejakv.decide.method import method_named
from dejakv.decide.plan import is_approximate
from dejakv.errors import InputError
from dejakv.http.errors import ClientGoneError
from dejakv.pipeline import Answer
from dejakv.request import Request, ReuseMode
from dejakv.server.jobs import RequestWorker, ServerJob
from dejakv.server.settings import ServerSettings
from dejakv.store.selection import PurgeResult, Selection

_NAMES_A_PARTITION = 10_000
LONGEST_TOKEN = 64
"""Characters of the longest possible token in a prompt."""
LEAST_TEMPERATURE = 1e-3


class GenerateService:
    """The worker, the renderer of prompts, and the clients' names for their entries.

    Parameters
    ----------
    worker : RequestWorker
        Runs the requests. Its pipeline has a cache.
    templates : Any
        Tokenizer or processor with the chat template.
    settings : ServerSettings
        Limits of the service.
    """

    def __init__(self, worker: RequestWorker, templates: Any, settings: ServerSettings) -> None:
        assert worker.pipeline.cache is not None
        self.worker = worker
        self.cache = worker.pipeline.cache
        self.templates = templates
        self.settings = settings
        self.model_name = settings.served_model_name or settings.model
        self.created = int(time.time())
        self.ends = _end_tokens(worker.pipeline.engine)
        self._names: dict[str, FIFOCache[str, str]] = {}

    def submit(self, request: Request, top_tokens: int | None = None) -> ServerJob:
        """Queue a request, with the log probabilities of so many tokens at each place or of none.

        Raises
        ------
        InputError
            For a request over the server's limits, and for a method of reuse that the model cannot
            do.
        RefusedError
            With 429, if there is no room in the queue.
        """
        sampling, reuse = request.sampling, request.reuse
        if sampling.max_new_tokens > self.settings.max_new_tokens:
            raise InputError(
                f"max_new_tokens={sampling.max_new_tokens} is over this server's limit of "
                f"{self.settings.max_new_tokens} "
                "(DEJAKV_MAX_NEW_TOKENS): ask for fewer"
            )

        asked = "exact" if reuse in (None, "off") else reuse
        approximate = is_approximate(asked)
        if approximate and not self.settings.allow_approximate:
            raise InputError(
                f"{reuse} is approximate, and this server allows only exact reuse "
                "(DEJAKV_ALLOW_APPROXIMATE=false): ask for "
                "reuse 'exact', or leave it out"
            )

        if approximate and (reason := method_named(asked).unsupported(self.worker.pipeline.engine)):
            raise InputError(f"reuse {reuse!r}: {reason}. Ask for reuse 'blend' or 'exact'")

        self.check_length(len(request.prompt))
        # Logits divided by it would overflow; it is greedy already.
        if 0 < sampling.temperature < LEAST_TEMPERATURE:
            request = replace(request, sampling=replace(sampling, temperature=0.0))
        if tracing.is_on():
            tracing.annotate(
                {
                    "gen_ai.request.model": self.model_name,
                    "gen_ai.request.max_tokens": sampling.max_new_tokens,
                    "gen_ai.request.temperature": sampling.temperature,
                }
            )
        return self.worker.submit(request, top_tokens)

    def check_length(self, characters: int) -> None:
        """Refuse a text that is far too long, before anything renders or tokenizes it.

        Raises
        ------
        InputError
            For more characters than the model's context can hold.
        """
        context = self.worker.pipeline.engine.context
        if characters > context * LONGEST_TOKEN:
            raise InputError(
                f"the prompt has {characters} characters, far over the model's context of "
                f"{context} tokens: send less"
            )

    def reuse_of(self, use_semshare: bool | None) -> ReuseMode:
        """Choose the reuse method of a request to SemShareKV's endpoint.

        False is exact reuse, and None the server's `reuse`. True is the server's too, or `blend`
        where the server's is exact.
        """
        if use_semshare is False:
            return "exact"
        server_reuse = self.settings.reuse
        return "blend" if use_semshare and server_reuse == "exact" else server_reuse

    async def answer(
        self, http: HttpRequest, request: Request, top_tokens: int | None = None
    ) -> Answer:
        """Return the whole answer; see `submit`.

        Raises
        ------
        ClientGoneError
            If the client disconnects; the work is stopped.
        InputError
            For a request that the engine cannot run. The other errors are those of `submit`.
        """
        if await http.is_disconnected():
            raise ClientGoneError

        job = self.submit(request, top_tokens)
        waiting = asyncio.create_task(job.answer())
        try:
            # Polled, as nothing else tells of a client that leaves before its answer begins.
            while not (await asyncio.wait({waiting}, timeout=0.25))[0]:
                if await http.is_disconnected():
                    raise ClientGoneError
            return waiting.result()
        finally:
            job.cancel()
            waiting.cancel()

    def name_entry(self, partition: str, stored_id: str, requested_name: str | None) -> str:
        """Name an entry from now on: the requested name, or `p` and the beginning of its digest."""
        name = requested_name or public_key(stored_id)
        self._names.setdefault(partition, FIFOCache(_NAMES_A_PARTITION))[stored_id] = name
        return name

    def entry_name(self, partition: str, stored_id: str) -> str:
        """Return the client's name of an entry in this partition, else the server's."""
        return self._names.get(partition, {}).get(stored_id) or public_key(stored_id)

    def entries_named(self, partition: str, name: str) -> tuple[str, ...]:
        """Return the ids of the entries of this partition that a client means by a name.

        The name is the client's own, the server's, or the whole id.
        """
        client_ids = [
            id for id, client_name in self._names.get(partition, {}).items() if client_name == name
        ]
        # Only read where the client's own names have no match.
        every = (meta.id for meta in self.cache.store.metas(partition))
        # A client may have chosen a name that is the server's for another entry.
        return tuple(client_ids) or tuple(id for id in every if name in (id, public_key(id)))

    def purge(self, selection: Selection, *, dry_run: bool) -> PurgeResult:
        """Remove the selected entries, and the clients' names for them.

        Raises
        ------
        StoreError
            If the store cannot be purged.
        """
        purged = self.worker.pipeline.purge(selection, dry_run=dry_run)
        if not dry_run:
            # A copy: this runs on a thread, and requests add names meanwhile.
            for partition, names in list(self._names.items()):
                if selection.partition in (None, partition):
                    for id in purged.ids & names.keys():
                        names.pop(id, None)

        return purged

    def clear(self, partition: str) -> int:
        """Remove a partition's entries, encoder outputs and names; return the number of entries."""
        self._names.pop(partition, None)
        registry = self.worker.pipeline.engine.encoder_cache
        if registry is not None:
            registry.clear(partition)
        return self.cache.clear(partition)


def _service(http: HttpRequest) -> GenerateService:
    return http.app.state.service


AnyService = Annotated[GenerateService, Depends(_service)]


def _end_tokens(engine: Any) -> frozenset[int]:
    """Return the ids that end an answer of the engine's model."""
    from dejakv.engines.transformers.decoding import special_tokens

    end_ids = special_tokens(engine.model, engine.tokenizer).get("eos_token_id", [])
    return frozenset(end_ids if isinstance(end_ids, list) else [end_ids])


def public_key(stored_id: str) -> str:
    """Return the server's name of an entry: `p` and 16 hexadecimal digits."""
    return f"p{stored_id[:16]}"
