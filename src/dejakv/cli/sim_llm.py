"""`dejakv sim-llm`: top-layer reuse between similar tasks, shown on the documents task."""

from typing import Annotated

import typer


def sim_llm_command(
    demo: Annotated[str, typer.Option("--demo", "--demo-mode", help="basic, similarity or benchmark.")] = "basic",
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "--model-path",
            help="A layer-condensed model: name from `dejakv models`, local folder or hub id.",
        ),
    ] = "docs-lckv",
    similarity_threshold: Annotated[float, typer.Option(help="Least cosine of a task that is reused, -1 to 1.")] = 0.8,
    max_cache_size: Annotated[int, typer.Option(help="Tasks that are kept.")] = 100,
    num_hyperplanes: Annotated[int, typer.Option(help="Planes of the hash, 1 to 62.")] = 16,
    similarity: Annotated[str, typer.Option(help="What is compared: mean or position.")] = "mean",
    matching: Annotated[
        str, typer.Option(help="Rows taken: map (equal text, the rest is computed) or position (as in Sim-LLM).")
    ] = "map",
    tail: Annotated[int, typer.Option(help="Last prompt tokens that are always computed.")] = 32,
    cases: Annotated[int, typer.Option(help="Documents, or questions about each.")] = 4,
    facts: Annotated[int, typer.Option(help="Facts in a document, about 9 tokens each.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the documents.")] = 0,
    unsound: Annotated[
        bool, typer.Option("--unsound", help="Allow an ordinary model, for study; its outputs are labelled.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Let tasks take the top layer's KV of similar earlier tasks, and print what was reused and whether it was right."""
    from dejakv.sim_llm import SimLLMInference
    from dejakv.sim_llm.demos import demo as lines

    settings = {"similarity": similarity, "matching": matching, "tail": tail, "unsound": unsound}
    inference = SimLLMInference.from_pretrained(
        model, max_cache_size, similarity_threshold, num_hyperplanes, device, **settings
    )
    for line in lines(demo, inference, cases, facts, seed):
        typer.echo(line)
