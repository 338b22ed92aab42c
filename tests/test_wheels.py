"""The wheels, built from the source and installed into a fresh environment."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts' folder of an environment with both wheels. What they depend on is this environment's."""
    home = tmp_path_factory.mktemp("wheels")
    for place in (ROOT, ROOT / "packages" / "dejakv-models"):
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(home / "dist")]
        subprocess.run(build, cwd=place, check=True, capture_output=True)
    venv.create(home / "env", with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "env"), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, *map(str, (home / "dist").glob("*.whl"))], check=True, capture_output=True)
    [site] = (home / "env" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return home / "env" / "bin"


def run(installed: Path, *line: str) -> str:
    """What a command prints, far from the source."""
    done = subprocess.run(
        [str(installed / line[0]), *line[1:]], cwd=installed, env={"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_is_small_and_has_what_it_needs(installed: Path) -> None:
    wheels = {path.name.split("-")[0]: path.stat().st_size for path in (installed.parents[1] / "dist").glob("*.whl")}
    assert wheels["dejakv"] < 1_500_000
    assert set(wheels) == {"dejakv", "dejakv_models"}
    where = run(installed, "python", "-c", "import dejakv; print(dejakv.__file__)")
    assert str(installed.parent) in where


def test_commands_run_from_the_wheel(installed: Path) -> None:
    assert run(installed, "dejakv", "--version").strip()
    told = run(installed, "dejakv", "estimate", "sample")
    assert "80 requests of sample.jsonl" in told
    assert "blend default" in told
    done = run(installed, "dejakv", "run", "--preset", "docs", "--max-samples", "2", "--brief")
    assert "2 prompts of docs" in done
