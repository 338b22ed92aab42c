"""How often greedy answers differ though nothing is approximate: between two full computations, under vLLM's prefix caching, and under
exact hits of the connector.

    .venv-vllm/bin/python benchmarks/vllm_rounding.py --output rounding.json

Real text: documentation of Python's standard library, 80 to 450 tokens, and 24 tokens of each answer. `again`: a second time in
full, alone as the first; `beside others`: in full, in a step with seven more; `vLLM's prefix caching` and `exact hit`: from the state of the first.
In each of `--dtypes`, which SmolLM2 is told to compute in.
"""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import vllm_bench
from transformers import AutoTokenizer
from vllm_bench import Server, arguments, publish, result_in
from vllm_models import SMOLLM2, folder_of

COUNT = 24
ANSWER = 24
LENGTHS = (80, 120, 180, 250, 350, 450)
OFF = {"mode": "off", "no_store": True}


def prompts() -> list[list[int]]:
    from dejakv.datasets.rag_docs import docs_corpus

    passages = [passage.text for passage in docs_corpus().passages]
    tokenizer = AutoTokenizer.from_pretrained(str(folder_of(vllm_bench.MODEL)))
    made = []
    for number in range(COUNT):
        start = 7 * number % len(passages)
        text = "\n\n".join([*passages[start:], *passages[:start]][:25])
        made.append(tokenizer(text)["input_ids"][: LENGTHS[number % len(LENGTHS)]])
    return made


def worker(dtype: str) -> dict[str, int]:
    """Answers that differ from those of the first computation, of `COUNT`."""
    given = prompts()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = Server({"store_dir": f"{folder}/kv"}, dtype=dtype)

        def answers(wish: dict[str, Any], *, together: int = 1) -> list[list[int]]:
            found: list[list[int]] = []
            for place in range(0, COUNT, together):
                server.forget_prefixes()
                asked = given[place : place + together]
                for prompt, entry in zip(asked, server.run(asked, ANSWER, wish), strict=True):
                    assert (entry["told"]["method"] == "exact") == (entry["cached"] >= len(prompt) - 32), entry
                    found.append(entry["tokens"])
            return found

        first = answers({"mode": "exact"})
        server.settle()
        ways: dict[str, list[list[int]]] = {"again": [], "vLLM's prefix caching": []}
        for prompt in given:
            server.forget_prefixes()
            (full,), (hit,) = server.run([prompt], ANSWER, OFF), server.run([prompt], ANSWER, OFF)
            assert full["cached"] == 0, full
            assert hit["cached"] >= len(prompt) - 32, hit
            ways["again"].append(full["tokens"])
            ways["vLLM's prefix caching"].append(hit["tokens"])
        ways["beside others"] = answers(OFF, together=8)
        ways["exact hit"] = answers({"mode": "exact"})
        return {
            name: sum(one != other for one, other in zip(first, found, strict=True)) for name, found in ways.items()
        }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(model=SMOLLM2)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    given = vllm_bench.parsed(parser)
    if given.arm:
        print("RESULT " + json.dumps(worker(given.arm)))
        return
    found: dict[str, Any] = {}
    for dtype in given.dtypes:
        command, environment = vllm_bench.command_of(dtype, given)
        done = subprocess.run([*command], env=environment, stdout=subprocess.PIPE, text=True)
        found[dtype] = result_in(done.stdout.splitlines())
        if found[dtype] is None:
            sys.exit(f"{dtype} did not finish")
    publish(given, {"benchmark": "rounding", "prompts": COUNT, "answer_tokens": ANSWER, "answers_that_differ": found})


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
