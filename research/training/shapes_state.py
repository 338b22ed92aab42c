"""What a run needs to go on after a stop: tensors in one safetensors file, the rest in JSON. Batches need no state."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from research.training.shapes_learner import Average


@dataclass
class Progress:
    """How far a run is: steps and seconds spent, curriculum level, running accuracy of the training answers (all, and
    by kind of question)."""

    step: int = 0
    seconds: float = 0.0
    level: int = 0
    accuracy: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict[str, float])


def save(
    folder: Path, progress: Progress, model: nn.Module, heads: nn.Module, average: Average, optimizer: torch.optim.AdamW
) -> None:
    """Write the state; an older one is replaced only when the new one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{k}": v for k, v in model.named_parameters()}
    tensors |= {f"heads.{k}": v for k, v in heads.named_parameters()}
    tensors |= {f"average.{k}": v for k, v in average.weights.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{k}": v for k, v in state.items()}
    partial = folder / "tensors.partial"
    metadata = {"progress": json.dumps(asdict(progress))}
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, str(partial), metadata)
    partial.replace(folder / "tensors.safetensors")
    (folder / "progress.json").write_text(json.dumps(asdict(progress)) + "\n")


def load(folder: Path, model: nn.Module, heads: nn.Module, average: Average, optimizer: torch.optim.AdamW) -> Progress:
    """Put the saved state back; returns the progress."""
    tensors = load_file(str(folder / "tensors.safetensors"))
    with torch.no_grad():
        for prefix, module in (("model.", model), ("heads.", heads)):
            for name, value in module.named_parameters():
                if prefix + name in tensors or module is model:  # a head that is new since then starts afresh
                    value.copy_(tensors[prefix + name])
        for name, value in average.weights.items():
            value.copy_(tensors[f"average.{name}"])
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("adam."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return Progress(**json.loads((folder / "progress.json").read_text()))
