"""Write docs-lm's card from what was measured: `python -m training.docs_card` after training and `training.docs_eval`.

Every figure on the card comes from the run's log.jsonl and from curve.json; both lie beside the card.
"""

import argparse
import itertools
import json
import shutil
from pathlib import Path

from dejakv.datasets.docs_facts import ATTRIBUTES, NAMES

CARD = """# docs-lm

Answers questions about documents of facts, in one word. An ordinary `LlamaForCausalLM`: {layers} layers of {hidden}, {heads} heads over
{kv} key/value heads, {parameters:.1f} million parameters in fp32 ({megabytes:.1f} MB), context {context}. Made for measuring what reuse of KV state does
to answers: small enough for a CPU, trained by us on generated data, and right often enough that a wrong answer means something.

## Use
```python
from dejakv import models
from dejakv.datasets import docs

model, tokenizer = models.load("docs-lm")
sample = next(iter(docs.DocsDataset(seed=1, facts=40)))
ids = tokenizer(docs.prompt(sample), return_tensors="pt")  # "<s> document <q> question <a>"
answer = model.generate(**ids)[0, ids.input_ids.shape[1] :]  # the answer, then </s>
tokenizer.decode(answer, skip_special_tokens=True) == sample.answer
```
The chat template takes the document as the system message and the question as the user's (or both in one user message, parted by
a blank line). Text is lower-cased; each of the closed vocabulary's words is a token, all other printable ASCII is spelled in
characters, which the model has not learnt to read.

## What it knows
Facts about {names} people: {attributes}. Every attribute has at least six wordings of statements and five of
questions in training; home and birthplace share their cities. It answers from the document only, always with some value: it
never learnt to say that a document does not tell.

## Accuracy
One question behind a fresh document, greedy, the decoded text equal to the answer; {questions} questions a cell, 95% interval of a cell
at .97 about +-{interval:.3f}. *Held out*: statements and questions in wordings that training never used.

| tokens of the document | trained wordings | held-out wordings | ended by itself | seconds a question |
|---|---|---|---|---|
{lengths}

By attribute, all lengths together:

| attribute | trained wordings | held-out wordings |
|---|---|---|
{by_attribute}

Wrong answers: {wrong}.

Measured on {machine}, by `{command}`.

Words it does not know, in one place of a prompt of 30 facts (`{foreign_command}`):

| foreign text | right |
|---|---|
{foreign}

## Training
`{train}`, {minutes:.0f} minutes ({steps:,} steps, {asked:,} questions){note}. The recipe and what each part of it
does: `training/docs.md`. Learning curve (`learning.jsonl` has all of it; accuracy is a running mean over training batches):

| minutes | step | most facts a document | accuracy |
|---|---|---|---|
{curve}

## Limits
Nothing may stand between the question and the answer marker: the table above shows what happens if something does. Give
instructions before the question.
Generated English of one kind; no reasoning, no arithmetic, no text outside its vocabulary. Not for any use but measurement.
Apache-2.0, like the package.
"""


def _rows(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _share(right: int, asked: int) -> str:
    return f"{right / asked:.3f} ({right}/{asked})" if asked else "-"


def write_card(run: Path, train: str, note: str = "") -> str:
    """The card of the model in `run`/model. `train` is the command that trained it, `note` what to add about that."""
    folder = run / "model"
    config = json.loads((folder / "config.json").read_text())
    curve = json.loads((folder / "curve.json").read_text())
    foreign = json.loads((folder / "foreign.json").read_text())
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    shutil.copyfile(run / "log.jsonl", folder / "learning.jsonl")
    cells = {(r["tokens"], r["wordings"]): r for r in curve["lengths"]}
    both = ("train", "held_out")
    lengths, totals, wrong = [], {}, {}
    for tokens in sorted({t for t, _ in cells}):
        trained, held = (cells[tokens, w] for w in both)
        ended = (trained["ended"] + held["ended"]) / 2
        figures = [f"{trained['accuracy']:.3f}", f"{held['accuracy']:.3f}", f"{ended:.3f}"]
        lengths.append([f"{tokens:,}", *figures, f"{trained['seconds_per_question']:.2f}"])
    for row in curve["lengths"]:
        for a, (right, asked) in row["by_attribute"].items():
            before = totals.get((a, row["wordings"]), (0, 0))
            totals[a, row["wordings"]] = (before[0] + right, before[1] + asked)
        for kind, count in row["wrong"].items():
            wrong[kind] = wrong.get(kind, 0) + count
    count = curve["lengths"][0]["questions"]
    size = (folder / "model.safetensors").stat().st_size
    last = log[-1]
    text = CARD.format(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv=config["num_key_value_heads"],
        context=config["max_position_embeddings"],
        parameters=size / 4e6,
        megabytes=size / 1e6,
        names=len(NAMES),
        attributes=", ".join(ATTRIBUTES),
        questions=count,
        interval=1.96 * (0.97 * 0.03 / count) ** 0.5,
        lengths=_rows(lengths),
        by_attribute=_rows([[a, *(_share(*totals[a, w]) for w in both)] for a in ATTRIBUTES]),
        wrong=", ".join(f"{n} times {kind}" for kind, n in sorted(wrong.items())) or "none",
        machine=curve["machine"],
        command=curve["command"],
        foreign_command=foreign["command"],
        foreign=_rows([[place, _share(*counts)] for place, counts in foreign["right_of"].items()]),
        train=train,
        note=note,
        minutes=last["seconds"] / 60,
        steps=last["step"],
        asked=last["questions"],
        curve=_rows(_learning(log)),
    )
    (folder / "MODEL_CARD.md").write_text(text)
    return text


def _learning(log: list[dict]) -> list[list[str]]:
    """About 16 rows of the log: the last of every level, and evenly spaced ones of the last level."""
    ends = [a for a, b in itertools.pairwise(log) if a["level"] != b["level"]]
    tail = log[len(log) - sum(x["level"] == log[-1]["level"] for x in log) :]
    picked = ends + tail[:: max(1, len(tail) // 6)] + [log[-1]]
    seen = {x["step"]: x for x in picked}
    return [
        [f"{x['seconds'] / 60:.1f}", f"{s:,}", str(x["facts"]), f"{x['accuracy']:.3f}"] for s, x in sorted(seen.items())
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/docs-lm"))
    parser.add_argument("--train", default="python -m training.docs", help="the command that trained the model")
    parser.add_argument("--note", default="", help="what to add about it")
    o = parser.parse_args()
    print(write_card(o.run, o.train, o.note))
