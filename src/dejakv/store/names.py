"""The names in a store's folder. Files with other names were not written by the store, and are never opened or removed.

<folder>/dejakv-store.json  the marker that makes the folder a store
<folder>/catalog.sqlite     the index, with the descriptions of prompts
<folder>/segments/ab/...    one safetensors file a segment
<folder>/temporary/...      files that are being written
<folder>/tp-0-of-2/...      separate stores, one for each tensor-parallel rank
<folder>/trust.sqlite       evidence on approximate answers (`dejakv.trust.ledger`); trust-1.sqlite and so on after damage
<folder>/trust-....lock     held by a process that waits for labels
"""

import re

MARKER = "dejakv-store.json"
NEW_MARKER = "dejakv-store.json.new"
CATALOG = "catalog.sqlite"
CATALOG_PARTS = (CATALOG, f"{CATALOG}-wal", f"{CATALOG}-shm")
DAMAGED = f"{CATALOG}.damaged"
SEGMENTS = "segments"
TEMPORARY = "temporary"
OLD_CHUNKS = "chunks"
OLD_QUARANTINE = "quarantine"
"""Of the formats 1 and 2."""

_OLD_CHUNK = re.compile(r"(?P<group>[0-9a-f]{2})/(?P=group)[0-9a-f]{30}-[0-9a-f]{8}\.safetensors")
_SEGMENT = re.compile(r"[0-9a-f]{32}\.safetensors")
_GROUP = re.compile(r"[0-9a-f]{2}")
_OLD_SET_ASIDE = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}-[0-9a-f]{8}\.safetensors|catalog-catalog\.sqlite(-wal|-shm)?")
_EVIDENCE = re.compile(r"trust(-[1-9])?\.sqlite(-wal|-shm|-journal)?|trust-[0-9a-f]{16}\.lock")
_RANK = re.compile(r"tp-[0-9]+-of-[0-9]+")


def file_of(segment: str) -> tuple[str, str]:
    """Folder below `segments` and name of a segment's file."""
    return segment[:2], f"{segment}.safetensors"


def name_of(group: str, file: str) -> str | None:
    """The segment in a file of this folder, if it is one."""
    return file.removesuffix(".safetensors") if _SEGMENT.fullmatch(file) and file.startswith(group) else None


def old_name_of(group: str, file: str) -> str | None:
    """The path of a chunk of an older format, below `chunks`, if it is one."""
    return path if _OLD_CHUNK.fullmatch(path := f"{group}/{file}") else None


def is_group(name: str) -> bool:
    """Whether it is a subfolder of `segments`, or of `chunks`."""
    return _GROUP.fullmatch(name) is not None


def is_temporary(name: str) -> bool:
    return bool(_SEGMENT.fullmatch(name) or _OLD_CHUNK.fullmatch(name.replace("-", "/", 1)))


def is_old_set_aside(name: str) -> bool:
    return _OLD_SET_ASIDE.fullmatch(name) is not None


def evidence(number: int) -> str:
    """The file that evidence is kept in, after so many damaged ones, 9 at most."""
    return f"trust-{number}.sqlite" if number else "trust.sqlite"


def evidence_lock(process: str) -> str:
    """The file that a process of this name (16 hexadecimal digits) keeps locked while it waits for labels."""
    return f"trust-{process}.lock"


def is_evidence(name: str) -> bool:
    """Whether it is a file of `evidence`, one that SQLite keeps beside it, or a lock."""
    return _EVIDENCE.fullmatch(name) is not None


def is_rank(name: str) -> bool:
    return _RANK.fullmatch(name) is not None
