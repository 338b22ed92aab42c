"""The wheels, built from the source and installed into a fresh environment."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels in `dist`, and environments `alone`, with dejakv's, and `both`. What they depend on is this environment's."""
    home = tmp_path_factory.mktemp("wheels")
    for place in (ROOT, ROOT / "packages" / "dejakv-models"):
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(home / "dist")]
        subprocess.run(build, cwd=place, check=True, capture_output=True)
    for name, wheels in (("alone", "dejakv-*.whl"), ("both", "*.whl")):
        venv.create(home / name, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", str(home / name), "install", "--no-deps", "--no-index"]
        subprocess.run([*pip, *map(str, (home / "dist").glob(wheels))], check=True, capture_output=True)
        [site] = (home / name / "lib").glob("python*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return home


def run(environment: Path, *line: str) -> str:
    """What a command prints, far from the source."""
    variables = {"HF_HUB_OFFLINE": "1", "COLUMNS": "200", "HOME": os.environ["HOME"]}
    done = subprocess.run(
        [str(environment / "bin" / line[0]), *line[1:]], cwd=environment, env=variables, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_is_small_and_has_what_it_needs(installed: Path) -> None:
    wheels = {path.name.split("-")[0]: path.stat().st_size for path in (installed / "dist").glob("*.whl")}
    assert wheels["dejakv"] < 1_500_000
    assert set(wheels) == {"dejakv", "dejakv_models"}
    where = run(installed / "both", "python", "-c", "import dejakv; print(dejakv.__file__)")
    assert str(installed) in where


def test_commands_run_from_the_wheel(installed: Path) -> None:
    assert run(installed / "both", "dejakv", "--version").strip()
    told = run(installed / "alone", "dejakv", "estimate", "sample")
    assert "80 requests of sample.jsonl" in told
    assert "blend default" in told
    done = run(installed / "both", "dejakv", "run", "--preset", "docs", "--max-samples", "2", "--brief")
    assert "2 prompts of docs" in done


def test_the_wheels_are_built_without_development_tools() -> None:
    """What `make dist` would do on a fresh machine: the build backend is all that it installs."""
    line = ["make", "--dry-run", "--always-make", "dist", "VENV=no-such"]
    steps = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "build --directory" in steps
    assert "[dev]" not in steps
    assert "install --quiet --disable-pip-version-check -e" not in steps
