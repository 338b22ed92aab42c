"""Which LoRA adapter a request computes with, and whether that is proven.

A vLLM worker reads an adapter's files once, when its `lora_int_id` is first used, and again after it was evicted or loaded in
place. It tells nobody what it read, and an id is the client's or the API server's choice. So an adapter's state is shared only
as long as its files are what they were when the server started and its id has stood for one folder: then whatever the
worker read, and whenever, is what the fingerprint is of. Anything else is answered without reuse, with the reason.
"""

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dejakv.engines.vllm.identity import WEIGHTS, folder_fingerprint
from dejakv.identity import epoch_of

_Stamp = tuple[tuple[str, int, int, int, int], ...]


class UnprovenAdapter(Exception):
    """Nothing proves which weights a request's adapter has."""


class Adapters:
    """The adapters of one server.

    base       epoch of the server without an adapter, set anew when the weights may have changed (`generations`)
    applied    how the server applies adapters: what equal files may still differ by
    forbidden  why no adapter's state is reused here, empty if it may be
    leaks      vLLM's kernels apply an adapter to base-model rows of the same step (`upstream.adapters_leak`)
    """

    def __init__(
        self, base: str, applied: Mapping[str, object] | None = None, forbidden: str = "", leaks: bool = False
    ) -> None:
        self.base = base
        self._applied = dict(applied or {})
        self._forbidden = forbidden
        self._leaks = leaks
        self._mixed = False
        self._began = time.time_ns()
        self._bound: dict[int, tuple[str, bool]] = {}
        self._barred: dict[int | str, str] = {}
        self._seen: dict[str, tuple[_Stamp, str]] = {}

    def note(self, lora: Any) -> None:
        """Takes in every request's adapter (None: no adapter) before the worker does. Touches no disk."""
        if lora is None:
            return
        mine = (str(lora.lora_path), bool(lora.is_3d_lora_weight))
        bound = self._bound.setdefault(lora.lora_int_id, mine)
        if lora.load_inplace:
            self._bar(lora.lora_int_id, bound, mine, "its adapter was loaded in place, over other weights of its id")
        elif bound != mine:
            why = f"lora_int_id {lora.lora_int_id} has stood for two adapters, and vLLM goes by it: give each its own"
            self._bar(lora.lora_int_id, bound, mine, why)

    def step(self, loras: Iterable[Any]) -> None:
        """Takes in the adapters of the requests that the next step computes."""
        if self._leaks and not self._mixed:
            self._mixed = len({lora is None for lora in loras}) == 2

    def may_store(self, lora: Any) -> bool:
        """Whether what was computed with this adapter up to the last step is surely its state.

        Once base-model rows were computed wrongly, vLLM's own prefix cache may serve them to any later base request.
        """
        return not (self._mixed if lora is None else self.doubt(lora))

    def _bar(self, lora_id: int, bound: tuple[str, bool], mine: tuple[str, bool], why: str) -> None:
        """vLLM's own blocks, which go by the folder, may hold what other weights computed: another id does not help."""
        for key in (lora_id, bound[0], mine[0]):
            self._barred.setdefault(key, why)

    def epoch_of(self, lora: Any) -> str:
        """The epoch of a request with this adapter (None: the base model). Raises UnprovenAdapter."""
        if lora is None:
            return self.base
        why = self.doubt(lora)
        if why:
            raise UnprovenAdapter(why)
        path = str(lora.lora_path)
        if path not in self._seen:
            folder = Path(path).expanduser()
            before = _stamp(folder)
            content = folder_fingerprint(folder)
            if content is None:
                raise UnprovenAdapter(f"its adapter's folder holds none of {', '.join(WEIGHTS)}")
            self._seen[path] = (before, content)
        content = self._seen[path][1]
        return epoch_of({"base": self.base, "files": content, "3d": bool(lora.is_3d_lora_weight), **self._applied})

    def doubt(self, lora: Any) -> str:
        """Why this adapter's state must not be used now, empty if it may be. A few `stat` calls."""
        if lora is None:
            return ""
        path = str(lora.lora_path)
        why = self._forbidden or self._barred.get(lora.lora_int_id) or self._barred.get(path)
        if why:
            return why
        try:
            stamp = _stamp(Path(path).expanduser())
        except OSError:
            return "its adapter is not a folder of this machine: download it and name the folder"
        changed = path in self._seen and self._seen[path][0] != stamp
        if changed or max(item[-1] for item in stamp) > self._began:
            return "its adapter's files are newer than the server, which may hold older weights: restart the server"
        return ""


def _stamp(folder: Path) -> _Stamp:
    """Name, inode, size and times (ns; last the change of inode) of everything that decides what reading a folder gives.

    Raises: OSError if there is no such folder.
    """
    links = [path for path in (folder.absolute(), *folder.absolute().parents) if path.is_symlink()]
    files = [path for path in sorted(folder.iterdir()) if path.match("*.json") or any(map(path.match, WEIGHTS))]
    found = [(str(folder.resolve()), folder.stat())]
    found += [(str(path), path.stat()) for path in files]
    found += [(str(path), os.lstat(path)) for path in links + [path for path in files if path.is_symlink()]]
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)
