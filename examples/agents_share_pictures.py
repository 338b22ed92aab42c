"""Several agents ask about the same pictures at once: each picture is encoded once.

python examples/agents_share_pictures.py --agents 4 --pictures 3
"""

import argparse
import threading
import time
from collections.abc import Callable

from dejakv.datasets.base import Sample
from dejakv.encoder_cache import VisualKVCache
from dejakv.engines.transformers import TransformersEngine
from dejakv.request import Request
from dejakv_models.shapes import ShapesDataset, prompt


def ask_all(engine: TransformersEngine, agents: list[list[Sample]]) -> tuple[float, int, list[str]]:
    """Every agent in a thread of its own.

    Returns seconds, encoder runs, and the answers by question.
    """
    answers: dict[str, str] = {}
    runs: list[int] = []

    def agent(samples: list[Sample]) -> None:
        for sample in samples:
            completion = engine.run(
                engine.prepare(Request(sample.id, prompt(sample.question), "", sample.media))
            )
            answers[sample.id] = completion.text
            runs.append(completion.encoder_runs)

    started = time.perf_counter()
    in_threads([lambda samples=samples: agent(samples) for samples in agents])
    return time.perf_counter() - started, sum(runs), [answers[key] for key in sorted(answers)]


def in_threads(tasks: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Several agents ask about the same pictures at once."
    )
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--pictures", type=int, default=3)
    parser.add_argument("--questions", type=int, default=6, help="of each agent")
    given = parser.parse_args()

    cache = VisualKVCache(max_vram_bytes=64 * 1024**2)
    engine = TransformersEngine.from_pretrained("shapes-vlm", encoder_cache=cache)
    samples = list(ShapesDataset(samples=given.agents * given.questions, images=given.pictures))
    agents = [samples[number :: given.agents] for number in range(given.agents)]

    without_s, without_runs, without = ask_all(engine.for_arm("none"), agents)
    cache.clear()
    with_s, with_runs, answers = ask_all(engine, agents)
    pictures = len({media.digest for sample in samples for media in sample.media})
    print(f"{given.agents} agents, {len(samples)} questions, {pictures} distinct pictures")
    print(
        f"without the cache: {without_runs} encoder runs, {len(samples) / without_s:.1f} requests/s"
    )
    print(f"with the cache:    {with_runs} encoder runs, {len(samples) / with_s:.1f} requests/s")
    print(
        "answers that differ:"
        f" {sum(left != right for left, right in zip(without, answers, strict=True))}"
    )
    for name, value in cache.get_cache_stats().items():
        print(f"  {name} = {value}")
    print(f"for vLLM: {cache.dp_mode(batch_image_count=given.agents, image_resolution=(64, 64))}")


if __name__ == "__main__":
    main()
