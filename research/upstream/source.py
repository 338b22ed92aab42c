"""A Python package read from a wheel or a folder, without importing it."""

import re
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import griffe

from dejakv.engines.vllm.upstream import UpstreamUse
from dejakv.errors import DejaKVError


class SourceError(DejaKVError):
    """The package cannot be read."""


class PackageSource:
    """The modules of vLLM in a wheel, or in the folder that holds `vllm/`.

    Attributes
    ----------
    version : str
        Version that the package's metadata names, `unknown` without metadata.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            self._root: zipfile.Path | Path = path
        elif zipfile.is_zipfile(path):
            self._root = zipfile.Path(path)
        else:
            raise SourceError(f"{path} is neither a wheel nor a folder")
        if not (self._root / "vllm" / "__init__.py").is_file():
            raise SourceError(f"{path} holds no package vllm: name the folder above it")

        self.version = "unknown"
        for entry in self._root.iterdir():
            if re.match(r"vllm(_cpu)?-[^/]*\.dist-info", entry.name):
                self.version = entry.name.split("-")[1].removesuffix(".dist")

        self._modules: dict[str, griffe.Module | None] = {}

    def module(self, name: str) -> griffe.Module | None:
        """Return a module as griffe reads it, None where the package has none of that name."""
        if name not in self._modules:
            base = "/".join(name.split("."))
            files = [self._root / f"{base}/__init__.py", self._root / f"{base}.py"]
            file = next((each for each in files if each.is_file()), None)
            # griffe takes from a file's name whether it is a package.
            self._modules[name] = file and griffe.visit(
                name, Path(file.name), file.read_text(encoding="utf-8")
            )
        return self._modules[name]

    def definition(self, path: str) -> griffe.Object | None:
        """Return what a dotted path defines, through imports; None for nothing.

        Parameters
        ----------
        path : str
            For example `vllm.config.VllmConfig`, which is imported from a module below.
        """
        if module := self.module(path):
            return module
        owner, _, name = path.rpartition(".")
        holder = self.definition(owner) if owner else None
        if holder is None:
            return None

        member = holder.members.get(name)
        if member is None:
            # `from x import *` is an alias of x, under a name of its own.
            starred = [
                alias.target_path
                for alias in holder.members.values()
                if isinstance(alias, griffe.Alias) and alias.wildcard
            ]
            everywhere = (self.definition(f"{module}.{name}") for module in starred)
            return next((each for each in everywhere if each is not None), None)
        return self.definition(member.target_path) if isinstance(member, griffe.Alias) else member

    def member(self, owner: griffe.Object, name: str) -> griffe.Object | griffe.Parameter | None:
        """Return a parameter of a function, or a member of a module, a class or its bases."""
        if isinstance(owner, griffe.Function):
            parameters = {parameter.name: parameter for parameter in owner.parameters}
            return parameters.get(name)
        if isinstance(owner, griffe.Module):
            return self.definition(f"{owner.path}.{name}")

        if name in owner.members:
            member = owner.members[name]
            return None if isinstance(member, griffe.Alias) else member
        if isinstance(owner, griffe.Class):
            for base in owner.bases:
                parent = self.definition(base if isinstance(base, str) else base.canonical_path)
                if parent is not None and (inherited := self.member(parent, name)) is not None:
                    return inherited
        return None


@dataclass(frozen=True)
class UseComparison:
    """One use of vLLM in another version.

    Attributes
    ----------
    where, breaks, feature : str
        As in `UpstreamUse`.
    problems : dict[str, str]
        What is missing or has another signature, by name; empty for none.
    """

    where: str
    breaks: str
    feature: str
    problems: dict[str, str] = field(default_factory=dict)


def compare_use(use: UpstreamUse, source: PackageSource, against: PackageSource) -> UseComparison:
    """Look for a use in `source`, and compare its signatures with those in `against`."""
    problems: dict[str, str] = {}
    path = use.where.replace(":", ".")
    owner, before = source.definition(path), against.definition(path)
    if owner is None:
        problems[path.rpartition(".")[2]] = "missing"
        return UseComparison(use.where, use.breaks, use.feature, problems)

    for name in use.names.split():
        member = source.member(owner, name)
        if member is None:
            problems[name] = "missing"
            continue
        former = before and against.member(before, name)
        if former and (signature := _signature(member)) != (old := _signature(former)):
            problems[name] = f"{old} became {signature}"
    return UseComparison(use.where, use.breaks, use.feature, problems)


def _signature(member: griffe.Object | griffe.Parameter) -> str:
    """Return the parameters of a function with their kinds and whether they may be left out."""
    if not isinstance(member, griffe.Function):
        return member.kind.value if isinstance(member, griffe.Parameter) and member.kind else ""
    shown = [
        f"{parameter.name}{'' if parameter.default is None else '=...'} ({parameter.kind.value})"
        for parameter in member.parameters
        if parameter.kind is not None
    ]
    return f"({', '.join(shown)})"
