import os
import time
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_BEGAN = time.monotonic()


def pytest_report_header() -> list[str]:
    """How `make soak` set the long runs."""
    return [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("DEJAKV_SOAK_")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`make soak` ends after its minutes: no test begins later."""
    minutes = os.environ.get("DEJAKV_SOAK_MINUTES")
    if minutes is not None and time.monotonic() - _BEGAN > 60 * float(minutes):
        pytest.skip(f"the {minutes} minutes of DEJAKV_SOAK_MINUTES are over")


@pytest.fixture(scope="session")
def docs_engine() -> Any:
    """docs-lm in fp32, without an encoder registry."""
    from dejakv.engines.transformers import TransformersEngine

    return TransformersEngine.from_pretrained("docs-lm", dtype="fp32")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of smollm2-135m, fetched by the first test on a machine that asks for it (`make test` does it before)."""
    from dejakv.models.get import get

    return get("smollm2-135m")
