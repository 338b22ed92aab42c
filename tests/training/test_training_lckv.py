"""Training docs-lckv: where it starts from, its pass over many questions, and resuming."""

import json
import random

import pytest
import torch
from training.docs_data import make_batch
from training.lckv import main
from training.lckv_model import LAYOUT, draw_iterations, lckv_from, run_lckv, twin_from

from dejakv.models import load
from dejakv.models.lckv.passes import Iterations


@pytest.fixture(scope="module")
def twin():
    return twin_from("docs-lm").eval()


def test_the_twin_starts_as_docs_lm(twin):
    """The added layer changes nothing yet."""
    model, _ = load("docs-lm")
    ids = torch.randint(10, 400, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(twin(ids).logits, model(ids).logits, atol=1e-5)


def test_the_condensed_model_has_the_twins_weights(twin):
    own = lckv_from(twin).state_dict()
    assert {name for name in twin.state_dict() if name not in own} == {
        f"model.layers.{i}.self_attn.{x}_proj.weight" for i in (2, 3) for x in "kv"
    }
    assert all(torch.equal(weight, twin.state_dict()[name]) for name, weight in own.items())
    assert lckv_from(twin).config.kv_layout == LAYOUT


def test_a_question_in_a_pack_is_computed_as_if_alone(twin):
    """The answer's loss over a pack is the mean of those of its questions, each behind the document by itself."""
    model = lckv_from(twin).eval()
    how = Iterations(80, 1)
    packed = make_batch(random.Random(5), 4, 1, 3, stretch=0.0)
    with torch.no_grad():
        together = run_lckv(model, packed, how).answer.item()
        alone = []
        for i in range(3):
            own = {
                k: v
                for k, v in vars(packed).items()
                if k not in ("ask", "ask_pos", "ask_len", "at", "value_at", "asked")
            }
            rest = {
                k: getattr(packed, k)[:, i : i + 1] for k in ("ask", "ask_pos", "ask_len", "at", "value_at", "asked")
            }
            alone.append(run_lckv(model, type(packed)(**own, **rest), how).answer.item())
    assert together == pytest.approx(sum(alone) / 3, rel=1e-4)


def test_iterations_without_gradient_come_first():
    drawn = [draw_iterations(random.Random(i), 0.9) for i in range(200)]
    assert {how.with_gradient for how in drawn} == {2}
    assert {how.without_gradient for how in drawn} == {1, 2, 3, 7}


@pytest.mark.parametrize("twin_flag", [[], ["--twin"]])
def test_a_run_resumes_and_exports_what_loads(tmp_path, twin_flag):
    common = [
        "--out",
        str(tmp_path),
        "--tokens",
        "150",
        "--log-every",
        "1",
        "--level",
        "0",
        "--threads",
        "1",
        "--device",
        "cpu",
    ]
    main([*common, "--steps", "1", *twin_flag])
    main([*common, "--steps", "2", *twin_flag])
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2]
    model, tokenizer = load(tmp_path / "model")
    assert type(model).__name__ == ("LlamaForCausalLM" if twin_flag else "LCKVLlamaForCausalLM")
    out = model.generate(**tokenizer("<s> ann lives in rome .", return_tensors="pt"), max_new_tokens=2)
    assert out.shape[1] > 5
