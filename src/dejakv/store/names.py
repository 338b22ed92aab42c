"""The names in a store's folder. Files with other names were not written by the store, and are never opened or removed.

<folder>/dejakv-store.json  the marker that makes the folder a store
<folder>/catalog.sqlite     description of each chunk
<folder>/chunks/ab/...      one safetensors file a chunk
<folder>/temporary/...      files that are being written
<folder>/quarantine/...     damaged files, a few of the latest
<folder>/tp-0-of-2/...      separate stores, one for each tensor-parallel rank
<folder>/trust.sqlite       evidence on approximate answers (`dejakv.trust.disk`); trust-1.sqlite and so on after damage
<folder>/trust-....lock     held by a process that waits for labels
"""

import re
import secrets

from dejakv.identity import digest_of

MARKER = "dejakv-store.json"
NEW_MARKER = "dejakv-store.json.new"
CATALOG = "catalog.sqlite"
CATALOG_PARTS = (CATALOG, f"{CATALOG}-wal", f"{CATALOG}-shm")
DAMAGED = f"{CATALOG}.damaged"
CHUNKS = "chunks"
TEMPORARY = "temporary"
QUARANTINE = "quarantine"

_CHUNK = re.compile(r"(?P<group>[0-9a-f]{2})/(?P=group)[0-9a-f]{30}-[0-9a-f]{8}\.safetensors")
_GROUP = re.compile(r"[0-9a-f]{2}")
_SET_ASIDE = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}-[0-9a-f]{8}\.safetensors|catalog-catalog\.sqlite(-wal|-shm)?")
_EVIDENCE = re.compile(r"trust(-[1-9])?\.sqlite(-wal|-shm|-journal)?|trust-[0-9a-f]{16}\.lock")
_RANK = re.compile(r"tp-[0-9]+-of-[0-9]+")


def new_chunk(id: str) -> str:
    """A path below `chunks` that no other file has, in one of 256 subfolders."""
    stem = digest_of(id)[:32]
    return f"{stem[:2]}/{stem}-{secrets.token_hex(4)}.safetensors"


def temporary_of(chunk: str) -> str:
    """The temporary name of a chunk's file while it is written."""
    return chunk.replace("/", "-")


def owner_of(partition: str) -> str:
    """The mark of a partition on files set aside, so that clearing the partition finds them."""
    # Text from a damaged row may be invalid Unicode.
    return digest_of(partition.encode(errors="surrogateescape"))[:16]


def is_chunk(name: str) -> bool:
    """Whether it is a path of `new_chunk`."""
    return _CHUNK.fullmatch(name) is not None


def is_group(name: str) -> bool:
    """Whether it is a subfolder of `chunks`."""
    return _GROUP.fullmatch(name) is not None


def is_temporary(name: str) -> bool:
    return is_chunk(name.replace("-", "/", 1))


def is_set_aside(name: str) -> bool:
    return _SET_ASIDE.fullmatch(name) is not None


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
