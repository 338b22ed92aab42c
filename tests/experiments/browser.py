"""Pages as headless Chromium shows them. `make test` installs `chromium` where Debian's packages can be installed."""

import html
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

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
