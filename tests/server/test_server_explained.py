"""`dejakv explain --server`: a sentence on what a running server reuses for a request."""

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from tests.serving import Running, stored
from typer.testing import CliRunner

from dejakv.cli.explain import explain_request, sentence
from dejakv.cli.main import typer_app
from dejakv.errors import ConfigError, InputError

PROMPT = "dana lives in lima. gus lives in bern. hugo lives in oslo. where does gus live?"


def written(folder: Path, **body: Any) -> str:
    (folder / "request.json").write_text(json.dumps(body))
    return str(folder / "request.json")


def test_a_request_is_explained_and_stores_nothing(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, prompt=PROMPT, stream=True, max_tokens=40)
    for _ in range(2):
        done = CliRunner().invoke(typer_app, ["explain", "--server", server.url, file])
        assert done.exit_code == 0, done.output
        assert done.output.startswith("Nothing was reused for ")
    server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}).raise_for_status()
    stored(server)
    monkeypatch.setattr(sys, "stdin", StringIO(json.dumps({"prompt": PROMPT})))
    said = explain_request(server.url + "/", "-")
    assert said.startswith("Reused the exact state of ")
    assert "(exact_text); the answer is that of full computation" in said


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"method": "none", "reason": ""}, "Nothing was reused for 10 tokens: no stored state was better than computing."),
        ({"reuse": "none", "reason": "mode is off."}, "Nothing was reused for 10 tokens: mode is off."),
        (
            {"method": "exact", "level": "prefix", "tokens_reused": 4, "bitwise": False, "arithmetic": "bf16"},
            "Reused the exact state of 4 of 10 tokens (prefix); the answer is that of full computation, up to the rounding of bf16.",
        ),
        (
            {"method": "blend", "level": "copied", "tokens_reused": 6, "approximate": True, "donors": ["a", "b"]},
            "Reused the state of 6 of 10 tokens from 2 earlier prompts approximately (blend, found by copied); the answer may differ.",
        ),
    ],
)  # fmt: skip
def test_sentences(told: dict[str, Any], says: str) -> None:
    assert sentence(told, {"prompt_tokens": 10}) == says


def test_what_the_engine_held_itself_is_said() -> None:
    usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 8}}
    assert sentence({"method": "none", "reason": "too short"}, usage).endswith(
        "too short; the engine's own prefix cache had 8 of them."
    )


def test_mistakes(server: Running, tmp_path: Path) -> None:
    good = written(tmp_path, prompt=PROMPT)
    with pytest.raises(InputError, match=r"no answer of http://127.0.0.1:9/v1/models"):
        explain_request("http://127.0.0.1:9", good)
    with pytest.raises(InputError, match="'server:8000' is no address"):
        explain_request("server:8000", good)
    with pytest.raises(InputError, match="cannot read '/nowhere'"):
        explain_request(server.url, "/nowhere")
    with pytest.raises(InputError, match="has no prompt and no messages"):
        explain_request(server.url, written(tmp_path, question="who?"))
    with pytest.raises(InputError, match=r"refused with status 404: .*this server has the model"):
        explain_request(server.url, written(tmp_path, prompt=PROMPT, model="another"))
    done = CliRunner().invoke(typer_app, ["explain", "--server", server.url])
    assert isinstance(done.exception, ConfigError)
    assert "--server takes a request alone" in str(done.exception)
