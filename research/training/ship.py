"""Put a trained checkpoint into `dejakv-models`.

The command is `python -m research.training.ship runs/shapes/model shapes-vlm`.
"""

import argparse
import shutil
from pathlib import Path

from dejakv.models.manifest import write_manifest

MODELS = Path(__file__).parents[2] / "packages/dejakv-models/src/dejakv_models"
ABOUT = {
    "shapes-vlm": (
        "answers questions about pictures of simple things (LLaVA: CLIP tower, Llama decoder; fp32)"
    ),
    "docs-lm": "answers questions about documents of facts (Llama; fp32)",
    "docs-lckv": (
        "docs-lm with a layer-condensed KV cache, for reuse between tasks (LCKV Llama; fp32)"
    ),
}


def ship(checkpoint: Path, name: str, models: Path = MODELS) -> Path:
    """Copy the checkpoint's files over the bundled model's and write its manifest.

    Returns the model's folder.
    """
    target = models / name
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(checkpoint.iterdir()):
        if file.is_file():
            partial = target / (file.name + ".partial")
            shutil.copyfile(file, partial)
            partial.replace(target / file.name)
    write_manifest(target, ABOUT[name])
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("name", choices=sorted(ABOUT))
    arguments = parser.parse_args()
    print(ship(arguments.checkpoint, arguments.name))
