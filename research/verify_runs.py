"""How often `dejakv verify` accuses a server whose caches change no answer.

    python -m research.verify_runs --server serve --runs 40
    .venv-vllm/bin/python -m research.verify_runs --server vllm-both --runs 40

Each run has a seed of its own and the quick form: one round of all probes. Runs are added to those
that the output file has of the same server and model.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from dejakv.errors import ConfigError, DejaKVError
from dejakv.experiments.output import replace_file
from dejakv.models import resolve
from dejakv.verify import ClientSettings, VerifyResult, VerifySettings, verify_server
from research.command import run
from research.machine import measured

KV_CONNECTOR = {
    "kv_connector": "DejaKVConnector",
    "kv_connector_module_path": "dejakv.engines.vllm.connector",
    "kv_role": "kv_both",
}
SERVERS: dict[str, list[str]] = {
    "serve": [],
    "serve-store": [
        "--store",
        "{folder}/store",
        "--max-bytes",
        "20000000",
        "--memory-bytes",
        "1000000",
    ],
    "serve-off": [],
    "vllm": ["--no-enable-prefix-caching"],
    "vllm-prefix": ["--num-gpu-blocks-override", "96"],
    "vllm-connector": ["--no-enable-prefix-caching", "{connector}"],
    "vllm-both": ["--num-gpu-blocks-override", "96", "{connector}"],
}
"""Arguments by server: `dejakv serve`, or vLLM without and with caches.

Blocks and bytes are few, so that caches evict and lower tiers are read.
"""
VLLM = (
    "--dtype", "float32", "--max-model-len", "1024", "--block-size", "32", "--enforce-eager",
    "--enable-prompt-tokens-details",
)  # fmt: skip
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip


@contextmanager
def serving(server: str, model: str) -> Iterator[str]:
    """Start a server in a process; its address, once it answers.

    Parameters
    ----------
    server : str
        One of `SERVERS`.
    model : str
        Name of a model of the package.

    Yields
    ------
    str
        Address.

    Raises
    ------
    DejaKVError
        If the server ends before it answers.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as name:
        command = command_of(server, model, Path(name), port)
        log_file = Path(name) / "log"
        environment = {**os.environ, **VLLM_ENVIRONMENT}
        if server == "serve-off":
            environment["DEJAKV_OFF"] = "1"
        with log_file.open("w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            while not _answers(url):
                if process.poll() is not None:
                    raise DejaKVError(f"{server} did not start: {log_file.read_text()[-2000:]}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def command_of(server: str, model: str, folder: Path, port: str) -> list[str]:
    """Return the command line of a server that keeps its files in a folder."""
    arguments: list[str] = []
    for argument in SERVERS[server]:
        if argument == "{connector}":
            settings = {"store": f"{folder}/store", "max_bytes": 1 << 30}
            described = {**KV_CONNECTOR, "kv_connector_extra_config": settings}
            arguments += ["--kv-transfer-config", json.dumps(described)]
        else:
            arguments.append(argument.format(folder=folder))
    if server.startswith("serve"):
        return [
            sys.executable, "-m", "dejakv", "serve", "--model", model, "--port", port, *arguments,
        ]  # fmt: skip
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(resolve(model)),
        "--served-model-name", model, "--port", port, *VLLM, *arguments,
    ]  # fmt: skip


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
    return False


def row_of(result: VerifyResult) -> dict[str, Any]:
    """Return what the file keeps of a run."""
    cached = sum(cached for cached, _ in result.cached)
    return {
        "seed": result.seed,
        "answers": len(result.observations),
        "verdicts": dict(Counter(each.verdict for each in result.observations)),
        "wrong": dict(Counter(each.kind for each in result.wrong)),
        "kinds": sorted({each.kind for each in result.observations}),
        "farthest_nats": max(each.distance for each in result.observations),
        "limit_nats": result.noise.limit,
        "noise_nats": result.noise.largest,
        "cached_share": cached / max(sum(tokens for _, tokens in result.cached), 1),
        "requests": result.client.events["requests"],
        "seconds": round(result.seconds, 1),
    }


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of all runs of a server."""
    return {
        "runs": len(rows),
        "alarms": sum(bool(row["wrong"]) for row in rows),
        "answers": sum(row["answers"] for row in rows),
        "runs_with_cached_tokens": sum(row["cached_share"] > 0 for row in rows),
        "farthest_nats": max(row["farthest_nats"] for row in rows),
        "kinds": dict(Counter(kind for row in rows for kind in row["kinds"])),
    }


def main(
    server: Annotated[
        list[str] | None, typer.Option(help=f"Server to start: {', '.join(SERVERS)}; repeatable.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="In their place: a right server that runs.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model of the servers.")] = "docs-lm",
    runs: Annotated[int, typer.Option(help="Runs of each server.", min=1)] = 20,
    seconds: Annotated[float, typer.Option(help="Time of a run.", min=1)] = 12.0,
    workers: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 4,
    minutes: Annotated[float, typer.Option(help="No run begins after so many minutes.")] = 600.0,
    output: Annotated[Path, typer.Option(help="File to add to.")] = Path(
        "docs/results/verify_runs.json"
    ),
) -> None:
    """Run `verify` on right servers and count its alarms."""
    names = [url] if url else server or ["serve"]
    if unknown := set(names) - {*SERVERS, url}:
        raise ConfigError(f"no server {', '.join(unknown)}: one of {', '.join(SERVERS)}")
    until = time.monotonic() + 60 * minutes
    for name in names:
        _add_runs(name, model, runs, VerifySettings(seconds, workers, 1), until, output, url)


def _add_runs(
    server: str,
    model: str,
    runs: int,
    settings: VerifySettings,
    until: float,
    output: Path,
    url: str | None,
) -> None:
    """Run `verify` on a server, and write the file after each run."""
    with serving(server, model) if url is None else nullcontext(url) as address:
        for number in range(runs):
            if time.monotonic() > until:
                return
            result = verify_server(ClientSettings(address), settings)
            text = output.read_text(encoding="utf-8") if output.is_file() else "{}"
            page = json.loads(text)
            row = row_of(result)
            cell = page.setdefault(f"{server}, {model}", {"rows": []})
            cell["rows"].append(row)
            cell |= {
                "summary": summary_of(cell["rows"]),
                "measured": measured("research.verify_runs"),
            }
            # A run's line is two.
            lines = re.sub(r"\n {4,}", " ", json.dumps(page, indent=1))
            replace_file(output, lines + "\n", "--output")
            alarm = f" WRONG {row['wrong']} seed {row['seed']}" if row["wrong"] else ""
            typer.echo(
                f"{server} {number + 1}/{runs}: {row['answers']} answers, {row['seconds']} s,"
                f" {row['cached_share']:.0%} cached, farthest {row['farthest_nats']:.2g} of"
                f" {row['limit_nats']:.2g} nats{alarm}"
            )


if __name__ == "__main__":
    run(main)
