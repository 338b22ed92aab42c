"""Retrieved passages: every form of corpus, every order, and what is no corpus."""

import copy
import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dejakv.datasets.rag import Passage, RagDataset, RagQuestion, continuation_questions, traffic
from dejakv.datasets.registry import DatasetOptions, open_dataset
from dejakv.errors import ConfigError, DatasetError
from dejakv.experiments.samples import SamplePrompter
from dejakv.models import tokenizer_folder

TEXTS = {
    "cats": "Cats sleep for most of the day. A cat sees well at night because of its wide pupils and a layer behind them.",
    "dogs": "Dogs were the first animals that lived with people. A dog smells many thousand times better than a person does.",
    "fish": "Fish breathe through their gills. A salmon returns to the river in which it was born in order to lay its eggs.",
}


def write_lines(file: Path, *records: Any) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def squad(file: Path) -> str:
    articles = [
        {
            "title": title,
            "paragraphs": [
                {"context": text, "qas": [{"id": title, "question": f"Which text is about {title}?", "answers": [{"text": title}]}]}
            ],
        }
        for title, text in TEXTS.items()
    ]  # fmt: skip
    file.write_text(json.dumps({"version": "1.1", "data": articles}))
    return str(file)


def test_squad(tmp_path: Path) -> None:
    found = list(RagDataset(squad(tmp_path / "dev.json"), passages=1))
    assert sorted((s.question, s.answer) for s in found) == [(f"Which text is about {t}?", t) for t in TEXTS]
    for sample in found:
        assert sample.fields["titles"] == [sample.answer]
        assert TEXTS[str(sample.answer)] in sample.context


def test_json_lines_keep_their_order_and_what_was_retrieved(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "log.jsonl",
        *({"passage": text, "title": title} for title, text in TEXTS.items()),
        {"question": "Who breathes through gills?", "answer": 1},
        {"question": "Who sees at night?"},
        {
            "question": "What was given?",
            "passages": ["the second best", {"text": "the rest", "title": "t"}, "too many"],
        },
    )
    gills, night, given = RagDataset(path, passages=2)
    assert gills.fields["titles"][0] == "fish"
    assert gills.answer == "1"
    assert night.fields["titles"][0] == "cats"
    assert given.context.endswith("the second best\n\n[t]\nthe rest")


def test_a_folder_of_texts(tmp_path: Path) -> None:
    for title, text in TEXTS.items():
        (tmp_path / f"{title}.md").write_text(text)
    found = list(RagDataset(str(tmp_path), passages=1))
    for sample in found:  # a rule makes the questions: how a sentence goes on
        assert sample.answer is not None
        assert " ".join(sample.answer.split()) in " ".join(sample.context.split())
        assert sample.fields["titles"] == [sample.fields["topic"]]
    write_lines(tmp_path / "questions.jsonl", {"question": "Which animal has gills?"})
    (own,) = RagDataset(str(tmp_path), passages=1)
    assert own.fields["titles"] == ["fish.md"]


def test_long_texts_are_cut_at_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(
        "\n\n".join(f"Paragraph {n} has these twelve words in it, no more and no less." for n in range(40))
    )
    passages = RagDataset(str(tmp_path)).corpus.passages
    assert len(passages) > 3
    assert all(len(p.text.split()) <= 120 for p in passages)
    assert "\n\n".join(p.text for p in passages).count("Paragraph") == 40


@pytest.fixture(scope="module")
def default() -> RagDataset:
    return RagDataset()


def ordered(dataset: RagDataset, order: Any) -> RagDataset:
    """The same passages in another order, without another index of them."""
    other = copy.copy(dataset)
    other.order = order
    return other


def test_orders_hold_the_same_passages(default: RagDataset, tmp_path: Path) -> None:
    score, document, shuffled = (list(islice(ordered(default, o), 20)) for o in ("score", "document", "shuffled"))
    for a, b, c in zip(score, document, shuffled, strict=True):
        assert Counter(a.fields["titles"]) == Counter(b.fields["titles"]) == Counter(c.fields["titles"])
    assert [s.fields["titles"] for s in score] != [s.fields["titles"] for s in document]
    assert [s.fields["titles"] for s in score] != [s.fields["titles"] for s in shuffled]
    assert [s.context for s in shuffled] == [s.context for s in islice(ordered(default, "shuffled"), 20)]
    assert RagDataset(squad(tmp_path / "dev.json"), order="shuffled").order == "shuffled"


def test_the_default_corpus_answers_its_questions_and_has_the_promised_size(default: RagDataset) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder("smollm2-135m"))
    prompter = SamplePrompter(tokenizer, None, "prompt")
    found = list(islice(default, 60))
    sizes = [len(tokenizer(prompter.prompt(sample))["input_ids"]) for sample in found]
    assert sum(600 <= size <= 2_000 for size in sizes) >= 0.95 * len(sizes)
    assert sum(str(sample.answer) in sample.context for sample in found) >= 0.9 * len(found)


def test_traffic_asks_every_question_once_and_popular_topics_more() -> None:
    asked = [RagQuestion(str(n), topic=str(n % 8)) for n in range(800)]
    order = list(traffic(asked, seed=1))
    assert sorted(order, key=lambda q: int(q.text)) == asked
    assert order == list(traffic(asked, seed=1)) != list(traffic(asked, seed=2))
    first = Counter(question.topic for question in order[:100]).most_common()
    assert first[0][1] > 2 * first[-1][1]


def test_a_sentence_is_asked_for_its_second_half() -> None:
    (question, *_) = continuation_questions(Passage("t", TEXTS["cats"]))
    assert question.answer == "its wide pupils and a layer behind them."


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", "{}", "a.json is not in SQuAD's format"),
        ("a.json", "[1, 2]", "not in SQuAD's format"),
        ("a.json", '{"data": [{"paragraphs": [{"context": "x"}]}]}', "not in SQuAD's format.*qas"),
        ("a.json", "{", "not in SQuAD's format"),
        ("a.json", '{"data": []}', "has no question"),
        ("a.jsonl", '{"passage": "x"}\n{oops', "a.jsonl line 2 is not JSON"),
        ("a.jsonl", '{"passage": "x"}\n\n[]', "a.jsonl line 3 is not an object"),
        ("a.jsonl", '{"prompt": "x"}', "a.jsonl line 1 has neither a text 'passage' nor a text 'question'"),
        ("a.jsonl", '{"question": "x", "passages": [3]}', "line 1: an item of 'passages'"),
        ("a.jsonl", '{"passage": "x"}', "has no question"),
        ("a.jsonl", '{"question": "x"}', "has no passage"),
        ("a.jsonl", "", "has no question"),
    ],
)
def test_what_is_no_corpus_says_so(name: str, content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DatasetError, match=says):
        RagDataset(str(tmp_path / name))


def test_options_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="score, document, shuffled"):
        open_dataset("rag", DatasetOptions(), {"order": "best"})
    with pytest.raises(ConfigError, match="give 1 or more"):
        open_dataset("rag", DatasetOptions(), {"passages": 0})
    open_dataset("repo", DatasetOptions(), {"passages": 0})  # a preset's option of another data set
    with pytest.raises(DatasetError, match="no file or folder"):
        RagDataset(str(tmp_path / "nothing"))
    with pytest.raises(DatasetError, match="has no question"):
        RagDataset(str(tmp_path))


def test_passages_of_free_order_stand_in_their_prompt(default: RagDataset) -> None:
    given, free = (next(iter(ordered(default, order))) for order in ("score", "free"))
    assert (given.parts, len(free.parts)) == ((), 8)
    assert free.context == given.context
    request = SamplePrompter().request(free)
    assert request.frame.prompt(range(8)) == request.prompt
    assert SamplePrompter().request(given).order == "given"
