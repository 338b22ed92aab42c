import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


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
