"""A task takes the top layer's KV of a similar earlier one, in a model made for it.

    python examples/sim_llm.py

The second prompt states one fact differently: its rows and the question are computed, all others come from the first task.
An ordinary model is refused, with the reason.
"""

from dejakv.errors import ModelError
from dejakv.sim_llm import SimLLMInference

DOCUMENT = (
    "Ann lives in Rome. Bob works as a baker. The pet of Cleo is a duck. Dora drives a green car. The weather was mild all "
    "week. Finn plays the piano. Greta likes to eat soup. Hugo was given room 12. Iris lives in Oslo."
)


def prompt(document: str, question: str) -> str:
    """As docs-lckv reads it."""
    return f"<s> {document} <q> {question} <a>"


def main() -> None:
    inference = SimLLMInference.from_pretrained("docs-lckv", similarity_threshold=0.8, tail=12)
    asked = [
        (DOCUMENT, "What is the job of Bob?"),
        (DOCUMENT.replace("Rome", "Tokyo"), "What city does Ann live in?"),
    ]
    for document, question in asked:
        answer = inference.generate(prompt(document, question), max_new_tokens=4)
        result = answer.result
        source = f"state of task {result.donor}" if answer.reused else "computed"
        print(f"{question} {answer} ({source}; {result.computed} of {result.prompt_tokens} rows computed)")
    print(inference.get_statistics())
    try:
        SimLLMInference.from_pretrained("docs-lm")
    except ModelError as refused:
        print(f"docs-lm: {refused}")


if __name__ == "__main__":
    main()
