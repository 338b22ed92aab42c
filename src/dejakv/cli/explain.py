"""`dejakv explain`: why a sample hit or missed, or what a running server reuses for a request."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import typer

from dejakv.cli.options import echo
from dejakv.errors import ConfigError, InputError, count_noun


def explain_command(
    sample: Annotated[
        str | None,
        typer.Argument(
            help=(
                "Id of a sample of the run in --run, or JSON file with the request for --server (-:"
                " standard input)."
            )
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of a finished run; with a sample's id.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="Address of a running server; with a request.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="DEJAKV_API_KEY", help="API key for --server.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write an HTML page to this file as well.")
    ] = None,
) -> None:
    """Explain why a sample of a run hit or missed, or what a running server reuses for a
    request.
    """
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.experiments.output import make_folder, replace_file

    if html is not None:
        make_folder(html.parent, "--html")
        if html.is_dir():
            raise ConfigError(f"--html {str(html)!r} is a folder: give the name of a file in it")

    if server is not None:
        if sample is None or run is not None or html is not None:
            raise ConfigError(
                "--server takes a request alone: give a JSON file, or - for standard input"
            )
        echo(explain_request(server, sample, api_key))
        return
    if sample is None or run is None:
        raise ConfigError(
            "Missing option: give the id of a sample and --run FOLDER, or a request and"
            " --server URL"
        )
    from dejakv.experiments.reports import why

    with watching(Console(stderr=True)) as watch:
        explanation = why.explain_sample(run, sample, watch)
    why.to_terminal(explanation, Console())
    if html is not None:
        replace_file(html, why.to_html(explanation), "--html")
        echo(f"written to {html}")


Body = dict[str, Any]

_TIMEOUT_S = 600.0


def explain_request(server: str, source: str, key: str | None = None) -> str:
    """Ask a server what it reuses for a request, and say it in a sentence.

    The server stores nothing of the request, and answers it with one token.

    Parameters
    ----------
    server : str
        Address of vLLM's OpenAI server with DejaKV's connector, or of `dejakv serve`.
    source : str
        JSON file with the body of a completion or chat completion; `-` is standard input.
    key : str, optional
        API key of the partition.

    Raises
    ------
    InputError
        For a body that cannot be read, a server that cannot be reached or refuses, and one without
        DejaKV.
    """
    if not server.startswith(("http://", "https://")):
        raise InputError(
            f"--server {server!r} is no address: give one such as http://127.0.0.1:8000"
        )

    body, server = _read(source), server.rstrip("/")

    # The owner of the model tells which of the two servers this is.
    models = _answer(f"{server}/v1/models", None, key).get("data") or [{}]
    owner, served = models[0].get("owned_by"), models[0].get("id")
    route = "chat/completions" if "messages" in body else "completions"
    whole = {
        name: value
        for name, value in body.items()
        if name not in ("stream_options", "max_completion_tokens")
    }

    # Donors are decided before the first token, so one token is enough.
    whole |= {"model": body.get("model", served), "stream": False, "max_tokens": 1}

    # Asking must not change what is stored: the next answer would be another.
    served_by_dejakv = owner == "dejakv"
    if served_by_dejakv:
        whole["dejakv"] = {**(body.get("dejakv") or {}), "no_store": True}
    else:
        params = body.get("kv_transfer_params") or {}
        whole["kv_transfer_params"] = {
            **params,
            "dejakv": {**(params.get("dejakv") or {}), "no_store": True},
        }

    answer = _answer(f"{server}/v1/{route}", whole, key)
    state_report = (
        answer.get("dejakv")
        if served_by_dejakv
        else (answer.get("kv_transfer_params") or {}).get("dejakv")
    )

    # A router may drop fields that it does not know.
    if not isinstance(state_report, dict):
        raise InputError(
            f"the answer of {server} does not say what DejaKV did: start vLLM with the connector"
            " (docs/how-to/vllm.md), or ask the server itself in place of a router before it"
        )

    return sentence(cast(Body, state_report), answer.get("usage") or {})


def sentence(state_report: Mapping[str, Any], usage: Mapping[str, Any]) -> str:
    """Say in a sentence what a response tells of its state.

    Parameters
    ----------
    state_report : mapping
        `kv_transfer_params.dejakv` of the connector, or `dejakv` of `dejakv serve`.
    usage : mapping
        The response's `usage`.

    Examples
    --------
    >>> report = {"method": "none", "reason": "no stored prompt begins like this one"}
    >>> sentence(report, {"prompt_tokens": 900})
    'Nothing was reused for 900 tokens: no stored prompt begins like this one.'
    >>> report = {"method": "exact", "level": "prefix", "tokens_reused": 640}
    >>> sentence(report, {"prompt_tokens": 900})
    'Reused the exact state of 640 of 900 tokens (prefix); the answer is that of full computation.'
    """
    tokens = usage.get("prompt_tokens", "the prompt's")
    method, reason = (
        state_report.get("method", state_report.get("reuse", "none")),
        str(state_report.get("reason") or "").rstrip("."),
    )
    if method == "none":
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        prefix_note = f"; the engine's own prefix cache had {cached} of them" if cached else ""
        return (
            f"Nothing was reused for {tokens} tokens:"
            f" {reason or 'no stored state was better than computing'}{prefix_note}."
        )

    reused, level = state_report.get("tokens_reused", 0), state_report.get("level") or method

    # An exact hit has a reason too where a longer one was refused.
    because = f"; no more, because {reason}" if reason else ""
    if not state_report.get("approximate"):
        rounding = (
            ""
            if state_report.get("bitwise", True)
            else f", up to the rounding of {state_report.get('arithmetic')}"
        )
        return (
            f"Reused the exact state of {reused} of {tokens} tokens ({level}); the answer is that"
            f" of full computation{rounding}{because}."
        )

    # The connector names its donors, `dejakv serve` does not.
    donors = len(state_report.get("donors") or ())
    source = f" from {count_noun(donors, 'earlier prompt')}" if donors else ""
    return (
        f"Reused the state of {reused} of {tokens} tokens{source} approximately ({method}, found by"
        f" {level}); the answer may differ{because}."
    )


def _read(source: str) -> Body:
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        body = json.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {source!r}: {error}; give a JSON file with a request's body, or - "
        ) from error

    if not isinstance(body, dict) or not ("prompt" in body or "messages" in body):
        raise InputError(
            f"{source!r} has no prompt and no messages: give the body of a completion or chat"
            " completion"
        )
    return cast(Body, body)


def _answer(url: str, body: Body | None, key: str | None) -> Body:
    """Return the JSON answer to a GET, or to a POST of a body."""
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data, headers), timeout=_TIMEOUT_S) as response:
            answer = json.loads(response.read())
    except HTTPError as error:
        why = error.read()[:300].decode(errors="replace")
        raise InputError(f"{url} refused with status {error.code}: {why}") from error
    except (URLError, OSError, ValueError) as error:
        raise InputError(
            f"no answer of {url}: {error}; give the address of a running server, such as"
            " http://127.0.0.1:8000"
        ) from error

    return cast(Body, answer) if isinstance(answer, dict) else {}
