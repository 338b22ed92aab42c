"""Actors of Ray that share one store: what one has computed, the next one reuses.

python examples/ray_actors.py --store /shared/cache          # or s3://BUCKET/PREFIX
"""

import argparse
import tempfile
from contextlib import ExitStack

import ray

import dejakv
from dejakv.models import load
from dejakv.records import Record

PROMPT = "<s> Ann lives in Paris. Bob lives in Rome. <q> Where does Bob live? <a>"


@ray.remote(num_cpus=1)
class Answerer:
    """A model with the cache attached for as long as the actor lives."""

    def __init__(self, store: str) -> None:
        self._model, self._tokenizer = load("docs-lm")
        self._records = list[Record]()
        config = dejakv.SemanticCacheConfig(store=store)
        attached = dejakv.attach(
            self._model, self._tokenizer, config, on_record=self._records.append
        )
        self._open = ExitStack()
        self._cache = self._open.enter_context(attached)

    def answer(self, prompt: str) -> tuple[str, int, int]:
        inputs = self._tokenizer(prompt, return_tensors="pt")
        tokens = self._model.generate(**inputs, max_new_tokens=4)
        text = self._tokenizer.decode(
            tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        record = self._records.pop()
        return text.strip(), record.computed_tokens, record.prompt_tokens

    def close(self) -> None:
        """Write what is not yet stored: an actor that is killed has no time for it."""
        self._open.close()


def main(store: str) -> None:
    for name in ("first", "second"):
        actor = Answerer.remote(store)
        text, computed, tokens = ray.get(actor.answer.remote(PROMPT))
        print(f"{name} actor: {text}, {computed} of {tokens} tokens computed")
        ray.get(actor.close.remote())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", help="a folder that all nodes see, or a bucket")
    given = parser.parse_args()
    if not ray.is_initialized():
        ray.init()
    with tempfile.TemporaryDirectory() as folder:
        main(given.store or folder)
