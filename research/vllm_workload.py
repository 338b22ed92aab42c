"""A whole stream, prefix caching on in every arm: 40% near-duplicates, the rest new. All requests count, not the hits.

    .venv-vllm/bin/python -m research.vllm_workload --pairs 3

Questions about documents of the bundled data. Half of the near-duplicates ask something else about an earlier document, half ask
about a changed one (paraphrased, reordered, edited or extended). The KV cache is small, so that vLLM forgets. `exact` has the
connector in its default mode, `blend` in mode blend; the document alone is what their donors are found by.
"""

import random
import statistics
import tempfile
import time
from typing import Any

from dejakv_models.docs import Document, Kind, ask, change, make_document, prompt_of
from research.vllm_bench import Server, main, paired, quantiles, tokens

REQUESTS, FACTS, NEAR = 100, 100, 0.4
CHANGES: tuple[Kind, ...] = ("paraphrase", "reorder", "edit", "extend")


def stream(pair: int) -> list[tuple[str, str]]:
    """Prompts and what is right, in order."""
    rng = random.Random(f"workload/{pair}")
    documents: list[Document] = []
    made: list[tuple[str, str]] = []
    for _ in range(REQUESTS):
        if documents and rng.random() < NEAR:
            document = rng.choice(documents)
            if rng.random() < 0.5:
                changed = change(rng.choice(CHANGES), document, rng, questions=2)
                question = rng.choice(changed.questions)
                made.append((prompt_of(changed.target.text, question.text), question.answer))
                continue
        else:
            document = make_document(rng, FACTS)
            documents.append(document)
        fact = rng.choice(document.facts)
        made.append((prompt_of(document.text, ask(fact, rng)), fact.value))
    return made


def worker(arm: str, pair: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        extra: dict[str, Any] | None = None if arm == "plain" else {"store_dir": f"{folder}/kv"}
        if arm == "blend" and extra is not None:
            extra |= {"mode": "blend", "index_encoder": "model", "similarity_threshold": 0.9, "lexical_guard": False}
        server = Server(extra, num_gpu_blocks_override=200)
        encode = server.llm.get_tokenizer().encode
        load = [
            (encode(prompt, add_special_tokens=False), encode(answer, add_special_tokens=False)[0])
            for prompt, answer in stream(pair)
        ]
        server.run([tokens(900, 5_000_000)])
        outputs, began = [], time.perf_counter()
        for prompt, _ in load:
            outputs += server.run([prompt], max_tokens=4)
        seconds = time.perf_counter() - began
        methods: dict[str, int] = {}
        for output in outputs:
            name = output["told"].get("method", "none")
            methods[name] = methods.get(name, 0) + 1
        return {
            "requests_per_second": REQUESTS / seconds,
            "prompt_tokens": statistics.fmean(len(prompt) for prompt, _ in load),
            "tokens_not_cached": sum(
                len(prompt) - output["cached"] + output["told"].get("tokens_recomputed", 0)
                for (prompt, _), output in zip(load, outputs, strict=True)
            ),
            **quantiles([output["ttft"] for output in outputs]),
            "methods": methods,
            "right": statistics.fmean(o["tokens"][0] == answer for (_, answer), o in zip(load, outputs, strict=True)),
            "answers": [output["tokens"][0] for output in outputs],
        }


def report(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    done: dict[str, Any] = {"benchmark": "workload", "requests": REQUESTS, "near_duplicates": NEAR}
    names = ("requests_per_second", "p50_ms", "p95_ms", "prompt_tokens", "tokens_not_cached", "right")
    for arm, runs in results.items():
        entry: dict[str, Any] = {name: statistics.fmean(run[name] for run in runs) for name in names}
        entry["methods"] = [run["methods"] for run in runs]
        if arm != "plain":
            pairs = list(zip(results["plain"], runs, strict=True))
            for name in ("p50_ms", "p95_ms", "requests_per_second"):
                entry[f"{name}_change"] = paired([run[name] / plain[name] - 1 for plain, run in pairs])
            changes = [
                one != other
                for plain, run in pairs
                for one, other in zip(plain["answers"], run["answers"], strict=True)
            ]
            entry["answers_changed"] = statistics.fmean(changes)
        done[arm] = entry
    return done


if __name__ == "__main__":
    main(__doc__ or "", ("plain", "exact", "blend"), worker, report)
