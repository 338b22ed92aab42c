"""Top-layer reuse in models: identical tasks, donors of other length, batches, refusals."""

import logging

import numpy as np
import pytest
import torch
from tests.sim_llm.conftest import prompt

from dejakv.blend.token_map import DonorTokens
from dejakv.errors import ConfigError, InputError, ModelError
from dejakv.prototypes.sim_llm import LlamaForCausalLMWithKVReuse, SimLLMInference
from dejakv.prototypes.top_layer.prefill import moved_rows
from dejakv.prototypes.top_layer.rows import computed_rows, take_rows

MOST = {"max_new_tokens": 6}


def full(inference, text):
    return inference.generate(text, enable_kv_reuse=False, **MOST)


def test_an_identical_task_has_the_identical_output(inference):
    text = prompt()
    first = inference.generate(text, **MOST)
    again = inference.generate(text, **MOST)
    assert (first.reused, again.reused) == (False, True)
    assert again.result.computed == 1
    assert again == first == full(inference, text)


@pytest.mark.parametrize("extra", [5, -7])
def test_a_donor_of_other_length_serves_what_both_share(inference, extra):
    """Before the first difference the donor's rows are exact, and all others are computed here."""
    donor, text = prompt(length=40), prompt(length=40 + extra)
    inference.set_similarity_threshold(0.3)
    inference.generate(donor, **MOST)
    answer = inference.generate(text, **MOST)
    assert answer.reused
    assert answer.result.computed < 40 + extra
    assert answer == full(inference, text)


@pytest.mark.parametrize(("matching", "sees_the_change"), [("map", True), ("position", False)])
def test_a_change_is_computed_with_the_map_and_overlooked_by_position(lckv, tokenizer, matching, sees_the_change):
    """The plan says so, and a run computes exactly what is planned."""
    donor, text = prompt(), prompt((12, "w1"), (13, "w2"))
    model = LlamaForCausalLMWithKVReuse(lckv, tokenizer, matching=matching, tail=4)
    mine, theirs = (tuple(tokenizer(one)["input_ids"]) for one in (text, donor))
    plan = take_rows(mine, DonorTokens.of(theirs), matching, model.embed_tokens, tail=4)
    planned = set(computed_rows(plan).tolist())
    assert planned >= {36, 37, 38, 39}
    assert ({12, 13} <= planned) == sees_the_change
    assert model.epoch  # a model that cannot be described would reuse nothing
    inference = SimLLMInference(model, similarity_threshold=0.5)
    inference.generate(donor, **MOST)
    answer = inference.generate(text, **MOST)
    assert answer.reused
    assert answer.result.computed == len(planned)


def test_rows_from_other_places_are_turned_to_their_own(inference):
    """A donor whose text moved: with all moved rows exact in content, keys must be as if computed at the new place."""
    text = prompt()
    inference.generate(text, **MOST)
    model = inference.model
    ids = tuple(model.tokenizer(text)["input_ids"])
    keys, values = inference.manager.search_similar_task(model.embed(ids)).top_layer_kv
    shifted = np.arange(-1, 39).clip(min=0)
    moved = moved_rows(model.model, torch.stack([keys, values]), shifted, np.arange(40))[0][0]
    cos, sin = (part[0] for part in model.model.model.rotary_emb(torch.zeros(1), torch.tensor([[10, 11]])))

    def unturned(row, place):
        half = row.shape[-1] // 2
        return row * cos[place] - torch.cat([-row[:, half:], row[:, :half]], -1) * sin[place]

    assert torch.allclose(unturned(moved[:, 11], 1), unturned(keys[0, :, 10], 0), atol=1e-5)


def test_prompts_of_a_batch_are_answered_in_order_and_hits_are_not_kept(inference):
    donor = prompt()
    texts = [prompt((9, "w4")), prompt(length=31), donor, prompt((20, "w5"), (21, "w6")), prompt(length=44)]
    alone = [full(inference, text) for text in texts]
    assert inference.batch_generate(texts, enable_kv_reuse=False, **MOST) == alone
    inference.generate(donor, **MOST)
    inference.set_similarity_threshold(0.9999)
    mixed = inference.batch_generate(texts, **MOST)
    assert [answer.reused for answer in mixed] == [False, False, True, False, False]
    assert mixed == alone
    assert inference.get_statistics()["entries"] == 5
    inference.set_similarity_threshold(0.5)
    assert inference.generate(prompt((30, "w7")), **MOST).reused
    assert inference.get_statistics()["entries"] == 5


def test_changed_weights_find_no_old_task(inference):
    inference.generate(prompt(), **MOST)
    with torch.no_grad():
        inference.model.model.model.layers[0].mlp.down_proj.weight.add_(0.1)
    assert not inference.generate(prompt(), **MOST).reused


def test_statistics_count_rows(inference):
    inference.generate(prompt(), **MOST)
    inference.generate(prompt(), **MOST)
    counted = inference.get_statistics()
    assert (counted["prompts"], counted["prompt_tokens"], counted["computed_tokens"]) == (2, 80, 41)
    inference.reset_cache()
    assert inference.get_statistics()["prompts"] == 0


def test_sampling_follows_its_settings(inference):
    torch.manual_seed(0)
    drawn = {str(inference.generate(prompt(), do_sample=True, temperature=3.0, top_p=0.9, **MOST)) for _ in range(4)}
    assert len(drawn) > 1


def test_greedy_calls_with_settings_of_sampling_are_not_warned_of(inference):
    """The interface of Sim-LLM passes them always."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    logging.Logger.warning_once.cache_clear()  # transformers': a warning comes once in a process
    try:
        inference.generate(prompt(), temperature=0.3, top_p=0.7, top_k=3, **MOST)
        inference.batch_generate([prompt(length=30)], temperature=0.4, top_p=0.8, top_k=4, **MOST)
    finally:
        logger.removeHandler(handler)
    assert told == []


def test_an_ordinary_model_is_refused_with_the_reason(llama, tokenizer):
    with pytest.raises(ModelError, match=r"every layer attends to its own KV.*docs-lckv"):
        LlamaForCausalLMWithKVReuse(llama, tokenizer)


def test_a_task_that_takes_nothing_of_its_donor_is_no_hit(lckv, tokenizer):
    """With a tail as long as the prompt: its answer is the model's own."""
    inference = SimLLMInference(LlamaForCausalLMWithKVReuse(lckv, tokenizer, tail=40), similarity_threshold=0.5)
    inference.generate(prompt(), **MOST)
    again = inference.generate(prompt((12, "w1")), **MOST)
    assert (again.reused, again.result.computed) == (False, 40)
    assert again == full(inference, prompt((12, "w1")))
    counted = inference.get_statistics()
    assert (counted["hits"], counted["misses"], counted["hit_rate"], counted["entries"]) == (0, 2, 0.0, 2)


def test_a_task_of_another_model_is_refused(lckv, tokenizer):
    model = LlamaForCausalLMWithKVReuse(lckv, tokenizer, tail=4)
    manager = model.make_manager()
    ids = tuple(tokenizer(prompt())["input_ids"])
    wrong = torch.zeros(3, 2, 40, 8)
    manager.add_task("foreign", model.embed(ids), (wrong, wrong), token_ids=ids)
    with pytest.raises(ModelError, match="another model"):
        model.run(ids, max_new_tokens=2)


def test_a_manager_of_another_dimension_is_refused(lckv, tokenizer):
    from dejakv.prototypes.sim_llm import InterTaskKVManager

    with pytest.raises(ConfigError, match="embedding_dim=32"):
        LlamaForCausalLMWithKVReuse(lckv, tokenizer).set_kv_manager(InterTaskKVManager(4096, device="cpu"))


def test_a_prompt_longer_than_the_context_is_refused(inference):
    with pytest.raises(InputError, match="128"):
        inference.generate(prompt(length=126), **MOST)
    with pytest.raises(InputError, match="no tokens"):
        inference.generate("")


def test_the_threshold_must_be_a_cosine(inference):
    with pytest.raises(ConfigError, match="similarity_threshold=2"):
        inference.set_similarity_threshold(2)
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        inference.generate(prompt(), max_new_tokens=0)
