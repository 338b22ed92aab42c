"""The application: it assembles the parts, and starts and stops them in order.

Its socket is bound before the model is loaded.
"""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.concurrency import run_in_threadpool

from dejakv import __version__, tracing
from dejakv.build import build_cache, check_config, check_encoders
from dejakv.cache import check_method
from dejakv.engines.open import hidden_size, open_engine, open_templates
from dejakv.errors import ConfigError
from dejakv.http.bodies import BodyLimits
from dejakv.http.traces import TraceMiddleware
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
    "4XX": {
        "model": OpenAIError,
        "description": "Refused: the message names the limit or the field, and the remedy.",
    },
    "5XX": {"model": OpenAIError, "description": "The server cannot serve this at present."},
}


def create_app(settings: ServerSettings | None = None, engine: Any = None) -> FastAPI:
    """Make the server's application.

    Parameters
    ----------
    settings : ServerSettings, optional
        None reads the environment.
    engine : Engine, optional
        A loaded engine, which is not closed; None loads the settings' model.

    Raises
    ------
    ConfigError
        For wrong settings. This error and the following come at the start, not at the first
        request.
    ModelError
        For a model or an encoder that cannot be loaded, and a model without the method of reuse.
    MissingExtraError
        For an encoder or a store whose package is not installed.
    StoreError
        For a store that cannot be opened.
    """
    settings = settings or ServerSettings.read()
    keys = keys_of(settings)
    config = settings.cache(keys.partitions)
    check_config(config)
    if engine is None:
        check_encoders(config, partial(hidden_size, settings))

    # Before the model is loaded, which may take minutes.
    store = store_of(config)
    try:
        engine = engine or open_engine(settings, config)
        check_method(engine, config)
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
        await run_in_threadpool(tracing.stop)

    # Its page of endpoints loads nothing from another host.
    app = FastAPIOffline(
        docs_url="/docs",
        redoc_url=None,
        static_url="/docs",
        # It would send the document to another host.
        swagger_ui_parameters={"validatorUrl": None},
        title="DejaKV",
        version=__version__,
        description="Generates text, reusing computed state of similar earlier prompts.",
        lifespan=lifespan,
        responses=_PROBLEMS,
    )
    app.state.limits = BodyLimits(settings.max_body_bytes, MAX_VALUES, settings.body_seconds)
    # Behind the gate: who has no key is not traced.
    if tracing.start():
        app.add_middleware(TraceMiddleware)
    app.add_middleware(KeyGate, keys=keys)
    problems.install(app)

    for router in (
        routes_generate.generate_router,
        routes_generate.openai_router,
        routes_cache.router,
        routes_operator.router,
    ):
        app.include_router(router)

    return app


def listening_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket, on which early clients wait.

    Raises
    ------
    ConfigError
        If the address is unavailable.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error}): stop the server that uses the port, or "
            "give another --host or --port"
        ) from error


def address_of(listener: socket.socket) -> str:
    """Return `http://HOST:PORT` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_of(app: Any, settings: ServerSettings, log_level: str) -> uvicorn.Server:
    """Make a uvicorn server, which gives requests under way `shutdown_seconds` at its end."""
    seconds = int(settings.shutdown_seconds)
    config = uvicorn.Config(
        app, http="h11", ws="none", timeout_graceful_shutdown=seconds, log_level=log_level
    )
    return uvicorn.Server(config)
