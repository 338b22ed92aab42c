"""A pretended GPU under the worker side of vLLM's connector. Without vLLM nothing here is collected."""

import importlib.util
import os
import sys
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
_IN_VLLM_ENVIRONMENT = ".venv-vllm" in Path(sys.prefix).name or os.environ.get("DEJAKV_REQUIRE_VLLM") == "1"

if importlib.util.find_spec("vllm") is None and not _IN_VLLM_ENVIRONMENT:
    collect_ignore_glob = ["*test_*.py"]
else:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def pytest_configure() -> None:
    """vLLM is imported before any test module is: at import it warns."""
    if importlib.util.find_spec("vllm") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import vllm.forward_context  # noqa: F401
            from vllm.model_executor.models import registry

            registry._run_in_subprocess = lambda inspect: inspect()  # the process would import vllm once more


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def config() -> Generator[Any]:
    """vLLM's configuration, which a forward wants."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs

        from dejakv.models import resolve

        made = EngineArgs(
            model=str(resolve("docs-lm")),
            dtype="bfloat16",
            max_model_len=256,
            enforce_eager=True,
            block_size=32,
            async_scheduling=False,
        ).create_engine_config()
        made.scheduler_config.max_num_seqs = 1024
        with set_current_vllm_config(made):
            yield made
