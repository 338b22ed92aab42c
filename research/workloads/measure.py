"""One stream, measured: its rows as they come into `samples.jsonl`, then its `summary.json`."""

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from dejakv.blend.settings import DEFAULT
from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError
from dejakv.experiments.compare import close_all, engine_context, pipeline_for, serve_all, sizes_of
from dejakv.experiments.output import SETTINGS, SUMMARY, make_folder, read_json_or_empty, write_run
from dejakv.experiments.samples_log import SamplesLog, check_same
from dejakv.experiments.settings import Arm
from dejakv.experiments.shares import shares_of
from dejakv.experiments.summary import RunProgress, SampleRow
from dejakv.models import resolve
from dejakv.pipeline import Pipeline
from research.machine import machine, measured
from research.workloads.figures import figures
from research.workloads.streams import BASE, PROMOTING, Stream, chosen_of, in_folder

_STATE = "state"
"""Folder of the arms' caches beside the rows.

It is removed at the end, and what a killed run left of it before the next.
"""

_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"


def finished(stream: Stream, output: Path) -> bool:
    """Whether the stream is measured to its end.

    Raises: ConfigError if other settings were measured there.
    """
    folder = output / stream.name
    if (folder / SUMMARY).exists() and (folder / SETTINGS).exists():
        check_same(folder, stream.told())
        return read_json_or_empty(folder / SUMMARY).get("samples") == stream.served
    return False


def measure(stream: Stream, output: Path, watch: RunProgress, engine: Any = None) -> bool:
    """Serves the stream's requests in all arms, from where an earlier run of the same was stopped.

    False if it was interrupted.

    engine  one that is loaded already, else the stream's own is

    Raises: ConfigError for a folder of something else; DatasetError, ModelError, MissingExtraError.
    """
    watch.stage(f"{stream.name}: reading the prompts")
    chosen, prompter, tokens = chosen_of(stream)
    folder = make_folder(output / stream.name)
    state = folder / _STATE
    _check_state(state)
    log = SamplesLog(folder, stream.told(), chosen)
    before = machine()
    try:
        shutil.rmtree(state, ignore_errors=True)
        caches: dict[str, tuple[Arm, SemanticCacheConfig]] = {
            name: (kind, in_folder(config or stream.settings.cache, state, name))
            for name, (kind, config) in stream.arms.items()
        }
        settings = replace(stream.settings, cache=caches.get(DEFAULT, caches[BASE])[1])
        if settings.engine == "vllm":
            os.environ.setdefault(
                _KV_SPACE, str(kv_gib(settings.model, tokens, stream, len(caches)))
            )
        watch.stage(f"{stream.name}: loading {settings.model}")
        with engine_context(settings) if engine is None else nullcontext(engine) as own:
            pipelines = {
                name: pipeline_for(kind, own, config, name, promotes=name == PROMOTING)
                for name, (kind, config) in caches.items()
            }
            rows, stopped = serve_all(pipelines, chosen, settings, own, prompter, watch, log)
            for pipeline in pipelines.values():
                if pipeline.cache is not None:
                    pipeline.cache.flush()  # the report tells how much is stored
            shares = shares_of(
                own.prepare(prompter.request(sample)) for sample in chosen[: len(rows)]
            )
            write_run(
                folder, _summary(stream, rows, pipelines, shares, before, resumed=bool(log.rows))
            )
            close_all(pipelines)
        return not stopped
    finally:
        log.close()
        shutil.rmtree(state, ignore_errors=True)


def _check_state(state: Path) -> None:
    """Raises: ConfigError for a folder that no run of ours left, so that nothing of somebody
    else's is removed.
    """
    if os.path.lexists(state) and not read_json_or_empty(state.parent / SETTINGS):
        raise ConfigError(f"--output: {state} is there and no run made it: give another folder")


def _summary(
    stream: Stream,
    rows: Sequence[SampleRow],
    pipelines: Mapping[str, Pipeline],
    shares: Mapping[str, Any],
    before: Mapping[str, Any],
    *,
    resumed: bool,
) -> dict[str, Any]:
    """Everything that the report says of a stream. `before`: the machine as it was found."""
    import torch

    measured_by = measured("research.workloads")
    return {
        "workload": stream.settings.dataset,
        "engine": stream.settings.engine,
        "model": stream.settings.model,
        "dtype": stream.settings.dtype,
        "samples": len(rows),
        "lengths": list(stream.lengths),
        "answer_tokens": stream.settings.max_new_tokens,
        "arms": figures(rows),
        "sizes": {
            name: sizes_of(own.cache, own.engine)
            for name, own in pipelines.items()
            if own.cache is not None
        },
        **shares,
        "resumed": resumed,
        **measured_by,
        "machine": {
            **before,
            "threads": torch.get_num_threads(),
            "load_average_after": measured_by["machine"]["load_average"],
        },
    }


def kv_gib(model: str, tokens: int, stream: Stream, arms: int) -> int:
    """GiB in which vLLM holds the prompts of all arms at once, in fp32: so prefix caching forgets
    nothing.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(resolve(model)))
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    each = 2 * config.num_hidden_layers * heads * size * 4
    padded = tokens + stream.served * (stream.settings.max_new_tokens + 128)
    return 1 + math.ceil(arms * padded * each / 2**30)
