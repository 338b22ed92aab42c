"""Write docs-lckv's card from what was measured: `python -m training.lckv_card` after `training.lckv` and `training.docs_eval`."""

import argparse
import json
import shutil
from pathlib import Path

CARD = """# docs-lckv

The documents task of docs-lm (see its card for what it knows and how it is asked) in a model with a layer-condensed KV cache
(LCKV, arXiv 2405.10637): {layers} layers of {hidden}, KV layout `{layout}`. Layers 0 and 1 are ordinary. Layers 2, 3 and 4 all
attend to the keys and values of layer 4, so that only 3 of 5 layers have any: {parameters:.1f} million parameters in fp32
({megabytes:.1f} MB), {bytes_a_token:,} bytes of KV a token in fp32. Made for reuse between tasks (`dejakv.sim_llm`), where a hit takes layer
4's KV from a similar task and skips three of five layers.

## Use
```python
from dejakv.sim_llm import SimLLMInference

inference = SimLLMInference.from_pretrained("docs-lckv")
inference.generate("<s> Ann lives in Rome. <q> Where does Ann live? <a>", max_new_tokens=4)
```
`dejakv.models.load("docs-lckv")` gives the plain model; `generate` is transformers' own. A prefill iterates {iterations} times
(`forward_passes` + `backward_passes`).

## Accuracy
One question behind a fresh document, greedy, the decoded text equal to the answer. *Held out*: wordings
that training never used. In brackets the 95% interval (Wilson) of the first column.

| tokens of the document | questions a cell | trained wordings | held-out wordings |
|---|---|---|---|
{lengths}

Measured on {machine}, by `{command}`. Longer documents were not measured.

## Training
`{train}`{note}. Weights start from docs-lm: layers 0 to 3 are its layers, without the projections that the layout has no use for;
layer 4 starts with the keys and values of docs-lm's layer 2, which looks facts up, and adds nothing to the hidden state at first.
Each step iterates 0 to 3 times without gradient (a tenth of the steps 7 times) and twice with. Losses: the answer, and where the
attention of layer 2 looks. {steps} steps, {asked:,} questions, {minutes:.0f} minutes beside much other work. Learning curve (running mean over
training batches; it is set back to .7 at each new level; `learning.jsonl` has all of it):

| minutes | step | most facts a document | accuracy |
|---|---|---|---|
{curve}

## Limits
Those of docs-lm. A prefill of {iterations} iterations is near token-by-token decoding, not equal to it (docs/results/sim_llm.md).
Apache-2.0, like the package.
"""


def write_card(run: Path, train: str, note: str) -> str:
    """The card of the model in `run`/model."""
    from dejakv.experiments.scoring import wilson

    folder = run / "model"
    config = json.loads((folder / "config.json").read_text())
    curve = json.loads((folder / "curve.json").read_text())
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    shutil.copyfile(run / "log.jsonl", folder / "learning.jsonl")
    cells = {(row["tokens"], row["wordings"]): row for row in curve["lengths"]}
    lengths = []
    for tokens in sorted({tokens for tokens, _ in cells}):
        count = cells[tokens, "train"]["questions"]
        trained, held = (cells[tokens, wordings]["accuracy"] for wordings in ("train", "held_out"))
        low, high = wilson(round(trained * count), count)
        lengths.append(f"| {tokens:,} | {count} | {trained:.3f} ({low:.3f} to {high:.3f}) | {held:.3f} |")
    layout = config["kv_layout"]
    kept = len(set(layout.split("_")))
    size = (folder / "model.safetensors").stat().st_size
    picked = {x["step"]: x for x in [*log[:: max(1, len(log) // 12)], log[-1]]}
    rows = [f"| {x['seconds'] / 60:.1f} | {x['step']} | {x['facts']} | {x['accuracy']:.3f} |" for x in picked.values()]
    text = CARD.format(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        layout=layout,
        parameters=size / 4e6,
        megabytes=size / 1e6,
        bytes_a_token=kept * 2 * config["num_key_value_heads"] * config["head_dim"] * 4,
        iterations=config["forward_passes"] + config["backward_passes"],
        lengths="\n".join(lengths),
        machine=curve["machine"],
        command=curve["command"],
        train=train,
        note=note,
        steps=log[-1]["step"],
        asked=log[-1]["questions"],
        minutes=log[-1]["seconds"] / 60,
        curve="\n".join(rows),
    )
    (folder / "MODEL_CARD.md").write_text(text)
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/docs-lckv"))
    parser.add_argument("--train", default="python -m training.lckv", help="the command that trained the model")
    parser.add_argument("--note", default="", help="what to add about it")
    o = parser.parse_args()
    print(write_card(o.run, o.train, o.note))
