import os
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def docs_engine() -> Any:
    """docs-lm in fp32, without an encoder registry."""
    from dejakv.engines.transformers import TransformersEngine

    return TransformersEngine.from_pretrained("docs-lm", dtype="fp32")
