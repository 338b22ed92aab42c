"""Where blending must be exact, it is: everything recomputed, an identical donor, a donor that merely moved."""

from typing import get_args

import numpy as np
import pytest
import torch
from tests import tiny_models as models

from dejakv.blend.forced import ForcedTokens
from dejakv.blend.settings import BlendConfig, BlendSelector
from dejakv.blend.token_map import DonorTokens, TokenMap
from dejakv.engines.transformers.blend_model import BlendModel, blend_model_of
from dejakv.engines.transformers.blending import PlannedBlend, plan_cache, rearrange
from dejakv.engines.transformers.kv import plain_cache, stacked_state
from dejakv.errors import InputError, ModelError
from dejakv.models.cache_name import CACHE_NAME
from dejakv.store.base import RawTensor

N = 40


def parts_of(model) -> BlendModel:
    """The model as blending sees it. Raises: ModelError if it cannot blend."""
    parts = blend_model_of(model)
    if isinstance(parts, ModelError):
        raise parts
    return parts


def ids_of(count: int = N, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (1, count), generator=torch.Generator().manual_seed(seed))


def prefill(model, ids, positions=None):
    """Last logits `[1, vocabulary]` and the state, by the model alone."""
    cache = plain_cache()
    place = None if positions is None else positions[None]
    with torch.inference_mode():
        logits = model(input_ids=ids, position_ids=place, **{CACHE_NAME: cache}, use_cache=True).logits[:, -1]
    return logits, stacked_state(cache, ids.shape[1])


def planned(
    model, ids, donor_ids, state, share, *, selector="similarity", source=None, tail=1, offsets=False
) -> PlannedBlend:
    n = ids.shape[1]
    forced = np.zeros(n, dtype=bool)
    forced[-tail:] = True
    where = np.arange(n) if source is None else source
    found = TokenMap(where, np.linspace(0.1, 1, n).astype(np.float32), np.zeros(n, dtype=np.int64))
    donors = DonorTokens.of(donor_ids[0].tolist())
    needed = ForcedTokens(forced, forced, tail, np.zeros(n, dtype=bool))
    config = BlendConfig(selector=selector, share=share, offsets=offsets, surroundings=False)
    return plan_cache(parts_of(model), ids[0].tolist(), [[(0, state)]], donors, found, needed, config)


def blended(model, ids, plan: PlannedBlend) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, **{CACHE_NAME: plan.cache}, use_cache=True).logits[:, -1]


@pytest.fixture(params=list(models.ARCHITECTURES))
def model(request):
    return models.architecture_model(request.param)


@pytest.mark.shows("blend")
def test_every_architecture_is_exact_where_it_must_be(model):
    ids, other = ids_of(), ids_of(seed=2)
    full, own = prefill(model, ids)
    _, foreign = prefill(model, other)
    everything = planned(model, ids, other, foreign, 1.0)
    assert (blended(model, ids, everything) - full).abs().max() <= 1e-5
    last = planned(model, ids, ids, own, 0.0)
    assert (blended(model, ids, last) - full).abs().max() <= 2e-5
    assert last.cache.recomputed == 1
    some = planned(model, ids, ids, own, 0.5)
    assert (blended(model, ids, some) - full).abs().max() <= 2e-5
    assert some.cache.recomputed == 20


def test_keys_moved_to_other_places_are_those_the_model_would_have_made(model):
    """The model run at shifted positions makes keys that a shift by `move` must make too, in every layer."""
    ids = ids_of()
    here = torch.arange(N)
    _, state = prefill(model, ids)
    _, later = prefill(model, ids, here + 9)
    parts = parts_of(model)
    moved = torch.from_numpy(state.data[0].copy())
    parts.move(moved, here + 9, here, N, N + 9)
    if "dynamic" in str(getattr(model.config, "rope_parameters", "")):
        return  # its tables depend on the longest prompt seen: positions beyond the prompt are another rotation
    assert (moved - torch.from_numpy(later.data[0])).abs().max() <= 3e-5


def test_generate_gives_the_same_tokens(model):
    ids, other = ids_of(24), ids_of(24, seed=2)
    _, own = prefill(model, ids)
    _, foreign = prefill(model, other)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "pad_token_id": 0}
    for beams in (1, 3):
        with torch.inference_mode():
            wanted = model.generate(**given, num_beams=beams, **{CACHE_NAME: plain_cache() if beams == 1 else None})
            for plan in (planned(model, ids, ids, own, 0.0), planned(model, ids, other, foreign, 1.0)):
                got = model.generate(**given, num_beams=beams, **{CACHE_NAME: plan.cache})
                assert got.tolist() == wanted.tolist()


@pytest.mark.shows("blend", dtype="bfloat16")
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "gemma2", "olmo2"])
def test_bfloat16_stays_within_the_spread_of_stock_prefill(name):
    """Two stock ways of prefilling differ by about .034 of the logits' spread; an identical donor may differ by .2."""
    model = models.architecture_model(name, torch.bfloat16)
    ids = ids_of()
    full, own = prefill(model, ids)
    assert own.dtype == "BF16"
    got = blended(model, ids, planned(model, ids, ids, own, 0.0))
    assert (got - full).float().abs().max() <= 0.2 * full.float().std()


@pytest.mark.parametrize("selector", get_args(BlendSelector))
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_oss", "gemma2"])
def test_each_selector_computes_as_many_rows_as_asked(name, selector):
    model = models.architecture_model(name)
    ids, other = ids_of(), ids_of(seed=2)
    _, foreign = prefill(model, other)
    plan = planned(model, ids, other, foreign, 0.25, selector=selector, tail=4)
    blended(model, ids, plan)
    assert plan.cache.recomputed == 10
    assert plan.cache.rows.tolist()[-4:] == [36, 37, 38, 39]
    assert plan.computed_tokens() == 10 + (
        4 if selector == "prophet" else 0
    )  # a pass of its own: the question's four tokens


def test_several_donors_give_to_one_target():
    model = models.architecture_model("qwen2")
    one, two = ids_of(15, seed=3), ids_of(25, seed=4)
    states = [prefill(model, x)[1] for x in (one, two)]
    donors = DonorTokens.of(one[0].tolist(), two[0].tolist())
    target = torch.cat([two, one], 1)
    source = np.concatenate([np.arange(15, 40), np.arange(15)])
    found = TokenMap(source, np.ones(N, dtype=np.float32), np.zeros(N, dtype=np.int64))
    out = rearrange(parts_of(model), [[(0, state)] for state in states], donors, found, "cpu", torch.float32)
    _, fresh = prefill(model, target)
    assert np.abs(out[:, 0].numpy() - fresh.data[:, 0]).max() <= 2e-5


def test_a_donor_in_parts_gives_what_the_whole_gives():
    model = models.architecture_model("llama")
    donor = ids_of()
    _, state = prefill(model, donor)
    source = np.concatenate([np.arange(20, 40), np.arange(5, 25)])
    found = TokenMap(source, np.ones(N, dtype=np.float32), np.zeros(N, dtype=np.int64))
    parts = [
        (start, RawTensor(state.data[:, :, :, start:stop], "F32")) for start, stop in ((3, 18), (18, 31), (31, 40))
    ]

    def arranged(held: list) -> torch.Tensor:
        return rearrange(parts_of(model), [held], DonorTokens.of(donor[0].tolist()), found, "cpu", torch.float32)

    assert torch.equal(arranged(parts), arranged([(0, state)]))
    with pytest.raises(ModelError, match="lacks 18 of the rows"):
        arranged([parts[0], parts[2]])


def test_donors_longer_than_the_target_and_dynamic_tables():
    """Dynamic NTK: a donor beyond the trained length was rotated with other frequencies than a short target is."""
    model = models.architecture_model("llama+dynamic")
    donor, target = ids_of(60, seed=7), ids_of(60, seed=7)[:, 30:]
    _, state = prefill(model, donor)
    _, fresh = prefill(model, target)
    found = TokenMap(np.arange(30, 60), np.ones(30, dtype=np.float32), np.zeros(30, dtype=np.int64))
    out = rearrange(parts_of(model), [[(0, state)]], DonorTokens.of(donor[0].tolist()), found, "cpu", torch.float32)
    assert np.abs(out[:, 0].numpy() - fresh.data[:, 0]).max() <= 2e-5


def test_offsets_move_what_is_not_computed_behind_the_first_layer():
    model = models.architecture_model("llama")
    ids = ids_of()
    donor = ids_of()
    donor[0, :6] = ids_of(seed=2)[0, :6]
    _, state = prefill(model, donor)
    caches = []
    for offsets in (False, True):
        plan = planned(model, ids, donor, state, 0.5, selector="prophet", offsets=offsets)
        blended(model, ids, plan)
        caches.append(plan.cache)
    rows = caches[0].rows
    assert torch.equal(rows, caches[1].rows)
    rest = [i for i in range(6, N) if i not in rows.tolist()]
    first, second = ([layer.keys[0, :, rest] for layer in cache.layers] for cache in caches)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    _, own = prefill(model, ids)
    wanted = torch.from_numpy(own.data[0, 1])[:, rest]
    assert (second[1] - wanted).square().sum() < (first[1] - wanted).square().sum()


def test_dropped_rows_are_not_computed():
    """MLP and projections see the kept rows only."""
    model = models.architecture_model("llama")
    ids = ids_of()
    _, own = prefill(model, ids)
    seen: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _m, args: seen.append(args[0].shape[1]))
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _m, args: seen.append(args[0].shape[1]))
    plan = planned(model, ids, ids, own, 0.2)
    seen.clear()  # the load-time self-check ran the model too
    blended(model, ids, plan)
    assert seen == [8, 8, 8, 8, 8, 8]


def test_a_cache_serves_once_and_only_its_own_prompt():
    model = models.architecture_model("llama")
    ids = ids_of()
    _, own = prefill(model, ids)
    with pytest.raises(InputError, match="planned for 40 tokens"):
        blended(model, ids[:, :20], planned(model, ids, ids, own, 0.1))
    plan = planned(model, ids, ids, own, 0.1)
    with pytest.raises(InputError, match="batch of different prompts"):
        blended(model, torch.cat([ids, ids_of(seed=9)]), plan)


def test_left_padding_is_refused():
    model = models.architecture_model("llama")
    ids = ids_of()
    _, own = prefill(model, ids)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    plan = planned(model, ids, ids, own, 0.1)
    with pytest.raises(InputError, match="padding"):
        model(input_ids=ids, attention_mask=mask, **{CACHE_NAME: plan.cache}, use_cache=True)


def test_two_engines_on_one_model_blend_as_one_does():
    """Each puts its own hooks on: the second one's leave a blend alone that the first one's have entered."""
    model = models.architecture_model("llama")
    ids, other = ids_of(), ids_of(seed=2)
    _, foreign = prefill(model, other)
    one = blended(model, ids, planned(model, ids, other, foreign, 0.3))
    parts_of(model)
    assert torch.equal(one, blended(model, ids, planned(model, ids, other, foreign, 0.3)))


def test_models_that_cannot_are_refused_with_a_reason():
    gpt2 = models.architecture_model("gpt2", n_positions=64, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(ModelError, match="blend cannot work with GPT2LMHeadModel"):
        parts_of(gpt2)
    flex = models.architecture_model("llama")
    flex.config._attn_implementation = "flex_attention"
    with pytest.raises(ModelError, match="'sdpa' or 'eager'"):
        parts_of(flex)


def test_attention_that_counts_the_tokens_before_is_refused():
    tempered = models.architecture_model("llama")
    tempered.config.attn_temperature_tuning = True
    with pytest.raises(ModelError, match="attention temperature tuning"):
        parts_of(tempered)


def test_of_two_ways_within_tolerance_the_better_one_is_learnt():
    """A layer without positions whose keys lie in the slowest pair: 7 places turn it by .007, more by as much more."""
    model = models.architecture_model("smollm3", dtype=torch.bfloat16)
    rows = model.model.layers[2].self_attn.k_proj.weight.data.unflatten(0, (-1, 8))
    rows[:, [0, 1, 2, 4, 5, 6]] = 0
    movers = parts_of(model).movers
    assert [mover is None for mover in movers] == [False, False, True]


def test_the_self_check_notices_a_model_whose_state_depends_on_absolute_places():
    model = models.architecture_model("llama")
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda _m, args, kwargs: ((args[0] + 0.3 * kwargs["position_ids"][..., None].float(), *args[1:]), kwargs),
        with_kwargs=True,
    )
    with pytest.raises(ModelError, match="absolute positions"):
        parts_of(model)
    handle.remove()


def test_states_of_other_shapes_are_refused():
    model = models.architecture_model("llama")
    ids = ids_of()
    _, state = prefill(model, ids[:, :30])
    with pytest.raises(ModelError, match="does not fit 40 tokens"):
        planned(model, ids, ids, state, 0.1)
