"""The ablations that ship: they parse, and their arms differ in what they are about."""

from pathlib import Path

import pytest

from dejakv.experiments.sweep import ablation, read_experiments, read_file, sweep

FOLDER = Path(__file__).parents[3] / "research" / "specs"


@pytest.mark.parametrize(("name", "runs"), [("shapes", 18), ("smollm2", 7)])
def test_a_specification_is_whole(name: str, runs: int) -> None:
    found = list(read_experiments(read_file(FOLDER / f"ablation-{name}.json", "--specs"), None))
    assert len(found) == runs
    assert len({str(settings.named()) for _, settings, _ in found}) == runs


def test_encoder_outputs_are_isolated(tmp_path: Path) -> None:
    spec = read_file(FOLDER / "ablation-shapes.json", "--specs")
    spec["defaults"] |= {"max_samples": 12, "arms": ["none", "cache"]}
    wanted = ("nothing", "encoder-outputs")
    spec = {**spec, "grid": [], "experiments": [entry for entry in spec["experiments"] if entry["name"] in wanted]}
    nothing, kept = sweep(spec, tmp_path / "log.csv")
    assert nothing["encoder_runs_cache"] == nothing["encoder_runs_none"] == 12
    assert kept["encoder_runs_cache"] < 12
    assert kept["computed_cache"] == nothing["computed_cache"] == kept["computed_none"]


def test_only_the_fusion_run_keeps_encoder_outputs() -> None:
    kept = {name: settings.cache.encoder_bytes > 1 for name, settings, _ in read_experiments(ablation(["m"]))}
    assert [name for name, keeps in kept.items() if keeps] == ["m-fusion"]
