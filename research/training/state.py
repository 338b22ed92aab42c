"""What a stopped run goes on from: one file, so that all in it is of the same step. Batches need no state."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch


def save(file: Path, progress: Any, **parts: Any) -> None:
    """Write a dataclass of plain values and the `state_dict` of each part. An older file is replaced once the new one is complete."""
    partial = file.with_suffix(".partial")
    torch.save({"progress": asdict(progress), **{name: part.state_dict() for name, part in parts.items()}}, partial)
    partial.replace(file)


def load(file: Path, **parts: Any) -> dict[str, Any]:
    """Put the parts back where they were; returns the values of the progress."""
    found = torch.load(file, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(found[name])
    return found["progress"]
