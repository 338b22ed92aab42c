"""DejaKV on this machine's GPU, first whether it is right and then how fast; or by arithmetic.

    python -m research.gpu [--device cuda] [--seconds 540] [--tiny] [--output runs/gpu]
    python -m research.gpu --arithmetic [--model llama-3.1-8b] [--tokens 5000] [--gpu h100]
        [--json FILE]

The first needs a GPU, torch, transformers and, for the kernel, Triton. Where vLLM is installed too
it is checked and measured with the connector. It writes a page and a JSON file. It begins nothing
for which the seconds do not suffice, and says what it left out.
The second uses no GPU.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from research.gpu import arithmetic


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns
    -------
    int
        Exit status: 1 if a check failed, 2 if there is no such device.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--arithmetic", action="store_true", help="without a GPU, from counts")
    parser.add_argument("--model", choices=[*arithmetic.SHAPES, "all"], default="all")
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--gpu", choices=list(arithmetic.GPUS), default="h100")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (with --tiny)")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it")
    parser.add_argument("--tiny", action="store_true", help="a small model and short prompts")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    options = parser.parse_args(arguments)
    if options.arithmetic:
        arithmetic.run(options.model, options.tokens, options.gpu, options.json)
        return 0

    refusal = refused(options.device, tiny=options.tiny)
    if refusal:
        print(refusal)
        return 2

    from research.gpu import measure

    return measure.run(options.device, options.seconds, options.output, tiny=options.tiny)


def refused(device: str, *, tiny: bool) -> str:
    """Return why nothing can be measured here; empty if it can."""
    # Arithmetic does without it.
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        return (
            "there is no GPU here that torch can use: nothing was run. --device cpu --tiny tries "
            "the program on a CPU, and --arithmetic computes from counts"
        )
    if not device.startswith("cuda") and not tiny:
        return "without a GPU only --tiny is of use: add it"
    return ""


if __name__ == "__main__":
    sys.exit(main())
