"""Token-level reuse between similar prompts: a donor and a rewritten target, side by side.

    python examples/semsharekv.py
    python examples/semsharekv.py --model path/or/hub/id --donor "..." --target "..."

The donor is computed once and kept. The target finds it by its pooled embedding, takes its state
token by token, computes only what changed (and the rest of those sentences, and the question), and
answers. Full computation runs beside it.
"""

import argparse

from dejakv.blend.settings import BlendConfig
from dejakv.engines.base import Completion
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.prototypes.token_store import LRUCacheStore, make_item
from dejakv.request import Request, Sampling
from dejakv.vectors.base import normalized

DONOR = (
    "<s> Ann lives in Rome. Bob works as a baker. The pet of Cleo is a duck. Dora drives a green "
    "car. The weather was mild all "
    "week. Finn plays the piano. Greta likes to eat soup. Hugo was given room 12. Iris lives in "
    "Oslo. <q> Where does Bob work? <a>"
)
TARGET = (
    DONOR.replace("Rome", "Tokyo")
    .replace("room 12", "room 20")
    .replace("Where does Bob work?", "What city does Ann live in?")
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", "--model_dir", "--model-dir", default="docs-lm")
    parser.add_argument("--donor", default=DONOR)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--threshold", type=float, default=0.8)
    given = parser.parse_args(arguments)

    engine = TransformersEngine.from_pretrained(given.model)
    sampling = Sampling(max_new_tokens=1 if given.model == "docs-lm" else 80)
    store = LRUCacheStore(max_items=64)

    donor = engine.prepare(Request("donor", given.donor, given.donor, sampling=sampling))
    computed = engine.full(donor)
    state = computed.capture()
    assert state is not None, "this model's state cannot be captured"
    key = store.put(make_item(engine, donor, state))
    print(f"donor {key}: {len(donor.token_ids)} tokens computed, answer {computed.text!r}")

    target = engine.prepare(Request("target", given.target, given.target, sampling=sampling))
    wanted = normalized(engine.embed_tokens(target.token_ids).mean(0))
    item = max(store.items(), key=lambda item: float(item.embedding @ wanted))
    similarity = float(item.embedding @ wanted)
    if similarity < given.threshold:
        print(
            f"no prompt is as similar as {given.threshold}: computed in full, answer "
            f"{engine.full(target).text!r}"
        )
        return
    config = BlendConfig(selector="similarity", share=0.0)
    full = engine.full(target)
    blended = engine.blend(target, [item.stored_state], config)
    blended = (
        blended if isinstance(blended, Completion) else full
    )  # it is refused where too little is alike
    print(f"target: similarity {similarity:.3f} to {item.key}")
    print(
        f"  blended: {blended.computed_tokens} of {blended.prompt_tokens} tokens computed, "
        f"answer {blended.text!r}"
    )
    print(
        f"  in full: {full.computed_tokens} of {full.prompt_tokens} tokens computed, answer "
        f"{full.text!r}"
    )


if __name__ == "__main__":
    main()
