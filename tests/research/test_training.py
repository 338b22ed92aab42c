"""Training of the small models: the fast passes compute what the exported models compute, and short runs learn and resume."""

import json
import random
from pathlib import Path

import pytest
import torch
from research.training import docs as train
from research.training.docs_data import make_batch
from research.training.docs_eval import LENGTHS, Reader, measure
from research.training.docs_model import Helpers, build, run
from research.training.docs_tokenizer import vocabulary
from research.training.lckv import lckv_from, run_lckv, twin_from
from research.training.lckv import main as train_lckv
from research.training.shapes import main as train_shapes
from research.training.shapes_batches import Batches
from research.training.shapes_model import IMAGE_TOKENS, build_model, build_processor
from research.training.state_kinds import build_kind, run_talks
from research.training.state_kinds import main as train_kind
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from dejakv.models import load, path
from dejakv.prototypes.lckv.passes import LoopIterations

WORDS = vocabulary()
SHIPPED = path("docs-lm")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke")
    options = "--size tiny --steps 60 --tokens 600 --lr 3e-3 --device cpu --every 5 --out"
    train.main([*options.split(), str(folder)])
    return folder


@pytest.mark.parametrize("turns", [False, True])
def test_the_fast_pass_has_the_loss_of_an_ordinary_pass_over_each_question(turns: bool) -> None:
    torch.manual_seed(0)
    model = build("tiny").eval()
    batch = make_batch(random.Random(2), 9, 3, 4, stretch=0.5, turns=turns)
    with torch.no_grad():
        fast = run(model, Helpers(64), batch)
        answers, ends, right = [], [], []
        for d in range(3):
            n = int(batch.doc_len[d])
            ids, positions = batch.doc[d, :n], batch.doc_pos[d, :n]
            for q in range(4):
                size = int(batch.ask_len[d, q])
                asked = torch.cat([ids, batch.ask[d, q, :size]])
                where = torch.cat([positions, batch.ask_pos[d, q, :size]])
                logits = model(input_ids=asked[None], position_ids=where[None]).logits[0]
                answers.append(F.cross_entropy(logits[-3], asked[-2]))
                ends.append(F.cross_entropy(logits[-2], asked[-1]))
                right.append(float(logits[-3].argmax() == asked[-2]))
                if turns:
                    ids, positions = asked, where
    expected = torch.stack(answers).mean() + 0.1 * torch.stack(ends).mean()
    torch.testing.assert_close(fast.answer, expected, rtol=1e-4, atol=1e-4)
    assert fast.right.item() == pytest.approx(sum(right) / len(right))


def test_a_short_run_learns_and_logs_its_curve(smoke: Path) -> None:
    lines = [json.loads(line) for line in (smoke / "log.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == list(range(5, 61, 5))
    assert lines[-1]["answer"] < lines[0]["answer"] - 1.0
    assert lines[-1]["attention"] < lines[0]["attention"]
    assert {"seconds", "accuracy", "bound", "looked"} <= set(lines[0])


def test_a_run_leaves_a_model_that_the_ordinary_loaders_read(smoke: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smoke / "model")
    reader = AutoTokenizer.from_pretrained(smoke / "model")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.max_position_embeddings == 2048
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == reader.eos_token_id
    assert len(reader) == model.config.vocab_size
    assert model.generate(**reader("<s> Ann keeps a dog. <q>", return_tensors="pt")).shape[1] > 0


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def trainer(name: str) -> train.DocsTrainer:
        options = "--seed 5 --size tiny --context 512 --device cpu --tokens 400 --out"
        return train.DocsTrainer(train.docs_parser("docs", "").parse_args([*options.split(), str(tmp_path / name)]))

    whole = trainer("whole")
    for _ in range(6):
        whole.train_step(0.3)
    first = trainer("halves")
    for _ in range(3):
        figures = first.train_step(0.3)
    first.report(figures)
    second = trainer("halves")
    assert second.progress.step == 3
    for _ in range(3):
        second.train_step(0.3)
    assert second.progress == whole.progress
    for a, b in zip(whole.parts["model"].parameters(), second.parts["model"].parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_published_curve_belongs_to_the_shipped_model() -> None:
    rows = json.loads((SHIPPED / "curve.json").read_text())["lengths"]
    assert {(r["tokens"], r["wordings"]) for r in rows} == {(t, w) for t in LENGTHS for w in ("train", "held_out")}
    reader = Reader(str(SHIPPED))
    # The same first questions as the published measurement: a model that was swapped afterwards would show.
    for length, least in ((100, 0.9), (500, 0.9)):
        again = measure(reader, length, 24, "train")
        assert again["accuracy"] >= least
        assert again["ended"] == 1.0


def test_a_packed_picture_question_is_answered_as_if_it_were_alone() -> None:
    processor = build_processor()
    batch = Batches(processor.tokenizer, pictures=3, questions=4).make("test", (2, 6))
    torch.manual_seed(0)
    model = build_model(processor.tokenizer, "tiny").eval()
    embedded = model.model.language_model.embed_tokens(batch.tokens)
    with torch.no_grad():
        seen = model.model.get_image_features(pixel_values=batch.pixels).pooler_output
        embedded[:, :IMAGE_TOKENS] = torch.stack(list(seen))
        packed = model.model.language_model(
            inputs_embeds=embedded, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
        ).last_hidden_state
    for row, place in batch.answers.tolist():
        start = place
        while batch.positions[row, start] > IMAGE_TOKENS:
            start -= 1
        tokens = torch.cat([batch.tokens[row, :IMAGE_TOKENS], batch.tokens[row, start : place + 1]])[None]
        with torch.no_grad():
            alone = model(input_ids=tokens, pixel_values=batch.pixels[row : row + 1]).logits[0, -1]
            among = model.lm_head(packed[row, place])
        torch.testing.assert_close(alone, among, rtol=1e-4, atol=1e-4)


def _shapes(out: Path, steps: int) -> None:
    options = "--size tiny --pictures 2 --questions 3 --every 3 --eval-batches 1 --minutes 10 --device cpu"
    train_shapes([*options.split(), "--steps", str(steps), "--out", str(out)])


def test_a_run_on_pictures_logs_exports_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _shapes(tmp_path, 3)
    before = torch.load(tmp_path / "state.pt", weights_only=True)
    _shapes(tmp_path, 6)
    after = torch.load(tmp_path / "state.pt", weights_only=True)
    assert "resumed at step 3" in capsys.readouterr().out
    _shapes(tmp_path, 6)  # nothing left to do: the model is written again, the log has no new line
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6]
    assert {"all", "held-out", "relation"} <= set(lines[-1]["measured"])
    model, processor = load(tmp_path / "model")
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    assert model.dtype == torch.float32
    assert processor.chat_template
    # Time is left, so the average of the weights ships.
    assert torch.equal(model.lm_head.weight, after["average"]["module.lm_head.weight"])
    assert not torch.equal(after["average"]["module.lm_head.weight"], after["model"]["lm_head.weight"])
    assert not torch.equal(after["average"]["module.lm_head.weight"], before["average"]["module.lm_head.weight"])


def test_a_question_in_a_pack_is_computed_as_if_alone():
    """The answer's loss over a pack is the mean of those of its questions, each behind the document by itself."""
    model = lckv_from(twin_from("docs-lm")).eval()
    how = LoopIterations(80, 1)
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


@pytest.mark.parametrize("twin_flag", [[], ["--twin"]])
def test_a_condensed_run_resumes_and_exports_what_loads(tmp_path, twin_flag):
    common = [*"--tokens 150 --every 1 --level 0 --threads 1 --device cpu --out".split(), str(tmp_path)]
    train_lckv([*common, "--steps", "1", *twin_flag])
    train_lckv([*common, "--steps", "2", *twin_flag])
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2]
    model, tokenizer = load(tmp_path / "model")
    assert type(model).__name__ == ("LlamaForCausalLM" if twin_flag else "LCKVLlamaForCausalLM")
    out = model.generate(**tokenizer("<s> ann lives in rome .", return_tensors="pt"), max_new_tokens=2)
    assert out.shape[1] > 5


def test_the_pass_for_any_model_has_the_losses_of_the_fast_one() -> None:
    torch.manual_seed(0)
    model, helpers = build_kind("ordinary", "tiny"), Helpers(64)
    model.set_attn_implementation("eager")
    # Talks of unequal lengths: nothing may stand between a document and its questions.
    batch = make_batch(random.Random(2), 9, 3, 4, stretch=0.5, turns=True)
    with torch.no_grad():
        fast, plain = run(model, helpers, batch), run_talks(model, helpers, batch)
    for name, value in vars(fast).items():
        torch.testing.assert_close(getattr(plain, name), value, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["hybrid", "latent"])
def test_models_of_other_state_are_trained_and_exported(kind: str, tmp_path: Path) -> None:
    options = f"--kind {kind} --size tiny --steps 2 --tokens 300 --device cpu --every 1 --out"
    train_kind([*options.split(), str(tmp_path)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompt = torch.tensor([[1, 5, 6, 7]])
    assert model(prompt).logits.shape == (1, 4, len(WORDS))
    assert {"right", "bound", "looked"} <= set(json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1]))
