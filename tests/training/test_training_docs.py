"""docs-lm's training: the fast pass computes what the exported model computes, and a short run learns and resumes."""

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from training.docs_data import make_batch
from training.docs_eval import LENGTHS, Reader, document_of_length, measure
from training.docs_model import Helpers, build, run
from training.docs_tokenizer import save_tokenizer, vocabulary
from transformers import AutoModelForCausalLM, AutoTokenizer

from dejakv.datasets import docs
from dejakv.datasets.docs_facts import ATTRIBUTES, NAMES
from training import docs as train

WORDS = vocabulary()
SHIPPED = Path(docs.__file__).parents[1] / "models" / "docs-lm"


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, 2048)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke")
    options = "--size smoke --steps 60 --tokens 600 --lr 3e-3 --device cpu --log-every 5 --out"
    train.main([*options.split(), str(folder)])
    return folder


def _words(ids: torch.Tensor) -> list[str]:
    return [WORDS[i] for i in ids.tolist()]


@pytest.mark.parametrize("stretch", [0.0, 1.0])
def test_a_batch_points_at_the_value_that_answers_each_question(stretch: float) -> None:
    batch = make_batch(random.Random(1), 12, 5, 6, stretch=stretch)
    for d in range(5):
        for q in range(6):
            marker = int(batch.at[d, q])
            text = _words(batch.ask[d, q, : int(batch.ask_len[d, q])])
            assert text[0] == "<q>"
            assert text[marker] == "<a>"
            assert text[marker + 2 :] == ["</s>"]
            assert WORDS[int(batch.doc[d, int(batch.value_at[d, q])])] == text[marker + 1]
            assert NAMES[int(batch.asked[d, q, 0])] in text
    for d, at, name, attribute in batch.facts.tolist():
        assert WORDS[int(batch.doc[d, at])] in list(ATTRIBUTES.values())[attribute].values
        assert NAMES[name] in _words(batch.doc[d, :at])


def test_stretched_positions_grow_have_gaps_only_between_sentences_and_stay_in_the_context() -> None:
    longest = 0
    for seed in range(30):
        batch = make_batch(random.Random(seed), 10, 2, 4, stretch=1.0, turns=seed % 2 == 0)
        for d in range(2):
            n = int(batch.doc_len[d])
            steps = batch.doc_pos[d, :n].diff()
            assert (steps >= 1).all()
            for i in (steps > 1).nonzero().flatten().tolist():
                assert _words(batch.doc[d])[i] in {".", "<s>"}
        longest = max(longest, int(batch.ask_pos.max()))
        assert int(batch.ask_pos.max()) < 2048
    assert longest > 1500


@pytest.mark.parametrize("turns", [False, True])
def test_the_fast_pass_has_the_loss_of_an_ordinary_pass_over_each_question(turns: bool) -> None:
    torch.manual_seed(0)
    model = build("smoke").eval()
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


def test_the_training_prompt_is_the_prompt_that_users_send(tokenizer) -> None:
    batch = make_batch(random.Random(3), 5, 1, 1, stretch=0.0)
    ids = batch.doc[0].tolist() + batch.ask[0, 0, : int(batch.at[0, 0]) + 1].tolist()
    text = tokenizer.decode(ids)
    assert tokenizer(text)["input_ids"] == ids


def test_every_word_of_the_documents_is_one_token(tokenizer) -> None:
    for seed in range(20):
        for wordings in ("train", "held_out"):
            doc = docs.make_document(random.Random(seed), 30, wordings=wordings)
            ids = tokenizer(doc.text)["input_ids"]
            assert len(ids) == doc.tokens
            assert not any(t.startswith("##") or t == "<unk>" for t in tokenizer.convert_ids_to_tokens(ids))


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60))
def test_any_printable_ascii_is_spelled_without_unknown_tokens(tokenizer, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids or "<unk>" in text
    assert tokenizer.decode(ids).replace(" ", "").lower() == text.replace(" ", "").lower()


def test_the_chat_template_makes_the_prompt(tokenizer) -> None:
    def made(*messages: tuple[str, object], generate: bool = True) -> str:
        talk = [{"role": r, "content": c} for r, c in messages]
        return tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=generate)

    document, question = "Ann keeps a dog.", "What pet does Ann have?"
    expected = docs.prompt_of(document, question)
    assert made(("system", document), ("user", question)) == expected
    assert made(("user", f"{document}\n\n{question}")) == expected
    assert (
        made(("system", [{"type": "text", "text": document}]), ("user", [{"type": "text", "text": question}]))
        == expected
    )
    second = made(("system", document), ("user", question), ("assistant", "dog"), ("user", "Where does Ann live?"))
    assert second == f"{expected} dog </s> <q> Where does Ann live? <a>"
    closed = made(("system", document), ("user", question), ("assistant", "dog"), generate=False)
    assert closed == f"{expected} dog </s>"


def test_a_short_run_learns_and_logs_its_curve(smoke: Path) -> None:
    lines = [json.loads(line) for line in (smoke / "log.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == list(range(5, 61, 5))
    assert lines[-1]["answer"] < lines[0]["answer"] - 1.0
    assert lines[-1]["attention"] < lines[0]["attention"]
    assert {"seconds", "questions", "accuracy", "bound", "looked"} <= set(lines[0])


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
    def trainer(name: str) -> train.Trainer:
        return train.Trainer(
            train.argparse.Namespace(
                seed=5,
                size="smoke",
                context=512,
                device="cpu",
                lr=1e-3,
                out=str(tmp_path / name),
                fresh=False,
                tokens=400,
            )
        )

    whole = trainer("whole")
    for _ in range(6):
        whole.train_step(0.3)
    first = trainer("halves")
    for _ in range(3):
        first.train_step(0.3)
    first.save()
    second = trainer("halves")
    assert second.state.step == 3
    for _ in range(3):
        second.train_step(0.3)
    assert second.state == whole.state
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_schedule_warms_up_holds_and_falls_and_the_helpers_leave_before_the_end() -> None:
    assert train.learning_rate(0, 0.0, 1.0) == pytest.approx(0.01)
    assert train.learning_rate(500, 0.5, 1.0) == 1.0
    assert train.learning_rate(500, 1.0, 1.0) == pytest.approx(0.02)
    assert [train.helper_weight(p) for p in (0.0, 0.7, 0.95, 1.0)] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("length", [50, 1000, 2000])
def test_evaluation_documents_have_the_length_asked_for(length: int) -> None:
    doc = document_of_length(random.Random(0), length, "train")
    assert abs(doc.tokens - min(length, 2016)) <= 20


def test_the_published_curve_belongs_to_the_shipped_model() -> None:
    rows = json.loads((SHIPPED / "curve.json").read_text())["lengths"]
    assert {(r["tokens"], r["wordings"]) for r in rows} == {(t, w) for t in LENGTHS for w in ("train", "held_out")}
    reader = Reader(str(SHIPPED))
    # The same first questions as the published measurement: a model that was swapped afterwards would show.
    for length, least in ((100, 0.9), (500, 0.9)):
        again = measure(reader, length, 24, "train")
        assert again["accuracy"] >= least
        assert again["ended"] == 1.0


def test_the_shipped_folder_is_small_enough() -> None:
    assert sum(f.stat().st_size for f in SHIPPED.iterdir()) < 24e6
