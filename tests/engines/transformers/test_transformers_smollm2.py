"""On a real language model and real text (documentation of the standard library): whatever is reused, what must be exact is."""

import heapq
import inspect
import statistics
import textwrap
from pathlib import Path

import pytest
from tests.tiny_models import blended

from dejakv.blend.settings import BlendConfig
from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.engines.base import Prepared
from dejakv.engines.transformers import TransformersEngine
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv.store.base import StateInfo, StoredState

PASSAGES = [
    inspect.getdoc(thing) or ""
    for thing in (textwrap.wrap, statistics.quantiles, heapq.merge, textwrap.shorten, heapq.nlargest)
]
QUESTION = "Which of these functions breaks a long text into lines?"
ANSWER = 8


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> TransformersEngine:
    return TransformersEngine.from_pretrained("smollm2-135m", dtype="fp32")


def request(passages: list[str], question: str = QUESTION, **sampling: int) -> Request:
    context = "\n\n".join(passages)
    prompt = f"<|im_start|>system\n{context}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return Request("r", prompt, prompt, sampling=Sampling(**{"max_new_tokens": ANSWER, **sampling}))


def state_of(engine: TransformersEngine, prepared: Prepared) -> StoredState:
    tensor = engine.full(prepared.sampled(Sampling(1))).capture()
    assert tensor is not None
    meta = StateInfo("d", "default", engine.epoch, prepared.token_ids, prepared.request.prompt, "")
    return StoredState(meta, tensor)


@pytest.mark.shows("exact", model="SmolLM2-135M-Instruct")
def test_exact_through_the_pipeline(engine: TransformersEngine) -> None:
    """Twice the same request, and one that shares its beginning: the cache's answers are those without it."""
    cache = build_cache(SemanticCacheConfig(semantic_text=False), engine)
    cached, plain = Pipeline(engine, cache), Pipeline(engine)
    first, second = request(PASSAGES[:3]), request(PASSAGES[:3], "What does n stand for?")
    wanted = [plain.answer(asked).token_ids for asked in (first, second)]
    methods: list[str] = []
    for number in (0, 1, 0, 1):
        answer = cached.answer((first, second)[number])
        cache.flush()
        methods.append(answer.record.method)
        assert answer.token_ids == wanted[number]
    assert methods == ["none", "prefix", "exact", "exact"]
    cache.close()


@pytest.mark.shows("blend", model="SmolLM2-135M-Instruct")
def test_blending_moved_passages_computes_a_part_and_stays_near(engine: TransformersEngine) -> None:
    """Passages in another order: fewer rows, and a first token nearer to full prefill's than another prompt's is."""
    donor = engine.prepare(request(PASSAGES[:4]))
    prepared = engine.prepare(request([PASSAGES[3], PASSAGES[0], PASSAGES[1], PASSAGES[2]], max_new_tokens=1))
    stored_state = state_of(engine, donor)
    got = blended(engine, prepared, [stored_state], BlendConfig(share=0.3))
    report = got.details["blend"]
    assert report.blended
    assert report.share < 0.8
    assert got.capture() is None
    assert got.token_ids == engine.run(prepared).token_ids
