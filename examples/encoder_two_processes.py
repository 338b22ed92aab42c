"""One process encodes pictures, another answers about them and never runs its vision tower.

The encoder's outputs travel through a folder. On /dev/shm that folder is shared memory; on a disk
it also outlives both.

    python examples/encoder_two_processes.py
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from dejakv.encoder_cache import VisualKVCache
from dejakv.engines.transformers import TransformersEngine
from dejakv.request import Request
from dejakv_models.shapes import ShapesDataset, prompt


def encode(folder: Path, questions: int) -> None:
    """The encoder process: tower and projector, no answers."""
    with VisualKVCache(disk=folder) as cache:
        engine = TransformersEngine.from_pretrained("shapes-vlm", encoder_cache=cache)
        pictures = {
            media.digest: media
            for sample in ShapesDataset(samples=questions)
            for media in sample.media
        }
        for media in pictures.values():
            engine.embed_image(media)
        cache.flush()
        print(
            f"encoder process: {cache.stats().entries} pictures encoded, {cache.stats().bytes:,} "
            f"bytes",
            flush=True,
        )


def answer(folder: Path, questions: int) -> None:
    """The reader: waits for each picture's output and starts the language model from it."""
    with VisualKVCache(disk=folder) as cache:
        engine = TransformersEngine.from_pretrained("shapes-vlm", encoder_cache=cache)
        view = cache.view(engine.vision.epoch)
        runs = right = 0
        for sample in ShapesDataset(samples=questions):
            for media in sample.media:
                if view.wait_for(media.digest, timeout_s=120) is None:
                    sys.exit("the encoder process did not deliver a picture within two minutes")
            request = Request(sample.id, prompt(sample.question), sample.question, sample.media)
            completion = engine.run(engine.prepare(request))
            runs += completion.encoder_runs
            right += completion.text.strip() == sample.answer
        stats = cache.stats()
        print(
            f"reader process: {questions} questions, {right} right, {runs} encoder runs, "
            f"{stats.disk_hits} from the folder"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="One process encodes pictures, another answers questions about them."
    )
    parser.add_argument(
        "--role", choices=["encode", "answer"], help="what one of the two processes does"
    )
    parser.add_argument(
        "--folder", type=Path, help="where outputs travel (default: a temporary folder in memory)"
    )
    parser.add_argument("--questions", type=int, default=12)
    given = parser.parse_args()
    if given.role:
        {"encode": encode, "answer": answer}[given.role](given.folder, given.questions)
        return
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=shared_memory if shared_memory.is_dir() else None
    ) as temporary:
        folder = given.folder or Path(temporary) / "encoder-outputs"
        command = [
            sys.executable,
            __file__,
            "--folder",
            str(folder),
            "--questions",
            str(given.questions),
            "--role",
        ]
        processes = [subprocess.Popen([*command, role]) for role in ("answer", "encode")]
        codes = [process.wait() for process in processes]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
