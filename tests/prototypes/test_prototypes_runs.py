"""The commands of the hierarchical semantic cache, with its models and data replaced by bundled ones."""

import csv
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.prototypes.conftest import Names

from dejakv.cli.main import app
from dejakv.cli.progress import line_of
from dejakv.experiments.samples import read_samples
from dejakv.experiments.settings import settings_from
from dejakv.experiments.summary import SampleRow
from dejakv.experiments.sweep import ablation, read_experiments
from dejakv.vectors.image import ROOT_VARIABLES
from dejakv_models.shapes import ShapesDataset

COUNT = 12
LAYERS = "--embedding-layer prompt:192:0.8 --embedding-layer vision:192:0.82 --embedding-hook prompt_vision"


@pytest.fixture
def gqa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with GQA's questions about shapes and their pictures, and the variable that names these."""
    images = tmp_path / "images"
    images.mkdir()
    records: dict[str, Any] = {}
    for sample in ShapesDataset(seed=0, samples=COUNT, images=8):
        records[sample.id] = {**sample.fields, "question": sample.question, "answer": sample.answer}
        (images / f"{sample.fields['imageId']}.png").write_bytes(sample.media[0].data)
    (tmp_path / "questions.json").write_text(json.dumps(records))
    for name in ROOT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GQA_IMAGE_ROOT", str(images))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs it as the console script does; fails unless it ends well."""
    monkeypatch.setattr(sys, "argv", ["dejakv", *line])
    with pytest.raises(SystemExit) as ended:
        app()
    assert ended.value.code == 0


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_run(gqa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names("run")
    data = "--dataset gqa --dataset-path questions.json --index-encoder model --arms none,cache --max-new-tokens 4"
    first = f"run --model shapes-vlm --max-samples {COUNT} --chunk-source semantic {data} --output first"
    command(names.line(shlex.split(first)), monkeypatch)
    assert summary(gqa / "first")["implied"][0].startswith("--chunk-source semantic asks for similar prompts")
    assert summary(gqa / "first")["hit_rate"] > 0
    second = (
        f"run --model shapes-vlm --max-samples 8 --shuffle-seed 1 --similarity-threshold 0.8 --chunk-window 64 {data} "
        "--disable-semantic-cache --max-cached-blocks 3 --cache-dir kept --output second"
    )
    command(names.line(shlex.split(second)), monkeypatch)
    assert [row["id"] for row in rows(gqa / "second")] != [row["id"] for row in rows(gqa / "first")[:8]]
    assert summary(gqa / "second")["store_entries"] <= 3
    assert "semantic_text" not in rows(gqa / "second")[0]["statuses"]
    assert list((gqa / "kept").rglob("*.safetensors"))
    names("python experiment/test_vllm.py", "chunk_window")
    names.done()


def test_layers(gqa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names("layers")
    line = (
        f"run --model shapes-vlm --max-samples {COUNT} --chunk-source group {LAYERS} --dataset gqa "
        "--dataset-path questions.json --arms cache --max-new-tokens 4 --output out"
    )
    command(names.line(shlex.split(line)), monkeypatch)
    assert {"embedding:prompt", "embedding:vision"} <= set(rows(gqa / "out")[0]["statuses"])
    assert summary(gqa / "out")["hook_counts"]["vision: ok"] > 0
    names.done()


def test_preset(gqa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names("preset")
    for name in ("internvl3.5-2b", "qwen3-vl-2b"):
        settings = settings_from(name, {}, {})
        assert settings.trust_remote_code == (name == "internvl3.5-2b")
        assert settings.cache.embedding_layers == ("prompt:384:0.8", "vision:512:0.82")
        assert settings.cache.reuse == "adopt"
        line = (
            f"run --preset {name} --dataset gqa --max-samples {COUNT} --cache-mode dry-run --model shapes-vlm "
            f"--dataset-path questions.json --index-encoder model {LAYERS} --output {name}"
        )
        command(names.line(shlex.split(line)), monkeypatch)
        assert summary(gqa / name)["cache_mode"] == "dry-run"
        assert summary(gqa / name)["hit_rate"] > 0
    names("--cache-mode dry-run", "trust_remote_code")
    names.done()


def test_hub(tmp_path: Path, gqa: Path) -> None:
    """A local copy in the hub's layout: questions and pictures are joined by the picture's id."""
    names = Names("hub")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `hub` brings it")
    import pyarrow

    records = json.loads((gqa / "questions.json").read_text())
    plain = [
        {"id": key, **{n: r[n] for n in ("imageId", "question", "answer", "semanticStr")}} for key, r in records.items()
    ]
    pictures = [{"id": f.stem, "image": {"bytes": f.read_bytes(), "path": f.name}} for f in (gqa / "images").iterdir()]
    head = "---\nconfigs:\n"
    for config, found in (("val_balanced_instructions", plain), ("val_balanced_images", pictures)):
        (tmp_path / "hub" / config).mkdir(parents=True)
        parquet.write_table(pyarrow.Table.from_pylist(found), tmp_path / "hub" / config / "val-00000-of-00001.parquet")
        head += f"- config_name: {config}\n  data_files:\n  - split: val\n    path: {config}/val-*\n"
    (tmp_path / "hub" / "README.md").write_text(f"{head}---\n")
    given = {"dataset": "gqa", "dataset_path": str(tmp_path / "hub"), "model": "shapes-vlm", "max_samples": COUNT}
    samples = list(
        read_samples(settings_from(None, {**given, "dataset_config": "val_balanced_instructions", "split": "val"}, {}))
    )
    pixels = {f.stem: f.read_bytes() for f in (gqa / "images").iterdir()}
    assert [sample.media[0].data for sample in samples] == [pixels[sample.fields["imageId"]] for sample in samples]
    assert len({sample.media[0].digest for sample in samples}) > 1
    text = list(read_samples(settings_from("opt-125m", {**given, "model": "docs-lm"}, {})))
    assert [len(sample.media) for sample in text] == [0] * COUNT
    names("--dataset-config", "--split")
    names.done()


def test_chunk_source(gqa: Path) -> None:
    from dejakv.experiments.samples import chunk_of

    names = Names("chunk_source")
    given = {"dataset": "gqa", "dataset_path": str(gqa / "questions.json"), "model": "shapes-vlm", "max_samples": 1}
    (sample,) = read_samples(settings_from(None, given, {}))
    sources = {name: chunk_of(sample, name, "prompt") for name in ("question", "semantic", "group", "combined")}
    assert sources["question"] == sample.question
    assert sources["semantic"] == sample.fields["semanticStr"]
    assert sources["combined"] == f"{sample.question} {sample.fields['semanticStr']}"
    assert sources["group"]
    names("--chunk-source", *sources)
    names.done()


def test_variables(gqa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names("variables")
    given = {"dataset": "gqa", "dataset_path": str(gqa / "questions.json"), "model": "shapes-vlm", "max_samples": 2}
    monkeypatch.delenv("GQA_IMAGE_ROOT")
    for name in ROOT_VARIABLES:
        with monkeypatch.context() as one:
            one.setenv(name, str(gqa / "images"))
            assert all(sample.media for sample in read_samples(settings_from(None, given, {})))
        names(name)
    assert not any(sample.media for sample in read_samples(settings_from(None, given, {})))
    names.done()


class Factory:
    """A hook of one's own: made without arguments, called with the model and the sample."""

    def __call__(self, *, llm: Any, sample: Any) -> dict[str, np.ndarray]:
        return {"own": np.array([len(sample.chunk), 1.0], dtype=np.float32)}


def test_hooks(gqa: Path) -> None:
    from dejakv.engines.open import open_engine
    from dejakv.experiments.samples import SamplePrompter
    from dejakv.vectors.hooks import make_hook

    names = Names("hooks")
    given = {"dataset": "gqa", "dataset_path": str(gqa / "questions.json"), "model": "shapes-vlm", "max_samples": 1}
    settings = settings_from(None, given, {})
    engine = open_engine(settings, settings.cache)
    asked = SamplePrompter().request(next(iter(read_samples(settings))))
    for name in ("none", "prompt", "vision", "prompt_vision"):
        made = [] if name == "none" else name.split("_")
        layers = [f"{layer}:auto:0.8" for layer in made]
        config = settings_from(None, given, {"embedding_layers": layers, "embedding_hook": name}).cache
        assert sorted(make_hook(name, config, engine)(asked)) == made
        names(name)
    config = settings_from(None, given, {"embedding_layers": ["own:2:0.8"]}).cache
    own = make_hook(f"{__name__}:Factory", config, engine)(asked)
    assert own["own"].shape == (2,)
    names("package.module:Factory", "{layer_name: np.ndarray}", "embedding_hook(llm=llm, sample=sample)")
    names.done()


def test_sweep(gqa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names("sweep")
    data = {"dataset": "gqa", "dataset_path": "questions.json", "index_encoder": "model", "arms": ["none", "cache"]}
    spec = {
        "defaults": {
            "dataset_config": "val_balanced_instructions", "split": "val", "max_samples": 4, "chunk_source": "semantic",
            "max_new_tokens": 2, "cache_dir": "kept", **data,
        },
        "experiments": [
            {"name": "opt125m-semantic", "model": "shapes-vlm", "similarity_threshold": 0.8},
            {
                "name": "qwen-prompts", "model": "shapes-vlm", "embedding_hook": "prompt_vision", "max_samples": 3,
                "embedding_layers": ["prompt:192:0.8", "vision:192:0.85"],
            },
            {
                "name": "internvl35-2b", "preset": "internvl3.5-2b", "model": "shapes-vlm", "max_samples": 2,
                "embedding_layers": ["prompt:192:0.8"], "notes": "InternVL3.5-2B with prompt-semantic cache.",
            },
        ],
    }  # fmt: skip
    (gqa / "experiments.json").write_text(json.dumps(spec))
    line = "sweep --specs experiments.json --log-file sweep_logs.csv --samples-dir sweep_samples --purge-cache-between-runs"
    command(names.line(shlex.split(line)), monkeypatch)
    logged = list(csv.DictReader((gqa / "sweep_logs.csv").read_text().splitlines()))
    assert [row["name"] for row in logged] == [entry["name"] for entry in spec["experiments"]]
    assert not any(row["error"] for row in logged)
    assert logged[2]["notes"] == "InternVL3.5-2B with prompt-semantic cache."
    assert [len(rows(gqa / "sweep_samples" / row["name"])) for row in logged] == [4, 3, 2]
    assert all('"cache.reuse": "adopt"' in row["settings"] for row in logged)
    assert summary(gqa / "sweep_samples" / "qwen-prompts")["started_with_chunks"] == 0  # purged
    before = (gqa / "sweep_logs.csv").read_text()
    command(names.line(shlex.split(f"{line} --resume")), monkeypatch)
    assert (gqa / "sweep_logs.csv").read_text() == before
    names(*spec, *spec["defaults"], *(key for entry in spec["experiments"] for key in entry))
    names("python experiment/run_experiments.py")
    names.done()


def test_ablation() -> None:
    names = Names("ablation")
    spec = ablation(["a/one", "b/two"])
    assert len(list(read_experiments(spec, None))) == 32
    names("./run_ablation.sh")
    names.done()


def test_log_line(gqa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names("log_line")
    line = (
        "run --model shapes-vlm --max-samples 6 --dataset gqa --dataset-path questions.json --arms cache "
        "--max-new-tokens 4 --output out"
    )
    command(shlex.split(line), monkeypatch)
    shown = [line_of(SampleRow.from_dict(row)) for row in rows(gqa / "out")]
    for text, row in zip(shown, rows(gqa / "out"), strict=True):
        head, latency, match, statuses = text.split(" | ")[:4]
        assert head == f"[{row['id']}] {row['provenance']}"
        assert re.fullmatch(r"latency=\d+\.\d{3}s", latency)
        assert match in ("answer match=True", "answer match=False")
        assert statuses.startswith("exact_text=")
        assert ("kv_cache=hit" in statuses) == head.split("] ")[1].startswith("hit")
    names("[id] hit (embedding:prompt) | latency=0.032s | answer match=True")
    names("[sample_001] hit (text:exact) | latency=0.032s | answer match=True | exact_text=hit, ...")
    names.done()


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (f"--preset qwen3-vl-2b {LAYERS} --chunk-source question", "embedding:prompt"),
        (f"--preset qwen3-vl-2b {LAYERS} --disable-exact-cache", "embedding:prompt"),
        ("--chunk-source semantic --disable-exact-cache", "semantic_text"),
    ],
)
def test_presets_have_semantic_and_latent_hits(
    gqa: Path, monkeypatch: pytest.MonkeyPatch, flags: str, level: str
) -> None:
    """Short questions behind a picture that an exact prefix holds, compared by programs too: no donor is refused for its numbers."""
    records: dict[str, Any] = {}
    for sample in ShapesDataset(seed=0, samples=48, images=8):
        records[sample.id] = {**sample.fields, "question": sample.question, "answer": sample.answer}
        (gqa / "images" / f"{sample.fields['imageId']}.png").write_bytes(sample.media[0].data)
    (gqa / "questions.json").write_text(json.dumps(records))
    line = f"run {flags} --model shapes-vlm --dataset gqa --dataset-path questions.json --index-encoder model --cache-mode dry-run --output out"
    command(shlex.split(line), monkeypatch)
    hits = [row for row in rows(gqa / "out") if row["provenance"].startswith("hit")]
    assert sum(row["level"] == level for row in hits) >= 3
    assert all(row["right"] is not False for row in hits)
    reasons = " ".join(row["reason"] for row in rows(gqa / "out"))
    assert "min_gain" not in reasons
    assert "numbers" not in reasons


def test_the_documents_vehicle_and_car(gqa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard takes them for other questions: words that it does not know to be one thing are not. Without it they hit."""
    lines = [{"id": n, "question": f"What color is the {n}?"} for n in ("vehicle", "car")]
    (gqa / "pair.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for flags, method in (("", "miss"), (" --disable-lexical-guard", "hit (text:semantic)")):
        line = (
            "run --cache-mode dry-run --model docs-lm --dataset jsonl --dataset-path pair.jsonl --index-encoder model --reuse adopt "
            f"--similarity-threshold 0.3 --min-gain 1{flags} --output {'off' if flags else 'on'}"
        )
        command(shlex.split(line), monkeypatch)
        row = rows(gqa / ("off" if flags else "on"))[1]
        assert row["provenance"] == method, row
    assert rows(gqa / "on")[1]["reason"] == "lexical: content words differ"
