"""Mistakes on the command line: each is one line that names the cause and the remedy, exit code 2, and touches no file."""

import base64
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from dejakv.cli.main import app
from dejakv.errors import ModelError
from dejakv.models.loading import without_network
from dejakv.vectors.text import text_encoder

DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
FILES = {
    "file": b"hello",
    "bad.jsonl": b"{\n",
    "binary.jsonl": bytes(range(256)),
    "number.jsonl": b'{"question": "what?", "image": 5}\n',
    "deep.jsonl": b"[" * 100_000 + b"\n",
    "nan.jsonl": b'{"question": NaN}\n',
    "outside.jsonl": b'{"question": "x", "image": "../../etc/passwd"}\n',
    "nul.jsonl": b'{"question": "x", "image": "a\\u0000b"}\n',
    "ok.jsonl": b'{"question": "What is the capital of France?"}\n',
    "pictures.jsonl": b'{"question": "Which colour?", "image": "dot.png"}\n',
    "dot.png": DOT,
    "list.json": b"[1]",
    "folder/mine.txt": b"mine",
    "foreign/summary.json": b'{"mine": 1}',
    "log.csv": b"mine",
    "ok.json": b'{"experiments": [{"name": "a"}], "defaults": {"preset": "shapes", "cache_mode": "dry-run"}}',
    "purge.json": b'{"experiments": [{"name": "a", "preset": "shapes", "cache_dir": "folder"}]}',
}
MISTAKES = [
    ("attack --quick --output new.json", "its checks are tests now (tests/attacks"),
    ("run --max-samples ten", "valid integer"),
    ("run --max-samples 0", "--max-samples=0 is too small"),
    ("run --similarity-threshold nan", "not finite"),
    ("run --blend-map best", "choose one of context"),
    ("run --blend-quality best", "choose one of strict, default, loose"),
    ("run --costs 1,fast", "'fast', which is no number"),
    ("run --dataset rag --order best", "free"),
    ("run --engine jax", "choose one of transformers, vllm"),
    ("run --arms ,", "give one or more of none, prefix, cache"),
    ("run --arms cache,cache", "each once"),
    ("run --arms [a", "--arms '[a' is not valid JSON"),
    ("run --costs [1,", "is not valid JSON"),
    ("run --cache-dir file", "is a file"),
    (f"run --cache-dir {'a' * 5000}", "too long"),
    ("run --output file", "is a file"),
    ("run --output foreign", "no run wrote"),
    ("run --output ''", "empty"),
    ("run --dataset jsonl --dataset-path ok.jsonl", "give --model NAME (smollm2-135m for texts"),
    ("run --dataset jsonl --dataset-path ok.jsonl", "or `dejakv estimate LOG`"),
    ("run --dataset folder --dataset-path folder", "comes with no model"),
    ("run --dataset jsonl --dataset-path pictures.jsonl --model docs-lm --image-root .", "docs-lm reads only text"),
    ("run --preset docs --reuse blend --error-bound 0.1 --differs somehow", "give first, answer, kl:NATS"),
    ("run --preset docs --reuse blend --error-bound 0.1 --differs no_such_module_of_anybody:f", "does not import"),
    ("run --preset docs --reuse blend --error-bound 0.1 --prune snapkv", "leave one out"),
    ("run --preset docs --reuse exact --error-bound 0.1", "reuse is exact"),
    ("run --dataset nope --model docs-lm", "unknown data set"),
    ("run --dataset nope --cache-mode dry-run", "unknown data set"),
    ("run --dataset json:loads --model docs-lm", "failed when it was called"),
    ("run --dataset builtins:nope --model docs-lm", "does not import"),
    ("run --model docs-lm --dataset jsonl --dataset-path missing", "no file"),
    ("run --model docs-lm --dataset jsonl --dataset-path folder", "no file"),
    (
        "run --model docs-lm --dataset jsonl --dataset-path bad.jsonl",
        "left out: 1 line that cannot be read, the first at 1",
    ),
    ("run --model docs-lm --dataset jsonl --dataset-path binary.jsonl", "cannot be read, the first at 1"),
    ("run --model docs-lm --dataset jsonl --dataset-path number.jsonl", "give a path"),
    ("run --model docs-lm --dataset jsonl --dataset-path deep.jsonl", "has no samples"),
    ("run --model docs-lm --dataset jsonl --dataset-path nan.jsonl", "is no text"),
    ("run --model docs-lm --dataset jsonl --dataset-path outside.jsonl", "leaves the folder"),
    ("run --model docs-lm --dataset jsonl --dataset-path nul.jsonl", "give a path"),
    ("run --prompt-template {question.x}", "use {question} and {context}"),
    ("run --prompt-template {", "is not valid"),
    ("run --level json:loads --model docs-lm --dataset docs --max-samples 1", "levels (--level) 'json:loads' failed"),
    (
        "run --embedding-hook os:system --embedding-layer own:4 --model docs-lm --dataset docs --max-samples 1",
        "os:system' failed",
    ),
    ("run --dataset gqa --dataset-path bad.jsonl --model docs-lm", "--dataset log for JSON lines"),
    ("run --dataset gqa --dataset-path missing.jsonl --model docs-lm", "no file 'missing.jsonl'"),
    ("run --dataset gqa --dataset-path list.json --model docs-lm", "not in GQA's format"),
    ("run --dataset gqa", "--preset internvl3.5-2b or qwen3-vl-2b"),
    ("run --seeds 5", "run a sweep with `grid: {seed: [0, 1, 2, 3, 4]}`"),
    ("run --image-root missing --max-samples 1", "--image-root 'missing' is no folder"),
    ("run --dataset rag --window 3", "--window is an option of the data set sessions"),
    ("run --passages 3", "--passages is an option of the data set rag"),
    (
        "run --fusion-provider nowhere:make --max-samples 1",
        "fusion_provider (--fusion-provider) 'nowhere:make' does not import",
    ),
    ("run --embedding-hook nowhere:hook --embedding-layer own:4 --max-samples 1", "or of the current folder"),
    (
        "run --embedding-layer vision:512 --embedding-hook vision --image-encoder folder --max-samples 1",
        'or set image_encoder="model" (--image-encoder model)',
    ),
    ("run --preset nope", "choose one of shapes"),
    ("run --model no-such-model", "no-such-model"),
    ("run --model folder", "config.json"),
    ("run --similarity-threshold 2", "-1 to 1"),
    ("run --embedding-layer prompt", "NAME:DIM"),
    ("run --embedding-layer prompt:7:0.5 --embedding-layer vision:auto:0.5 --max-samples 2", "prompt:192"),
    ("run --temperature -1", "give 0 or more"),
    ("run --output /proc/nowhere --max-samples 2", "--output"),
    ("run --arms none,all", "none, prefix, cache"),
    ("run --cache-mode maybe", "live, dry-run, off"),
    ("run --no-such", "No such option"),
    ("run --max-samples", "requires an argument"),
    ("run stray", "unexpected extra argument"),
    ("sweep", "either --specs FILE or --ablation"),
    ("sweep --specs missing", "cannot read"),
    ("sweep --specs binary.jsonl", "cannot read"),
    ("sweep --specs deep.jsonl", "cannot read"),
    ("sweep --specs ok.json --log-file log.csv", "--resume"),
    ("sweep --specs ok.json --log-file folder.json", "ends with .csv"),
    (f"sweep --specs ok.json --log-file {'a' * 300}.csv", "too long"),
    ("sweep --specs ok.json --samples-dir file", "Not a directory"),
    ("sweep --specs purge.json --purge-cache-between-runs", "holds other files"),
    ("sweep --ablation --preset nope", "unknown preset"),
    ("explain a --run . --html folder", "is a folder"),
    ("explain a --run . --html file/page.html", "--html"),
    ("explain missing --server http://127.0.0.1:1", "cannot read"),
    ("cache purge --all", "Missing option"),
    ("cache purge --cache-dir folder", "nothing is selected"),
    ("cache purge --cache-dir folder --all", "holds other files"),
    ("cache purge --cache-dir file --all", "file"),
    ("cache purge --cache-dir missing --all", "No such file"),
    ("cache purge --all --store redis://cache.example:6379/0", "is no address of a store: give a folder"),
    ("cache purge --cache-dir folder --older-than -1", "older_than=-1"),
    ("cache purge --cache-dir folder --older-than nan", "no age"),
    ("explain", "give the id of a sample and --run"),
    ("explain a --run . --server http://127.0.0.1:1", "a request alone"),
    ("explain a --server http://127.0.0.1:1 --html page.html", "a request alone"),
    ("explain a --run .", "no summary.json"),
    ("estimate", "Missing argument"),
    ("estimate missing", "no file"),
    ("tune --prompts ok.jsonl", "give the log to `dejakv estimate LOG`"),
    ("models get nope", "no model 'nope' can be fetched: choose smollm2-135m"),
    ("serve --host 0.0.0.0", "--api-keys-file"),
    ("version", "it is `dejakv --version`"),
    ("nope", "No such command"),
]


STAGES = ("a, 1 of 1", "starting", "loading ", "warming up", "docs-lm, ", "shapes-vlm, ")
"""What a run says on standard error while it goes on, before a mistake that only a model's configuration or the loaded
model can show, and what it says after ten seconds on a busy machine."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    monkeypatch.setattr(sys, "argv", ["dejakv", *arguments])
    with pytest.raises(SystemExit) as ended:
        app()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(("line", "says"), MISTAKES, ids=[line[:60] for line, _ in MISTAKES])
def test_a_mistake(
    folder: Path, line: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = said(shlex.split(line), monkeypatch, capsys)
    assert code == 2
    *progress, only = [text for text in error.splitlines() if text.strip()]
    assert only.startswith("dejakv: ")
    assert all(text.startswith(STAGES) for text in progress)
    assert says in only
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("run --preset docs --embedding-layer prompt:abc", "NAME:DIM"),
        ("run --preset docs --level nosuch:level", "does not import"),
        ("run --preset docs --output file", "--output"),
        ("run --preset docs --model nosuch.gguf", "no checkpoint at"),
        ("run --preset docs --rounding 4 --dtype bf16", "--dtype fp32"),
        ("serve --embedding-layer prompt:abc --port 0", "NAME:DIM"),
        ("serve --store folder --port 0", "folder"),
        ("serve --store s3:/bucket/x --port 0", "s3://BUCKET/PREFIX"),
        ("serve --embedding-layer prompt:7 --embedding-hook prompt --index-encoder model --port 0", "write prompt:"),
        (
            "serve --embedding-layer prompt:7 --embedding-hook prompt --index-encoder folder --port 0",
            "cannot be loaded",
        ),
        ("serve --embedding-layer own:4 --embedding-hook nowhere:hook --port 0", "does not import"),
        ("run --preset docs --chunk-source nofield", "--chunk-source needs the field 'nofield'"),
        ("run --preset docs --chunk-source combined", "--chunk-source needs the field 'semanticStr'"),
        ("run --preset docs --prompt-template {foo}", "--prompt-template"),
        ("run --preset docs --embedding-layer own:4 --embedding-hook nowhere:hook", "does not import"),
        ("run --preset docs --embedding-layer own:4 --embedding-hook os:nope", "does not import"),
        ("run --preset docs --embedding-layer own:4 --embedding-hook nope", "choose one of none, prompt"),
        ("run --preset docs --embedding-layer own:4 --embedding-hook prompt", "the layer 'own' has no vectors"),
        ("run --preset docs --embedding-layer prompt:7 --embedding-hook prompt", "write prompt:256:"),
        (
            "run --preset shapes --embedding-layer vision:7 --embedding-hook vision --image-encoder model",
            "write vision:",
        ),
        ("run --preset shapes --embedding-layer vision:7 --image-encoder folder", "cannot be loaded"),
    ],
)
def test_a_mistake_is_told_before_a_model_is_loaded(
    folder: Path, line: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("dejakv.engines.transformers.TransformersEngine.from_pretrained", loaded)
    code, error = said(shlex.split(line), monkeypatch, capsys)
    assert code == 2
    assert says in error
    assert len(error.splitlines()) == 1


def test_a_hub_that_cannot_be_reached_is_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("dejakv.models.loading.getproxies", dict)
    without_network.cache_clear()
    code, error = said(shlex.split("run --model nobody/nothing --dataset docs"), monkeypatch, capsys)
    assert code == 2
    assert "the hub cannot be reached, and its cache has no such model" in error
    without_network.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError, match="nobody/nothing"):
        text_encoder("nobody/nothing")
    assert "Retrying" not in error + capsys.readouterr().err
    without_network.cache_clear()


ENTRIES: list[tuple[Any, str]] = [
    ({"name": "a", "max_samples": "ten"}, "--max-samples='ten' is no whole number"),
    ({"name": "a", "model": ["docs-lm"]}, "no text"),
    ({"name": "a", "arms": "none"}, "no list"),
    ({"name": "a", "arms": ["none", 5]}, "holds 5"),
    ({"name": "a", "disable_exact_cache": "no"}, "neither true nor false"),
    ({"name": "a", "notes": [1]}, "no text"),
    ({"name": "a", "preset": {}}, "no text"),
    ({"name": "a", "cache_dir": 5}, "no text"),
    ({"name": "a", "embedding_layers": [5]}, "holds 5"),
    ({"name": "a", "similarity_threshold": float("nan")}, "not finite"),
    ({"name": "a", "colour": 1}, "unknown setting 'colour'"),
    (5, "a list of one or more objects"),
    ({}, "give every experiment a 'name'"),
    *[({"name": name}, "cannot be named") for name in (5, "", " ", "..", "../x", "/x", "a/b", "a\\b", "C:x", "a\0b")],
    *[({"name": name}, "cannot be named") for name in ("a" * 300, "\ud800", ".hidden", "a\u202eb")],
]


@pytest.mark.parametrize(("entry", "says"), ENTRIES, ids=[str(number) for number in range(len(ENTRIES))])
def test_a_wrong_experiment(
    folder: Path, entry: Any, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "spec.json").write_text(json.dumps({"experiments": [entry]}))
    code, error = said(["sweep", "--specs", "spec.json", "--samples-dir", "samples"], monkeypatch, capsys)
    assert code == 2
    assert says in error
    assert len(error.splitlines()) == 1
    assert not (folder / "samples").exists()
    assert not (folder / "sweep.csv").exists()


@pytest.mark.parametrize("names", [("a", "a"), ("Run", "run")])
def test_two_names_that_are_one_folder(
    folder: Path, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "spec.json").write_text(json.dumps({"experiments": [{"name": name} for name in names]}))
    code, error = said(["sweep", "--specs", "spec.json"], monkeypatch, capsys)
    assert code == 2
    assert "the same folder" in error


def test_no_arguments_print_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["dejakv"])
    with pytest.raises(SystemExit) as ended:
        app()
    assert ended.value.code == 0
    assert "sweep" in capsys.readouterr().out
