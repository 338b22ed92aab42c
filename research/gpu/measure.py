"""Checks and figures of a device within a given time, as a page and a JSON file."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from research.gpu import vllm_names
from research.gpu.checks import CHECKS, NotRun
from research.gpu.figures import FirstTokens, Rows, bandwidths, state_copies
from research.gpu.models import SHAPE_8B, SMALL, lengths_in_time, random_llama
from research.machine import measured

NO_VLLM = (
    "the part with vLLM: this environment has none. Run `python -m research.gpu` in one with "
    "`pip install 'dejakv[vllm]'`"
)
BYTES_8B = 40 << 30
"""Memory of the device for the 8B shape with 32,000 tokens."""


@dataclass
class Run:
    """What was done within the time, and what was left out.

    Attributes
    ----------
    checks : dict[str, str]
        What each check saw.
    tables : dict[str, Rows]
        Figures by heading.
    left_out : list[str]
        What was not begun or not possible, with the reason.
    failed : bool
        Whether a check failed.
    """

    until: float
    checks: dict[str, str] = field(default_factory=dict[str, str])
    tables: dict[str, Rows] = field(default_factory=dict[str, Rows])
    left_out: list[str] = field(default_factory=list[str])
    failed: bool = False

    def has(self, seconds: float, what: str) -> bool:
        """Tell whether there is time for something; if not, note that it is left out."""
        left = self.until - time.monotonic()
        if seconds <= left:
            return True
        self.left_out.append(f"{what}: {left:.0f} s left, {seconds:.0f} s needed")
        return False

    def attempt(self, what: str, call: Callable[[], Iterable[dict[str, Any]]]) -> None:
        """Note rows of figures as they come; an error leaves the rest out."""
        rows = self.tables.setdefault(what, [])
        try:
            for row in call():
                rows.append(row)
                print(f"  {row}", flush=True)
        # Such as memory of a GPU that others use: the other figures are still wanted.
        except Exception as error:
            self.left_out.append(f"{what}, the rest: {type(error).__name__}: {error}"[:300])


def run(device_name: str, seconds: float, output: Path, *, tiny: bool) -> int:
    """Check and measure, and write `page.md` and `result.json`; return 1 if a check failed."""
    began = time.monotonic()
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)

    done = Run(began + seconds)
    _check(done, device)
    _with_vllm(done, device, tiny)
    _measure(done, device, tiny)
    result = {
        "what": _title(device, tiny),
        **measured("research.gpu"),
        "seconds": round(time.monotonic() - began, 1),
        "checks": done.checks,
        "figures": done.tables,
        "left_out": done.left_out,
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (output / "page.md").write_text(page(result), encoding="utf-8")
    print(f"{output / 'page.md'} and {output / 'result.json'}")
    return int(done.failed)


def _title(device: torch.device, tiny: bool) -> str:
    if device.type != "cuda":
        return "A trial of the program on a CPU: nothing here was measured on a GPU"
    return f"DejaKV on {torch.cuda.get_device_name(device)}{', a small model' if tiny else ''}"


def _check(done: Run, device: torch.device) -> None:
    for name, check in CHECKS.items():
        if not done.has(20, name):
            continue
        try:
            done.checks[name] = f"right: {check(device)}"
        except NotRun as why:
            done.checks[name] = f"not run: {why}"
        # Whatever it raises: the page says so, and the rest runs.
        except Exception as error:
            done.failed = True
            done.checks[name] = f"WRONG: {type(error).__name__}: {error}"
        print(f"{name}: {done.checks[name]}", flush=True)


def _with_vllm(done: Run, device: torch.device, tiny: bool) -> None:
    """Check and measure the connector in vLLM, in a process for each."""
    if not vllm_names.INSTALLED:
        done.left_out.append(NO_VLLM)
        return
    environment = dict(os.environ)
    if device.type == "cuda":
        # vLLM wants most of the memory, and takes the first GPU that it sees.
        torch.cuda.empty_cache()
        if device.index is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(device.index)

    for part, seconds in {"checks": 60.0, "figures": 120.0}.items():
        if not done.has(seconds if not tiny else 5, f"vLLM, {part}"):
            continue
        # What the part without vLLM measures has time left, too.
        left = (done.until - time.monotonic()) * (1.0 if part == "checks" else 0.6)
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "lines"
            command = [sys.executable, "-m", "research.gpu.with_vllm", part, "--output", output]
            command += ["--seconds", f"{left:.0f}", *(["--tiny"] if tiny else [])]
            try:
                ended = subprocess.run(
                    command, env=environment, timeout=left, capture_output=True, text=True
                )
                problem = "" if ended.returncode == 0 else ended.stderr.strip()[-500:]
            except subprocess.TimeoutExpired:
                problem = f"ended after {left:.0f} s"
            lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
        _take(done, [json.loads(line) for line in lines])
        if problem:
            done.left_out.append(f"vLLM, {part}, the rest: {problem}")


def _take(done: Run, lines: Iterable[list[Any]]) -> None:
    """Note what the part with vLLM has written."""
    for kind, *content in lines:
        print(f"  vLLM, {kind}: {content}", flush=True)
        if kind == "check":
            name, saw = content
            done.checks[name] = saw
            done.failed |= saw.startswith("WRONG")
        elif kind == "row":
            done.tables.setdefault("Time to the first token, vLLM", []).extend(content)
        else:
            done.left_out.append(f"vLLM, {content[0]}")


def _measure(done: Run, device: torch.device, tiny: bool) -> None:
    done.attempt("Memory", lambda: bandwidths(device, 4 << 20 if tiny else 256 << 20))
    shape, dtype = (SMALL, torch.float32) if tiny else (SHAPE_8B, torch.bfloat16)
    if not tiny and torch.cuda.mem_get_info(device)[0] < BYTES_8B:
        layers = shape["num_hidden_layers"] // 4
        done.left_out.append(f"the whole 8B shape: {layers} of its layers fit the GPU's memory")
        shape = shape | {"num_hidden_layers": layers}

    if done.has(20, "Copies of state"):
        tokens = 320 if tiny else 4096
        heading = f"Copies of state, {tokens} tokens of {shape['num_hidden_layers']} layers"
        done.attempt(heading, lambda: state_copies(device, shape, tokens))

    heading = f"Time to the first token, {shape['num_hidden_layers']} layers, transformers"
    if not done.has(90 if not tiny else 5, heading):
        return
    try:
        with FirstTokens(random_llama(shape, device, dtype), device) as first_tokens:
            for number, tokens in lengths_in_time(
                tiny, lambda needed, tokens: done.has(needed, f"{heading}, {tokens} tokens")
            ):
                done.attempt(
                    heading, lambda tokens=tokens, seed=number: first_tokens.rows(tokens, seed)
                )
    except Exception as error:
        done.left_out.append(f"{heading}: {type(error).__name__}: {error}"[:300])


def page(result: dict[str, Any]) -> str:
    """Return the result as a page of Markdown."""
    machine, versions = result["machine"], result["versions"]
    lines = [
        f"# {result['what']}",
        "",
        f"{result['finished']}, {result['seconds']} s; {machine['cpu']}, {machine['cores']} cores; "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        f"    {result['command']}",
        "",
        "Random weights: times are real, answers mean nothing. Checks of the worker side run it "
        "around a small model, without vLLM. vLLM is measured with `--enforce-eager`, one prompt "
        "at a time; a step is one of its engine loop.",
        "",
        "## Right?",
        "",
        "| check | |",
        "|---|---|",
        *(f"| {name} | {saw} |" for name, saw in result["checks"].items()),
        "",
    ]
    for heading, rows in result["figures"].items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        lines += [f"## {heading}", ""]
        if rows:
            lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [
            "| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |"
            for row in rows
        ]
        lines.append("")
    lines += ["## Left out", "", *(f"- {each}" for each in result["left_out"] or ["nothing"]), ""]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
