"""`python -m research.upstream`: what another vLLM lacks is named, from its source alone."""

import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from research.upstream.__main__ import compare_upstream
from research.upstream.source import PackageSource, SourceError, compare_use

from dejakv.engines.vllm.upstream import USES, UpstreamUse

SITE = Path(find_spec("vllm").origin).parents[1]

KNOWN = {
    "__init__.py": "from .inner import *\nfrom .deep.module import Blocks as Pool\n",
    "inner.py": "def rank(): ...\n",
    "deep/__init__.py": "",
    "deep/module.py": """
from vllm.inner import rank
from vllm.base import Base

class Blocks(Base):
    size: int = 0
    def __init__(self, count):
        self.count = count
    def take(self, ids, *, wait=True): ...
""",
    "base.py": "class Base:\n    def reset(self): ...\n",
}
USE = UpstreamUse("vllm.deep.module:Blocks", "size count take reset", "nothing is stored")


def _package(folder: Path, **changes: str) -> PackageSource:
    for name, text in (KNOWN | {name.replace("__", "/") + ".py": text for name, text in changes.items()}).items():
        file = folder / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return PackageSource(folder)


@pytest.mark.parametrize(
    ("module", "problems"),
    [
        (KNOWN["deep/module.py"], {}),
        (KNOWN["deep/module.py"].replace("wait=True", "wait=False"), {}),
        (KNOWN["deep/module.py"].replace("self.count", "self.number"), {"count": "missing"}),
        (KNOWN["deep/module.py"].replace("Blocks(Base)", "Blocks"), {"reset": "missing"}),
        (KNOWN["deep/module.py"].replace("size: int", "bytes: int"), {"size": "missing"}),
        ("from vllm.base import Blocks", {"Blocks": "missing"}),
        (
            KNOWN["deep/module.py"].replace("ids, *, wait=True", "ids, wait"),
            {
                "take": "(self (positional or keyword), ids (positional or keyword), wait=... (keyword-only)) became "
                "(self (positional or keyword), ids (positional or keyword), wait (positional or keyword))"
            },
        ),
    ],
)
def test_compare_use_names_what_changed(tmp_path: Path, module: str, problems: dict[str, str]) -> None:
    known, other = _package(tmp_path / "known"), _package(tmp_path / "other", deep__module=module)
    assert compare_use(USE, other, known).problems == problems


@pytest.mark.parametrize("name", ["rank", "Pool", "inner", "deep"])
def test_compare_use_follows_imports(tmp_path: Path, name: str) -> None:
    """Also those with a star, and modules that nobody imports."""
    known = _package(tmp_path)
    assert compare_use(UpstreamUse("vllm", name, ""), known, known).problems == {}
    assert compare_use(UpstreamUse("vllm", f"{name}s", ""), known, known).problems == {f"{name}s": "missing"}


def test_package_source_reads_a_wheel(tmp_path: Path) -> None:
    known = _package(tmp_path / "known")
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for file in (tmp_path / "known").rglob("*.py"):
            wheel.write(file, file.relative_to(tmp_path / "known"))
        wheel.writestr("vllm-9.8.7.dist-info/METADATA", "")
    wheel_source = PackageSource(tmp_path / "vllm.whl")
    assert wheel_source.version == "9.8.7"
    assert compare_use(USE, wheel_source, known).problems == {}


def test_package_source_refuses_what_holds_no_vllm(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    with pytest.raises(SourceError, match="neither a wheel nor a folder"):
        PackageSource(tmp_path / "text")
    with pytest.raises(SourceError, match="no package vllm: name the folder above it"):
        PackageSource(tmp_path)


def test_the_installed_vllm_has_every_use(capsys: pytest.CaptureFixture[str]) -> None:
    """As the start of a connector finds, which imports it."""
    compare_upstream(SITE)
    assert "0 of " in capsys.readouterr().out
    assert not [name for use in USES for name in use.missing()]
