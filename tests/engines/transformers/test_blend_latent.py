"""Blends of models whose layers keep other state than keys and values of one shape: latent rows, unequal heads."""

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_models import Numbers, small_model

from dejakv.blend.forced import ForcedTokens
from dejakv.blend.settings import BlendConfig
from dejakv.blend.token_map import DonorTokens, TokenMap
from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.blend_model import BlendModel
from dejakv.engines.transformers.blending import PlannedBlend, plan_cache, rearrange
from dejakv.errors import ModelError
from dejakv.models.cache_name import CACHE_NAME
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv.store.base import RawTensor


class Words(Numbers):
    """Numbers, and what a prompt of text needs."""

    bos_token = None


N, SHIFT = 40, 9
LATENT = ["deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash"]
KINDS = [*LATENT, "mimo_v2_flash", "gemma4_text"]
SETTINGS = {
    # The last two layers attend to the K and V of the first two.
    "gemma4_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest) -> TransformersEngine:
    return TransformersEngine(small_model(request.param, image_text=False, **SETTINGS.get(request.param, {})), Words())


def parts_of(engine: TransformersEngine) -> BlendModel:
    blend = engine.blend_model
    if isinstance(blend, ModelError):
        raise blend
    return blend


def ids_of(count: int = N, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 90, (1, count), generator=torch.Generator().manual_seed(seed))


def prefill(engine: TransformersEngine, ids: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, RawTensor]:
    """Last logits, and the state as it is stored, by the model alone."""
    layout = engine.capabilities.state_layout
    assert layout is not None
    cache, places = layout.empty_cache(), torch.arange(first, first + ids.shape[1])[None]
    with torch.inference_mode():
        logits = engine.model(input_ids=ids, position_ids=places, **{CACHE_NAME: cache}, use_cache=True).logits[:, -1]
    state = layout.pack(cache, ids.shape[1])
    assert state is not None
    return logits, state


def planned(
    engine: TransformersEngine, ids: torch.Tensor, donor: torch.Tensor, share: float, **config: Any
) -> PlannedBlend:
    forced = np.arange(N) == N - 1
    found = TokenMap(np.arange(N), np.linspace(0.1, 1, N).astype(np.float32), np.zeros(N, dtype=np.int64))
    needed = ForcedTokens(forced, forced, 1, np.zeros(N, dtype=bool))
    settings = BlendConfig(share=share, surroundings=False, **{"selector": "similarity", "offsets": False, **config})
    donors = DonorTokens.of(donor[0].tolist())
    state = prefill(engine, donor)[1]
    return plan_cache(parts_of(engine), ids[0].tolist(), [[(0, state)]], donors, found, needed, settings)


def blended(engine: TransformersEngine, ids: torch.Tensor, plan: PlannedBlend) -> torch.Tensor:
    with torch.inference_mode():
        return engine.model(input_ids=ids, **{CACHE_NAME: plan.cache}, use_cache=True).logits[:, -1]


def test_a_blend_is_exact_where_it_must_be(engine: TransformersEngine) -> None:
    ids, other = ids_of(), ids_of(seed=2)
    full, _ = prefill(engine, ids)
    allowed = 1e-4 * max(1.0, float(full.abs().max()))
    assert (blended(engine, ids, planned(engine, ids, other, 1.0)) - full).abs().max() <= allowed
    for share, computed in ((0.0, 1), (0.5, 20)):
        plan = planned(engine, ids, ids, share)
        assert (blended(engine, ids, plan) - full).abs().max() <= allowed
        assert plan.cache.recomputed == computed
    assert (blended(engine, ids, planned(engine, ids, other, 0.0)) - full).abs().max() > 100 * allowed


def test_moved_state_is_what_the_model_makes_at_those_places(engine: TransformersEngine) -> None:
    """The donor's rows stand later in the prompt: in every layer as those of the model at shifted positions."""
    ids = ids_of()
    _, state = prefill(engine, ids)
    _, shifted = prefill(engine, ids, SHIFT)
    target = N + SHIFT
    source = np.concatenate([np.zeros(SHIFT, np.int64), np.arange(N)])
    moved_map = TokenMap(source, np.ones(target, np.float32), np.zeros(target, np.int64))
    donors = DonorTokens.of(ids[0].tolist())
    out = rearrange(parts_of(engine), [[(0, state)]], donors, moved_map, "cpu", torch.float32)[:, :, :, SHIFT:]
    expected = torch.from_numpy(shifted.data.copy())
    assert (out - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


def test_of_latent_rows_only_the_rotary_part_moves(engine: TransformersEngine) -> None:
    layout, parts = engine.capabilities.state_layout, parts_of(engine)
    assert layout is not None
    if engine.model.config.model_type not in LATENT:
        pytest.skip("it keeps whole keys")
    assert set(parts.movers) == {None}
    state = torch.zeros(1, 1, 1, N, layout.width)
    moving = sum(view[:, :, 0].numel() for view, _ in parts.moving(state))
    rotary = engine.model.config.qk_rope_head_dim * len(parts.value_movers)
    assert moving == rotary < layout.width


@pytest.mark.parametrize("selector", ["prophet", "similarity"])
def test_generate_gives_the_tokens_of_full_computation(engine: TransformersEngine, selector: Any) -> None:
    ids = ids_of()
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "pad_token_id": 0}
    with torch.inference_mode():
        expected = engine.model.generate(**given).tolist()
        plan = planned(engine, ids, ids, 0.3, selector=selector, offsets=True)
        assert engine.model.generate(**given, **{CACHE_NAME: plan.cache}).tolist() == expected


def test_a_moved_passage_is_blended_and_serves_the_next_prompt(engine: TransformersEngine) -> None:
    if engine.model.config.model_type != "deepseek_v3":
        pytest.skip("one type over the whole path")
    rng = np.random.default_rng(0)
    passages = [rng.integers(3, 90, 60).tolist() for _ in range(3)]
    fresh = rng.integers(3, 90, 40).tolist()
    config = SemanticCacheConfig(reuse="blend", costs=(1e-3, 0.0, 0.0, 0.0))

    def request(*parts: list[int]) -> Request:
        text = " ".join(str(number) for part in parts for number in part)
        return Request("r", text, text, sampling=Sampling(max_new_tokens=4))

    with closing(build_cache(config, engine, background=False)) as cache:
        pipeline = Pipeline(engine, cache)
        assert pipeline.answer(request(*passages)).record.stored
        answer = pipeline.answer(request(passages[2], fresh, passages[0], [5, 6, 7, 8]))
        assert answer.record.method == "blend", answer.record.reason
        assert answer.record.approximate
        assert answer.record.reused_tokens > 50
        # Its new text was computed in every layer, and is kept for later blends.
        assert cache.store.stats().entries == 2
        again = pipeline.answer(request(fresh, passages[1], [9, 6, 7, 8]))
        assert again.record.method == "blend", again.record.reason


@pytest.mark.parametrize(("kind", "words"), [("qwen3_next", "recurrent state"), ("deepseek_v32", "index of keys")])
def test_what_cannot_blend_says_why_and_is_reused_exactly(kind: str, words: str) -> None:
    engine = TransformersEngine(small_model(kind, image_text=False), Words())
    assert engine.capabilities.reuse
    assert words in str(engine.blend_model)
    assert "use exact" in str(engine.blend_model)
