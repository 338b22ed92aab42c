"""`research.verify_runs` counts the alarms of `dejakv verify`, against the small server of words."""

import json
from pathlib import Path

import pytest
from research.verify_runs import main
from tests.verify.stub_server import Stub, serve

from dejakv.errors import ConfigError


def test_runs_of_a_server_are_added_up_and_alarms_counted(tmp_path: Path) -> None:
    output = tmp_path / "runs.json"
    for fault in ("", "layers"):
        server = serve(Stub(fault=fault))
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            for _ in range(2):
                main(url=url, model="stub", runs=1, seconds=1, output=output)
        finally:
            server.shutdown()
            server.server_close()
        cell = json.loads(output.read_text())[f"{url}, stub"]
        assert (cell["summary"]["runs"], len(cell["rows"])) == (2, 2)
        assert cell["summary"]["alarms"] == (2 if fault else 0)
        assert cell["summary"]["answers"] == sum(row["answers"] for row in cell["rows"]) > 0
        assert len({row["seed"] for row in cell["rows"]}) == 2


def test_a_server_that_is_not_known_is_a_mistake_with_the_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of serve, "):
        main(server=["no-such"], output=tmp_path / "runs.json")
