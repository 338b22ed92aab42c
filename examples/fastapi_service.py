"""A service of one's own: FastAPI before a transformers model, with a cache and an error bound.

python examples/fastapi_service.py          # then in another terminal:
curl localhost:8009/answer -H 'Content-Type: application/json' -d '{"prompt": "..."}'

The model runs on one thread, where requests wait for each other. While nobody asks, the same thread
settles: it computes approximate prompts exactly and labels would-be hits for the bound.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from dejakv import Pipeline, Request, Sampling, SemanticCacheConfig, build_cache
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.models import load


class Question(BaseModel):
    prompt: str
    max_new_tokens: int = 16
    user: str = "default"  # take it from the login: nobody gets another user's state


def create_app(config: SemanticCacheConfig, settle_after: float = 1.0) -> FastAPI:
    """Make the service. It settles after so many seconds without a request."""
    worker = ThreadPoolExecutor(1, thread_name_prefix="model")
    latest = time.monotonic()
    pipeline: Pipeline

    async def settle_when_idle() -> None:
        while True:
            await asyncio.sleep(settle_after)
            # One prompt at a time, so that a request waits for no more than one.
            while pipeline.waiting and time.monotonic() - latest >= settle_after:
                await asyncio.wrap_future(worker.submit(pipeline.settle_one))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal pipeline
        model, tokenizer = load("docs-lm")  # or any transformers model and tokenizer of yours
        engine = TransformersEngine(model, tokenizer)
        pipeline = Pipeline(engine, build_cache(config, engine), promotes=True)
        settling = asyncio.create_task(settle_when_idle())
        yield
        settling.cancel()
        pipeline.stop_settling()  # a running label ends at its next token
        worker.shutdown()
        pipeline.cache.close()  # writes what is not yet on disk

    app = FastAPI(lifespan=lifespan)

    @app.post("/answer")
    async def answer(question: Question) -> dict[str, object]:
        nonlocal latest
        latest = time.monotonic()
        sampling = Sampling(max_new_tokens=question.max_new_tokens)
        text = question.prompt
        request = Request("", text, chunk=text, partition=question.user, sampling=sampling)
        done = await asyncio.wrap_future(worker.submit(pipeline.answer, request))
        record, latest = done.record, time.monotonic()
        return {
            "text": done.text,
            "approximate": record.approximate,
            "computed": record.computed_tokens,
            "of": record.prompt_tokens,
            "reason": record.reason,
        }

    @app.get("/waiting")
    async def waiting() -> int:
        return pipeline.waiting

    return app


if __name__ == "__main__":
    settings = SemanticCacheConfig(reuse="blend", error_bound=0.05, store="fastapi-cache")
    uvicorn.run(create_app(settings), port=8009)
