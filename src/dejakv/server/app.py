"""The application: assembles the parts, starts and stops them in order."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.concurrency import run_in_threadpool

from dejakv import __version__
from dejakv.build import build_cache
from dejakv.cache import check_top_layer
from dejakv.engines.open import open_engine, open_templates
from dejakv.pipeline import Pipeline
from dejakv.server import problems, routes_cache, routes_generate, routes_openai, routes_operator
from dejakv.server.access import KeyGate, keys_of
from dejakv.server.bodies import Bodies, document_bodies
from dejakv.server.schemas import ChatRequest, CompletionRequest, GenerateRequest, Problem, PurgeRequest
from dejakv.server.service import Service
from dejakv.server.settings import ServerSettings
from dejakv.server.worker import RequestWorker

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in (
        (400, "The request cannot be served as it is."),
        (401, "Missing or unknown API key."),
        (404, "The model is another one."),
        (408, "The body came too slowly."),
        (413, "The body is too large, too deep or has too many values."),
        (415, "The body is not declared as JSON."),
        (422, "The body does not fit the schema."),
        (429, "The server is full: come again after Retry-After seconds."),
        (431, "The headers are too many or too large."),
        (503, "The server cannot serve this at present."),
    )
}


def create_app(settings: ServerSettings | None = None, engine: Any = None) -> FastAPI:
    """The server. `engine`: an engine that is already loaded; it is not closed.

    Raises: ConfigError for wrong settings, ModelError for the model, StoreError for the folder: at start, not at the first request.
    """
    settings = settings or ServerSettings.read()
    keys = keys_of(settings)
    config = settings.cache(keys.partitions)
    engine = engine or open_engine(settings, config)
    check_top_layer(engine, config)
    templates = open_templates(settings)
    cache = build_cache(config, engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        pipeline = Pipeline(engine, cache, promotes=settings.promote)
        worker = RequestWorker(pipeline, settings.max_queue, settings.promote_after)
        app.state.service = Service(worker, templates, settings)
        yield
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
    app.state.bodies = Bodies(settings)
    app.add_middleware(KeyGate, keys=keys, settings=settings)
    document_bodies(app, GenerateRequest, CompletionRequest, ChatRequest, PurgeRequest)
    problems.install(app, settings.retry_after)
    for routes in (routes_generate, routes_openai, routes_cache, routes_operator):
        app.include_router(routes.router)
    return app
