"""Whether another vLLM has what `dejakv.engines.vllm.upstream` lists, read from its source."""

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer
from research.command import run
from research.upstream.source import PackageSource, SourceError, compare_use

from dejakv.engines.vllm.upstream import USES


def compare_upstream(
    source: Annotated[Path, typer.Argument(help="A wheel of vLLM, or the folder above vllm/.")],
    against: Annotated[
        Path | None, typer.Option(help="vLLM to compare with, by default this environment's.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="A JSON file for the result.")] = None,
) -> None:
    """Print what DejaKV uses of vLLM and SOURCE lacks, or has with another signature.

    Nothing is imported or installed, so neither a GPU nor a matching torch is needed. The exit code
    is 1 where a use of exact reuse differs.
    """
    other, known = PackageSource(source), PackageSource(against or _installed())
    uses = [use for use in USES if use.where.startswith("vllm")]
    comparisons = [compare_use(use, other, known) for use in uses]
    differing = [comparison for comparison in comparisons if comparison.problems]

    for comparison in differing:
        for name, problem in comparison.problems.items():
            typer.echo(
                f"{comparison.feature}: {comparison.where} {name}: {problem} ({comparison.breaks})"
            )
    typer.echo(
        f"vLLM {other.version} beside {known.version}: {len(differing)} of {len(uses)} uses differ"
    )

    if output:
        content = {
            "version": other.version,
            "against": known.version,
            "uses": len(uses),
            "differing": [vars(comparison) for comparison in differing],
        }
        output.write_text(json.dumps(content, indent=1) + "\n")
    if any(comparison.feature == "exact" for comparison in differing):
        raise typer.Exit(1)


def _installed() -> Path:
    """Return the folder with this environment's vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SourceError("no vLLM is installed here: name one with --against")
    return Path(spec.origin).parents[1]


if __name__ == "__main__":
    run(compare_upstream)
