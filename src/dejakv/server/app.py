"""The application: assembles the parts, starts and stops them in order; its socket is bound before the model is loaded."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.concurrency import run_in_threadpool

from dejakv import __version__
from dejakv.build import build_cache, check_config, check_encoders
from dejakv.cache import check_top_layer
from dejakv.engines.open import hidden_size, open_engine, open_templates
from dejakv.errors import ConfigError
from dejakv.http.bodies import BodyLimits
from dejakv.pipeline import Pipeline
from dejakv.server import problems, routes_cache, routes_generate, routes_operator
from dejakv.server.access import KeyGate, keys_of
from dejakv.server.jobs import RequestWorker
from dejakv.server.schemas import OpenAIError
from dejakv.server.service import GenerateService
from dejakv.server.settings import ServerSettings
from dejakv.store.open import store_of

MAX_VALUES = 20_000
"""Items of lists and fields of objects in a body: messages, parts and all fields count."""

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OpenAIError, "description": "Refused: the message names the limit or the field, and the remedy."},
    "5XX": {"model": OpenAIError, "description": "The server cannot serve this at present."},
}


def create_app(settings: ServerSettings | None = None, engine: Any = None) -> FastAPI:
    """The server. `settings`: None reads the environment. `engine`: a loaded engine, which is not closed; None loads the settings' model.

    Raises: ConfigError for wrong settings, ModelError for the model, StoreError for the folder: at start, not at the first request.
    """
    settings = settings or ServerSettings.read()
    keys = keys_of(settings)
    config = settings.cache(keys.partitions)
    check_config(config)
    if engine is None:
        check_encoders(config, partial(hidden_size, settings))

    store = store_of(config)  # before the model is loaded, which may take minutes
    try:
        engine = engine or open_engine(settings, config)
        check_top_layer(engine, config)
        templates = open_templates(settings)
        cache = build_cache(config, engine, store=store)
    except BaseException:
        store.close()
        raise

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        pipeline = Pipeline(engine, cache, promotes=settings.promote)
        worker = RequestWorker(pipeline, settings.max_queue, settings.promote_after)
        app.state.service = GenerateService(worker, templates, settings)
        yield
        # It waits for a thread, and the event loop has answers to send meanwhile.
        await run_in_threadpool(worker.close, settings.shutdown_seconds)

    app = FastAPIOffline(  # its page of endpoints loads nothing from another host
        docs_url="/docs",
        redoc_url=None,
        static_url="/docs",
        swagger_ui_parameters={"validatorUrl": None},  # it would send the document to another host
        title="DejaKV",
        version=__version__,
        description="Generates text, reusing computed state of similar earlier prompts.",
        lifespan=lifespan,
        responses=_PROBLEMS,
    )
    app.state.limits = BodyLimits(settings.max_body_bytes, MAX_VALUES, settings.body_seconds)
    app.add_middleware(KeyGate, keys=keys)
    problems.install(app)

    for router in (routes_generate.own, routes_generate.openai, routes_cache.router, routes_operator.router):
        app.include_router(router)
    return app


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; early clients wait. Raises ConfigError if the address is unavailable."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error}): stop the server that uses the port, or give another --host or --port"
        ) from error


def address_of(listener: socket.socket) -> str:
    """`http://HOST:PORT` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_of(app: Any, settings: ServerSettings, log_level: str) -> uvicorn.Server:
    """uvicorn, which has `shutdown_seconds` for requests under way."""
    seconds = int(settings.shutdown_seconds)
    config = uvicorn.Config(app, http="h11", ws="none", timeout_graceful_shutdown=seconds, log_level=log_level)
    return uvicorn.Server(config)
