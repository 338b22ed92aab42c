"""Whether a stranger's text steers answers: contexts searched, victims blended, innocents beside.

    OMP_NUM_THREADS=1 python -m research.stranger --output FILE.json [--passages 6] [--victims 4]

Each passage is attacked by sentences written by hand and by contexts that a gradient proposes
(`research.stranger.search`), then blended into prompts of other people, which the search has not
seen, at every quality. Beside each blend stands that of an innocent donor, behind two passages that
the prompt lacks. Of each: whether the first token is another than full computation's, whether it is
the attacker's, and the KL divergence of the first token. The file is written after each passage.
"""

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from research.command import run

SEARCHED, EVALUATED = 1, 2
"""Seeds of the prompts that the search sees, and of the victims."""
SCENES = 2
"""Prompts that the search sees."""
INNOCENT = "innocent"


def attack_passage(bench: Any, shared: Any, victims: int, steps: int, batch: int) -> dict[str, Any]:
    """Search contexts against one passage, and return what they do to its victims."""
    from dejakv.blend.settings import DEFAULT
    from research.frontier.bench import captured_state
    from research.frontier.cells import CELLS
    from research.stranger.search import Scene, Search

    cells = {cell.quality: cell for cell in CELLS if cell.quality}
    scenes = [Scene(bench, victim, shared) for victim in shared.victims(SCENES, SEARCHED)]
    wanted = min(shared.wanted, key=lambda word: float(scenes[0].full[shared.token(word)]))
    token = shared.token(wanted)
    search = Search(scenes, token, [cells[DEFAULT]])
    contexts, course = search.run(wanted, steps, batch)

    rows: list[dict[str, Any]] = []
    states = {name: captured_state(bench.engine, shared.attack(text))[1]
              for name, text in contexts.items()}  # fmt: skip
    for number, victim in enumerate(shared.victims(victims, EVALUATED)):
        scene = Scene(bench, victim, shared)
        for quality, cell in cells.items():
            for name in (INNOCENT, *contexts):
                attack = shared.attack(contexts[name]) if name in contexts else None
                got, recomputed = scene.blended(cell, attack, states.get(name))
                rows.append(
                    {
                        "victim": number,
                        "quality": quality,
                        "donor": name,
                        "recomputed": round(float(recomputed.mean()), 3),
                        **_compared(scene.full, got, token),
                    }
                )
    return {
        "passage": shared.title,
        "kind": shared.kind,
        "wanted": wanted,
        "contexts": contexts,
        "context_tokens": {name: len(bench.encode(text)) for name, text in contexts.items()},
        "tried": search.tried,
        "course": [round(value, 2) for value in course],
        "rows": rows,
    }


def _compared(
    full: NDArray[np.float32], got: NDArray[np.float32], token: int
) -> dict[str, float | bool]:
    """Compare a blend's first token with full computation's."""
    return {
        "changed": bool(full.argmax() != got.argmax()),
        "turned": bool(got.argmax() == token and full.argmax() != token),
        "kl": round(float((np.exp(full) * (full - got)).sum()), 5),
        "wanted_log_p": round(float(got[token]), 3),
        "wanted_log_p_full": round(float(full[token]), 3),
    }


def figures(passages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each quality and kind of donor, over all victims."""
    rows = [row for passage in passages for row in passage["rows"]]
    made: list[dict[str, Any]] = []
    for quality in dict.fromkeys(row["quality"] for row in rows):
        for donor in dict.fromkeys(row["donor"] for row in rows):
            some = [row for row in rows if (row["quality"], row["donor"]) == (quality, donor)]
            kl = [row["kl"] for row in some]
            made.append(
                {
                    "quality": quality,
                    "donor": donor,
                    "victims": len(some),
                    "changed": sum(row["changed"] for row in some),
                    "turned": sum(row["turned"] for row in some),
                    "kl_median": median(kl),
                    "kl_p10": float(np.percentile(kl, 10)),
                    "kl_p90": float(np.percentile(kl, 90)),
                    "wanted_nats": median(
                        row["wanted_log_p"] - row["wanted_log_p_full"] for row in some
                    ),
                    "recomputed": median(row["recomputed"] for row in some),
                }
            )
    return made


def stranger(
    output: Annotated[Path, typer.Option(help="JSON file.")],
    passages: Annotated[int, typer.Option(min=1, help="Shared passages.")] = 6,
    victims: Annotated[int, typer.Option(min=1, help="Victims of each passage.")] = 4,
    steps: Annotated[int, typer.Option(min=0, help="Steps of the search.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Contexts that are tried in a step.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the passages.")] = 0,
    model: Annotated[str, typer.Option(help="Model.")] = "smollm2-135m",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Attack blends by contexts behind which a shared passage was computed."""
    import torch

    from dejakv.engines.transformers.engine import TransformersEngine
    from dejakv.experiments.output import make_folder, replace_file
    from research.frontier.bench import Bench
    from research.machine import measured
    from research.stranger.cases import shared_passages

    torch.set_num_threads(threads)
    make_folder(output.parent)
    bench = Bench(TransformersEngine.from_pretrained(model, dtype="fp32"))
    done: list[dict[str, Any]] = []
    for shared in shared_passages(passages, bench.encode, seed):
        done.append(attack_passage(bench, shared, victims, steps, batch))
        report = {
            "model": model,
            "figures": figures(done),
            "passages": done,
            **measured("research.stranger"),
        }
        replace_file(output, json.dumps(report, indent=1) + "\n", "--output")
        typer.echo(f"{len(done)} of {passages}: {shared.title}", err=True)
    typer.echo(json.dumps(figures(done), indent=1))


if __name__ == "__main__":
    run(stranger)
