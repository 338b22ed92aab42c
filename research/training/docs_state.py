"""What a stopped run of docs-lm goes on from: one safetensors file, progress in its header, so both change at once."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn


@dataclass
class State:
    """Steps and seconds spent, curriculum level, running accuracy at that level, questions asked so far."""

    step: int = 0
    seconds: float = 0.0
    level: int = 0
    accuracy: float = 0.0
    questions: int = 0


def save_state(file: Path, state: State, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Written beside `file` and moved over it when complete, so a stop at any time is harmless."""
    tensors = {f"{name}.{k}": v for name, module in modules.items() for k, v in module.named_parameters()}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{k}": v for k, v in values.items()}
    plain = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    partial = file.with_suffix(".partial")
    save_file(plain, partial, {"state": json.dumps(asdict(state))})
    partial.replace(file)


def load_state(file: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> State:
    """Put everything back where it was; returns the progress."""
    tensors = load_file(file)
    with torch.no_grad():
        for name, module in modules.items():
            for key, value in module.named_parameters():
                value.copy_(tensors[f"{name}.{key}"])
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("adam."):
            _, index, key = name.split(".", 2)
            moments.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    with safe_open(file, "pt") as header:
        return State(**json.loads(header.metadata()["state"]))
