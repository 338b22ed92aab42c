"""The wheel and the source archive, built from the source and installed into a fresh environment."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the archives in `dist`, and environments with dejakv by its name: `alone` from the source archive,
    `both` from the wheel and beside dejakv-models. What they depend on is this environment's."""
    home = tmp_path_factory.mktemp("wheels")
    for place, targets in ((ROOT, ["sdist", "wheel"]), (ROOT / "packages" / "dejakv-models", ["wheel"])):
        build = [sys.executable, "-m", "hatchling", "build", "--directory", str(home / "dist")]
        for target in targets:
            build += ["--target", target]
        subprocess.run(build, cwd=place, check=True, capture_output=True)
    from_source = ["--no-build-isolation", "--no-binary=dejakv", "dejakv"]
    for name, packages in (
        ("alone", from_source),
        ("both", ["--only-binary=:all:", "dejakv[models]", "dejakv-models"]),
    ):
        venv.create(home / name, with_pip=False)
        [site] = (home / name / "lib").glob("python*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        # Not what this environment has: pip would find it by the line above and install nothing.
        pip = [sys.executable, "-m", "pip", "--python", str(home / name), "install", "--no-deps", "--ignore-installed"]
        index = ["--no-index", "--find-links", str(home / "dist")]
        subprocess.run([*pip, *index, *packages], check=True, capture_output=True)
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


@pytest.mark.slow
def test_the_archives_are_small_and_have_what_they_need(installed: Path) -> None:
    wheels = {path.name.split("-")[0]: path.stat().st_size for path in (installed / "dist").glob("*.whl")}
    assert wheels["dejakv"] < 1_800_000
    assert set(wheels) == {"dejakv", "dejakv_models"}
    [source] = (installed / "dist").glob("*.tar.gz")
    assert source.stat().st_size < 3_500_000  # without the models' weights
    for name in ("alone", "both"):
        where = run(installed / name, "python", "-c", "import dejakv; print(dejakv.__file__)")
        assert str(installed / name) in where


@pytest.mark.slow
def test_commands_run_from_the_wheel(installed: Path) -> None:
    assert run(installed / "both", "dejakv", "--version").strip()
    told = run(installed / "alone", "dejakv", "estimate", "sample")
    assert "80 requests of sample.jsonl" in told
    assert "blend default" in told
    done = run(installed / "both", "dejakv", "run", "--preset", "docs", "--max-samples", "2", "--brief")
    assert "2 prompts of docs" in done


def test_pages_install_by_name_and_every_extra_has_its_task() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    page = ROOT / "docs" / "how-to" / "install.md"
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert "'.[" not in text, path
        named = {extra for extras in re.findall(r"dejakv\[([\w,-]+)\]", text) for extra in extras.split(",")}
        assert named <= extras, path
    by_task = "\n".join(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|"))
    told = {extra for extras in re.findall(r"dejakv\[([\w,-]+)\]", by_task) for extra in extras.split(",")}
    assert told == extras - {"dev", "docs", "test", "test-frameworks"}


def test_the_wheels_are_built_without_development_tools() -> None:
    """What `make dist` would do on a fresh machine: the build backend is all that it installs."""
    line = ["make", "--dry-run", "--always-make", "dist", "VENV=no-such"]
    steps = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "build --directory" in steps
    assert "[dev]" not in steps
    assert "install --quiet --disable-pip-version-check -e" not in steps
