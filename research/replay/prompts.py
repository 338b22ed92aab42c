"""Samples of our own as a trace: their prompts as tokens, in blocks of 16 whose ids name everything before them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.datasets.files import JsonlDataset, json_lines
from dejakv.errors import DatasetError, InputError
from dejakv.experiments.samples import Prompter, read_samples, tokenizer_of
from dejakv.experiments.samples_log import finished_settings
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.shares import BLOCK
from research.replay.trace import Call, Trace, read_trace


def load(path: Path, model: str, block: int | None = None, *, raw_prompts: bool = False) -> Trace:
    """A trace from a file with `hash_ids`, from a log of prompts (as `--dataset jsonl`), or from the folder of a run.

    model        whose tokenizer reads prompts; a run's own model takes its place
    raw_prompts  `prompt` of a log is read as it stands, without the model's chat template

    Raises: DatasetError, ConfigError, InputError, ModelError.
    """
    if path.is_dir():
        settings = finished_settings(path)
        return trace_of(tuple(read_samples(settings)), settings)
    if not path.is_file():
        raise DatasetError(f"no file {str(path)!r}: give a trace, a log of prompts or the folder of a run")
    first = next(iter(json_lines(path)), None)
    if first is None or "hash_ids" in first[1] or "input_length" in first[1]:
        return read_trace(path, block)
    if block is not None:
        raise DatasetError("--block is for traces with hash_ids: prompts are cut into blocks of 16 tokens")
    return trace_of(tuple(JsonlDataset(path)), RunSettings(model=model, raw_prompts=raw_prompts))


def trace_of(samples: Sequence[Sample], settings: RunSettings) -> Trace:
    """The trace of samples. Raises: InputError for pictures, whose tokens only the model knows."""
    tokenizer: Any = tokenizer_of(settings)
    prompter = Prompter.of(settings, tokenizer)
    names: dict[tuple[object, ...], int] = {}
    calls: list[Call] = []
    for sample in samples:
        if sample.media:
            raise InputError(f"sample {sample.id} has pictures: a replay reads texts and traces only")
        request = prompter.request(sample)
        ids = tokenizer(request.prompt, add_special_tokens=False)["input_ids"]
        chain: object = request.partition
        blocks: list[int] = []
        for start in range(0, len(ids), BLOCK):
            chain = names.setdefault((chain, *ids[start : start + BLOCK]), len(names))
            blocks.append(int(chain))
        calls.append(Call(len(ids), tuple(blocks)))
    if not calls:
        raise DatasetError("there are no prompts: give a log with one request a line")
    return Trace(tuple(calls), BLOCK)
