"""A method of reuse of your own: the stored answer of a very similar prompt; no model runs.

python examples/own_method.py
"""

from collections.abc import Iterator
from typing import Any

from dejakv import Pipeline, Request, Sampling, SemanticCacheConfig, TransformersEngine, build_cache
from dejakv.decide.method import PlanInputs, ReuseMethod
from dejakv.decide.plan import Plan
from dejakv.engines.base import Completion, Refusal


class NearestPlan(Plan):
    """Its class gives a plan the name of its method, as records have it."""

    method = "nearest_answer"


class NearestAnswer(ReuseMethod):
    """Plans cost nothing. Answers are labelled as approximate, and nothing is stored of them."""

    name = "nearest_answer"

    def plans(self, inputs: PlanInputs) -> Iterator[Plan]:
        donor, match = inputs.donor_search.donors[0], inputs.donor_search.match
        if donor.answer is not None and match is not None and match.score >= 0.9:
            yield NearestPlan((donor,), match, inputs.tokens, seconds=inputs.no_seconds)

    def declined(self, inputs: PlanInputs) -> str:
        return "nearest_answer: no prompt is similar enough"

    def run(
        self, engine: Any, prepared: Any, plan: Plan, store: Any, *, on_token: Any = None
    ) -> Completion | Refusal:
        answer = plan.donors[0].answer
        if answer is None:
            return Refusal("the donor's answer has left the store")  # the next plan runs
        return Completion(answer, (), len(prepared.token_ids), computed_tokens=0)


def main() -> None:
    NearestAnswer().register()  # a package has an entry point of the group dejakv.methods
    engine = TransformersEngine.from_pretrained("docs-lm")
    config = SemanticCacheConfig(
        reuse="nearest_answer", index_encoder="model", similarity_threshold=0.5, min_gain=1
    )
    cache = build_cache(config, engine, background=False)
    pipeline = Pipeline(engine, cache)
    document = "<s> Ann lives in Rome. Bob works as a baker."
    for number, question in enumerate(
        ("Where does Ann live?", "Where does the Ann live?", "Where does Bob live?")
    ):
        prompt = f"{document} <q> {question} <a>"
        answer = pipeline.answer(Request(str(number), prompt, prompt, sampling=Sampling(4)))
        record = answer.record
        print(
            f"{record.method:15} {record.computed_tokens:3} of {record.prompt_tokens} tokens"
            f"  {question} {answer.text!r}  {record.reason}"
        )
    cache.close()


if __name__ == "__main__":
    main()
