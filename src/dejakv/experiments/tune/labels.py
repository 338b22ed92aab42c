"""What the right answer of a prompt is: from the log, or from a model that answers each different prompt once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.engines.open import open_templates
from dejakv.errors import InputError
from dejakv.experiments.prompting import Prompter
from dejakv.experiments.run import opened
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.watch import Watch
from dejakv.pipeline import Pipeline
from dejakv.request import Sampling


def labelled_by(
    model: str, samples: Sequence[Sample], watch: Watch, *, max_new_tokens: int = 16, raw_prompts: bool = False
) -> list[Sample]:
    """The samples with the model's greedy answers, computed in full, as their right ones; None where it cannot read the prompt.

    Raises: ModelError for a model that cannot be loaded.
    """
    settings = RunSettings(model=model)
    watch.stage(f"loading {model}")
    with opened(settings) as engine:
        prompter = Prompter(open_templates(settings), raw=raw_prompts)
        pipeline = Pipeline(engine)
        sampling = Sampling(max_new_tokens)
        known: dict[str, str | None] = {}
        labelled: list[Sample] = []
        watch.stage(f"{model} answers the prompts")
        for number, sample in enumerate(samples, 1):
            request: Any = prompter.request(sample, sampling)
            if request.prompt not in known:
                try:
                    known[request.prompt] = pipeline.answer(request).text
                except InputError:  # too long for this model
                    known[request.prompt] = None
            labelled.append(replace(sample, answer=known[request.prompt]))
            watch.sample(number, len(samples), None)
    return labelled
