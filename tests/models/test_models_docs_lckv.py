"""docs-lckv as it ships: its layout, its answers, and its card."""

import random

from dejakv.models import load
from dejakv_models import docs


def questions(count: int, facts: int):
    rng = random.Random("shipped docs-lckv")
    for _ in range(count):
        doc = docs.make_document(rng, facts)
        fact = rng.choice(doc.facts)
        yield docs.prompt_of(doc.text, docs.ask(fact, rng)), fact.value


def test_three_of_five_layers_have_kv():
    model, _ = load("docs-lckv")
    assert str(model.config.layout) == "0_1_4_4_4"
    assert sorted(n.split(".")[2] for n in model.state_dict() if n.endswith("k_proj.weight")) == ["0", "1", "4"]


def test_it_answers_documents_of_200_tokens():
    model, tokenizer = load("docs-lckv")
    right = 0
    for prompt, value in questions(20, 20):
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=4, do_sample=False)[0, ids.input_ids.shape[1] :]
        right += tokenizer.decode(out, skip_special_tokens=True).strip() == value
    assert right >= 19
