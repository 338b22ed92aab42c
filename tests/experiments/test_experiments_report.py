"""Reports: complete, self-contained, legible in a real browser; bad sources are refused and nothing is overwritten."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from dejakv.errors import ConfigError
from dejakv.experiments.estimate import estimate
from dejakv.experiments.reports.report import make_report
from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from
from dejakv.experiments.sweep import sweep

_MEASURE = (
    "<script>addEventListener('load',()=>document.documentElement.setAttribute('data-measured',"
    "document.documentElement.scrollWidth+' '+innerWidth+' '+performance.getEntriesByType('resource').length))</script>"
)

_AXE = (
    "<script>axe.run().then(({violations})=>document.documentElement.setAttribute('data-axe',JSON.stringify(Object.fromEntries("
    "violations.filter(({impact})=>['serious','critical'].includes(impact)).map(({id,nodes})=>[id,nodes.map(({html})=>html)])))))</script>"
)


def measured(page: Path, width: int) -> tuple[int, int, int]:
    """Width of the content, width of the window, and resources that were loaded beside the page."""
    copy = page.with_name("measured.html")
    loose = re.sub(
        r"<meta http-equiv=[^>]*>", "", page.read_text()
    )  # the page's policy forbids the script that measures
    copy.write_text(loose.replace("</body>", f"{_MEASURE}</body>"))
    told = _chromium(copy, "--dump-dom", f"--window-size={width},1200", "--virtual-time-budget=2000")
    found = re.search(r'data-measured="(\d+) (\d+) (\d+)"', told)
    assert found is not None, told[:500]
    return int(found[1]), int(found[2]), int(found[3])


def barriers(page: Path, *, dark: bool = False) -> dict[str, list[str]]:
    """Serious and critical findings of axe-core in a page, all folded parts open: rule, and the elements."""
    copy = page.with_name("axe.html")
    loose = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text()).replace("<details>", "<details open>")
    axe = files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    copy.write_text(loose.replace("</body>", f"<script>{axe}</script>{_AXE}</body>"))
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    told = _chromium(copy, "--dump-dom", "--window-size=1200,1200", "--virtual-time-budget=20000", *scheme)
    found = re.search(r'data-axe="([^"]*)"', told)
    assert found is not None, told[-500:]
    return json.loads(html.unescape(found[1]))


def _chromium(page: Path, *arguments: str) -> str:
    if shutil.which("chromium") is None:
        pytest.skip("no chromium: this page was not looked at in a browser")
    line = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={page.parent / 'profile'}",
        *arguments,
    ]
    return subprocess.run([*line, page.as_uri()], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has changed answers, a dry run, a sweep and an estimate."""
    home = tmp_path_factory.mktemp("sources")
    wrong = {"max_samples": 24, "output": str(home / "run")}
    run(settings_from("shapes", wrong, {"media": "ignore"}))
    run(settings_from("shapes", {"max_samples": 12, "cache_mode": "dry-run", "output": str(home / "dry")}, {}))
    defaults = {"preset": "docs", "max_samples": 3}
    bad = {"name": "bad", "dataset": "jsonl", "dataset_path": str(home / "missing.jsonl")}
    sweep(
        {"defaults": defaults, "grid": {"similarity_threshold": [0.5, 0.9]}, "experiments": [bad]}, home / "sweep.csv"
    )
    (home / "log.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{name} & <b>", "answer": "x"}) + "\n" for name in "aba")
    )
    (home / "estimate").mkdir()
    (home / "estimate" / "estimate.json").write_text(json.dumps(estimate(str(home / "log.jsonl"), "docs-lm")))
    return home


@pytest.fixture(scope="module")
def report(sources: Path) -> Path:
    names = ("run", "dry", "sweep.csv", "estimate")
    make_report([sources / name for name in names], sources / "report.html")
    return sources / "report.html"


class Reader(HTMLParser):
    """Checks that elements are closed in order and that ids are unique, and collects what could be loaded."""

    VOID = frozenset(("meta", "img", "br"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            if values.get(name):
                self.loads.append(str(values[name]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(report: Path) -> None:
    page = report.read_text()
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert len(set(reader.ids)) == len(reader.ids)
    assert not [address for address in reader.loads if not address.startswith("data:image/png;base64,")]
    assert "<script" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert "default-src 'none'" in page


def test_what_each_section_tells(report: Path) -> None:
    page = report.read_text()
    for words in (
        "Run run: shapes-vlm on shapes", "hits by level", "encoder runs",
        "computed in full", 'src="data:image/png', "dejakv run --model shapes-vlm", "--media ignore", "Run dry:", "would-be hits",
        "Sweep sweep.csv", "similarity_threshold-0.9", "bad failed:", "Estimate for log.jsonl",
        "Reuse does not pay here",
    ):  # fmt: skip
        assert words in page, words


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_scrolling_sideways(report: Path, width: int) -> None:
    content, window, loaded = measured(report, width)
    assert content <= window
    assert loaded == 0


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_serious_barrier(report: Path, dark: bool) -> None:
    assert barriers(report, dark=dark) == {}


def test_an_earlier_report_is_replaced_and_another_file_is_not(sources: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    make_report([sources / "dry"], page)
    make_report([sources / "estimate"], page)
    assert "Estimate for" in page.read_text()
    page.write_text("<html>mine</html>")
    with pytest.raises(ConfigError, match="is no report of ours"):
        make_report([sources / "dry"], page)
    assert page.read_text() == "<html>mine</html>"


def stopped(folder: Path) -> None:
    (folder / "summary.json").unlink()


def interrupted(folder: Path) -> None:
    told = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**told, "stopped_before": 99}))


def without_samples(folder: Path) -> None:
    (folder / "samples.jsonl").unlink()


def damaged(folder: Path) -> None:
    (folder / "samples.jsonl").write_text('{"id": 1}\n')


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (stopped, "was stopped before its end: finish it with dejakv run --resume"),
        (interrupted, "was stopped before its end"),
        (without_samples, "samples.jsonl cannot be read"),
        (damaged, "samples.jsonl cannot be read"),
    ],
)
def test_a_run_that_cannot_be_reported(harm: Any, says: str, sources: Path, tmp_path: Path) -> None:
    shutil.copytree(sources / "run", tmp_path / "run")
    harm(tmp_path / "run")
    with pytest.raises(ConfigError, match=says):
        make_report([tmp_path / "run"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing", None, "no file or folder"),
        (".", None, "has nothing to report"),
        ("other.csv", "name,model\n", "is no log of a sweep"),
        ("estimate.json", "{}", "was not written by this version"),
        ("estimate.json", '{"rows": [{}]}', "was not written by this version"),
        ("estimate.json", "[", "was not written by this version"),
    ],
)
def test_sources_that_are_none(name: str, content: str | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=says):
        make_report([tmp_path / name], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
