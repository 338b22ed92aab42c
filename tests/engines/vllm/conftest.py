"""Real vLLM engines on the CPU, started once per module. In an environment without vLLM nothing here is collected;
`make test` runs this folder in `.venv-vllm`, where a missing vLLM is a failure."""

import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # vllm_harness
_IN_VLLM_ENVIRONMENT = ".venv-vllm" in Path(sys.prefix).name or os.environ.get("DEJAKV_REQUIRE_VLLM") == "1"

if importlib.util.find_spec("vllm") is None and not _IN_VLLM_ENVIRONMENT:
    collect_ignore_glob = ["*test_*.py"]
else:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # prompt_logprobs would compile a kernel for a minute
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM and what it imports warn a great deal; only warnings of this package's own code stay errors."""
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings("error:::dejakv"))


def pytest_configure() -> None:
    """vLLM is imported before any test module is: at import it warns too. It looks at a model's class in this process; it
    would start another for each, which imports vllm once more."""
    if importlib.util.find_spec("vllm") is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.distributed.kv_transfer.kv_connector.v1.base  # noqa: F401
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda inspect: inspect()
