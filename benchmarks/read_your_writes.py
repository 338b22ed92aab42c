"""The same prompt again as soon as its answer is there: the share of such repeats that hit, and of prompts that go on where one ended.

    python -m benchmarks.read_your_writes --output read_your_writes.json
    .venv-vllm/bin/python benchmarks/read_your_writes.py --arm vllm     one engine alone, in its own environment

Real text: documentation of Python's standard library, cut to lengths from 100 to 1,300 tokens; no two prompts begin alike. Each arm
runs in a process of its own: `attach` and `pipeline` over a folder with its memory tier, `server` as `dejakv serve` with a client
over HTTP, `vllm` with the connector and without vLLM's own prefix caching, which would answer in its place. Nobody waits between
two requests. A prompt hits where at most 32 of the tokens that it has in common with the one before are computed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

ARMS = ("attach", "pipeline", "server", "vllm")
MODEL = "smollm2-135m"
LENGTHS = (100, 200, 350, 550, 800, 1_050, 1_300)
MORE = 60
"""Tokens by which a prompt goes on."""
SLACK = 32
"""Tokens that may be computed of a prompt that hits: a block."""
ANSWER = 8
"""Tokens of an answer."""
VLLM = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"

Ask = Callable[[str], int]
"""Answers a prompt; how many of its tokens were computed."""
Tokens = Callable[[str], list[int]]


def texts(tokenizer: Any, count: int) -> list[tuple[str, str]]:
    """Prompts, each with the longer one that goes on from it."""
    from dejakv.datasets.rag_docs import docs_corpus

    passages = [passage.text for passage in docs_corpus().passages]
    made: list[tuple[str, str]] = []
    for number in range(count):
        start = 7 * number % len(passages)
        ids = tokenizer("\n\n".join([*passages[start:], *passages[:start]][:25]))["input_ids"]
        length = LENGTHS[number % len(LENGTHS)]
        made.append((tokenizer.decode(ids[:length]), tokenizer.decode(ids[: length + MORE])))
    return made


def measured(ask: Ask, tokens: Tokens, prompts: list[tuple[str, str]]) -> dict[str, Any]:
    """Half of the prompts come twice, the others go on, in turns; the first ones warm up."""
    ask("What this model computes first is not measured.")
    repeats, longer = list[dict[str, Any]](), list[dict[str, Any]]()
    for number, (prompt, more) in enumerate(prompts):
        first = ask(prompt)
        again = ask(more if number % 2 else prompt)
        new = len(tokens(more)) - len(tokens(prompt)) if number % 2 else 0
        hit = again - new <= SLACK < first
        (longer if number % 2 else repeats).append({"first": first, "again": again, "hit": hit})
    return {
        "repeats": _share(repeats), "extensions": _share(longer), "computed": {"repeats": repeats, "extensions": longer},
    }  # fmt: skip


def _share(found: list[dict[str, Any]]) -> dict[str, Any]:
    hits = sum(one["hit"] for one in found)
    return {"prompts": len(found), "hits": hits, "share": hits / len(found) if found else None}


def attach(model: str, count: int, folder: str) -> dict[str, Any]:
    import torch

    import dejakv
    from dejakv.config import SemanticCacheConfig
    from dejakv.engines.transformers import loading

    loaded = loading.load(model, "fp32", "cpu", "sdpa", False)
    records: list[Any] = []
    torch.manual_seed(0)

    def ask(prompt: str) -> int:
        inputs = loaded.tokenizer(prompt, return_tensors="pt")
        loaded.model.generate(**inputs, max_new_tokens=ANSWER, do_sample=False)
        return records[-1].computed_tokens

    config = SemanticCacheConfig(semantic_text=False, cache_dir=folder)
    with dejakv.attach(loaded.model, loaded.tokenizer, config, on_record=records.append):
        return measured(ask, _ids(loaded.tokenizer), texts(loaded.tokenizer, count))


def pipeline(model: str, count: int, folder: str) -> dict[str, Any]:
    from dejakv.build import build_cache
    from dejakv.config import SemanticCacheConfig
    from dejakv.engines.transformers import TransformersEngine
    from dejakv.pipeline import Pipeline
    from dejakv.request import Request, Sampling

    engine = TransformersEngine.from_pretrained(model, dtype="fp32", device="cpu")
    with closing(build_cache(SemanticCacheConfig(semantic_text=False, cache_dir=folder), engine)) as cache:
        served = Pipeline(engine, cache)

        def ask(prompt: str) -> int:
            return served.answer(Request("", prompt, prompt, sampling=Sampling(ANSWER))).record.computed_tokens

        return measured(ask, _ids(engine.tokenizer), texts(engine.tokenizer, count))


def server(model: str, count: int, folder: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from dejakv.models import resolve

    tokenizer = AutoTokenizer.from_pretrained(str(resolve(model)))
    with _serving(model, folder) as url:

        def ask(prompt: str) -> int:
            asked = {"prompt": prompt, "max_new_tokens": ANSWER, "temperature": 0}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/generate", json.dumps(asked).encode(), headers)
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)["tokens_computed"]

        return measured(ask, _ids(tokenizer), texts(tokenizer, count))


@contextmanager
def _serving(model: str, folder: str) -> Iterator[str]:
    """The address of a `dejakv serve` on a free port."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "dejakv",
        "serve",
        "--model",
        model,
        "--dtype",
        "fp32",
        "--port",
        "0",
    ]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen([*command, "--cache-dir", folder], stdout=log, stderr=log) as run,
    ):
        try:
            url = ""
            while not (url and _ready(url)):
                if run.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"the server did not start:\n{log.read()[-2000:]}")
                time.sleep(0.2)
                log.seek(0)
                found = re.search(r"http://127\.0\.0\.1:\d+", log.read())
                url = found[0] if found else ""
            yield url
        finally:
            run.terminate()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=120) as answer:
            return answer.status == 200
    except OSError:
        return False


def vllm(model: str, count: int, folder: str) -> dict[str, Any]:
    import vllm_bench
    from transformers import AutoTokenizer

    vllm_bench.MODEL = model
    engine = vllm_bench.Server({"store_dir": folder}, enable_prefix_caching=False)
    tokenizer = AutoTokenizer.from_pretrained(str(vllm_bench.folder_of(model)))

    def ask(prompt: str) -> int:
        ids = tokenizer(prompt)["input_ids"]
        (answer,) = engine.run([ids], max_tokens=ANSWER)
        return len(ids) - answer["cached"]

    return measured(ask, _ids(tokenizer), texts(tokenizer, count))


def _ids(tokenizer: Any) -> Tokens:
    return lambda text: tokenizer(text)["input_ids"]


def _spawned(arm: str, given: argparse.Namespace) -> dict[str, Any]:
    """An arm's figures from a process of its own, or the reason why there are none."""
    python = Path(sys.executable)
    if arm == "vllm":
        import importlib.util

        python = python if importlib.util.find_spec("vllm") is not None else VLLM
        if not python.exists():
            return {"reason": "vLLM is not installed here, and there is no .venv-vllm (make vllm)"}
    command = [str(python), "-W", "ignore", __file__, "--arm", arm, "--model", given.model, "--prompts", str(given.prompts)]  # fmt: skip
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = next((json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    return found or {"reason": f"it did not finish: {done.stderr.strip()[-500:]}"}


def main() -> int:
    """The exit status: 1 where an arm did not finish or a repeat did not hit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help=f"default {MODEL}")
    parser.add_argument("--prompts", type=int, default=28, help="half of them come twice, the others go on; default 28")
    parser.add_argument("--arm", choices=ARMS, help="one engine alone, in this process")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    given = parser.parse_args()
    if given.arm:
        run = {"attach": attach, "pipeline": pipeline, "server": server, "vllm": vllm}[given.arm]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            print("RESULT " + json.dumps(run(given.model, given.prompts, f"{folder}/kv")), flush=True)
        return 0
    details = {arm: _spawned(arm, given) for arm in ARMS}
    shares = {arm: found.get("repeats", {}).get("share") for arm, found in details.items()}
    if given.output:
        told = {**shares, "model": given.model, "prompts": given.prompts, "lengths": LENGTHS, "details": details}
        given.output.write_text(json.dumps(told, indent=2) + "\n")
    for arm, found in details.items():
        told = [f"{name} {part['hits']} of {part['prompts']}" for name in ("repeats", "extensions") if (part := found.get(name))]  # fmt: skip
        print(f"{arm:9} {', '.join(told) or found['reason']}")
    return int(any(share is not None and share < 1 for share in shares.values()))


if __name__ == "__main__":
    sys.exit(main())
