"""API keys: who is asking. A key is a partition; the body of a request never names one.

It knows no web framework.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejakv.errors import ConfigError
from dejakv.http.asgi import header_of
from dejakv.request import DEFAULT_PARTITION

VARIABLE = "DEJAKV_API_KEYS"
"""Where both servers look for keys separated by commas."""

SECRET = "DEJAKV_PARTITION_SECRET"
"""Where both servers, and `dejakv cache partitions`, look for the secret."""

LEAST_SECRET = 16
"""Characters of a secret."""

_ALLOWED = frozenset(map(chr, range(0x21, 0x7F))) - {","}


class ApiKeys:
    """Known keys, kept as SHA-256 digests. Without any, everybody is the default partition.

    A key is printable ASCII without spaces and commas, since headers carry nothing else reliably. A key that is
    listed twice counts once.

    secret  names of partitions are made with it (HMAC-SHA-256), so that whoever sees them, in a folder, cannot try which
            key they are of. Another secret makes other partitions. None: they are made of the keys alone

    Raises ConfigError for a key that no client could send, and for a secret that is too short.
    """

    def __init__(self, keys: Iterable[str] = (), secret: str | None = None) -> None:
        if secret is not None and len(secret) < LEAST_SECRET:
            raise ConfigError(
                f"{SECRET} has {len(secret)} characters: give {LEAST_SECRET} or more that nobody can guess, or unset it"
            )
        self._partitions: dict[bytes, str] = {}
        for number, key in enumerate(keys, start=1):
            if not key or not _ALLOWED.issuperset(key):
                raise ConfigError(
                    f"API key number {number} cannot be sent in a header: use printable ASCII characters,"
                    " without spaces and commas"
                )
            digest = _digest(key)
            self._partitions[digest] = f"key-{_name(key, digest, secret)}"

    @classmethod
    def load(cls, text: str | None, file: Path | None, secret: str | None = None) -> "ApiKeys":
        """Keys from a text, separated by commas, and from a file, one a line; `#` begins a comment line there.

        None means that there is no such source. A source that is there and holds no key is an error, since its owner
        believes that keys are required. The file is UTF-8, with or without a byte order mark, with any line ends.

        Raises: ConfigError for a source without a key, a key that no client could send, and a file that cannot be read.
        """
        keys: list[str] = []
        if text is not None:
            keys += [key.strip() for key in text.removeprefix("\ufeff").split(",") if key.strip()]
            if not keys:
                raise ConfigError(f"{VARIABLE} is set but holds no key: give keys separated by commas, or unset it")
        if file is not None:
            listed = _lines(file)
            if not listed:
                raise ConfigError(f"the API keys file {str(file)!r} holds no key: write one a line")
            keys += listed
        return cls(keys, secret)

    @property
    def required(self) -> bool:
        """Whether a request must bring a key."""
        return bool(self._partitions)

    @property
    def partitions(self) -> int:
        """How many partitions there are, at least the default one."""
        return max(1, len(set(self._partitions.values())))

    @property
    def names(self) -> tuple[str, ...]:
        """The partitions of the keys, in the order of these."""
        return tuple(self._partitions.values())

    def partition_of(self, key: str | None) -> str | None:
        """The partition of a key; None if it is missing or unknown. Takes as long for every unknown key."""
        if not self._partitions:
            return DEFAULT_PARTITION
        digest = _digest(key or "")
        found = None
        for known, partition in self._partitions.items():
            if hmac.compare_digest(known, digest):
                found = partition
        return found


@dataclass(frozen=True)
class Caller:
    """The caller of a request. The operator has no partition if API keys are required."""

    partition: str | None
    operator: bool = False


class Callers:
    """The owner of each key: a tenant or the operator.

    Raises: ConfigError for an operator's key that protects nothing, or is a tenant's.
    """

    def __init__(self, keys: ApiKeys, operator_key: str | None = None) -> None:
        self._tenants = keys
        self._operator = ApiKeys([operator_key] if operator_key is not None else [])
        if not self._operator.required:
            return
        if not self.required:
            raise ConfigError(
                "DEJAKV_OPERATOR_KEY is set without API keys, so it protects nothing: give DEJAKV_API_KEYS or a file of API keys too, "
                "or unset it"
            )
        if keys.partition_of(operator_key) is not None:
            raise ConfigError("DEJAKV_OPERATOR_KEY is one of the API keys: give the operator another key")

    @property
    def required(self) -> bool:
        """Whether a request must bring a key."""
        return self._tenants.required

    @property
    def partitions(self) -> int:
        """Number of tenants that divide the cache's budgets."""
        return self._tenants.partitions

    def caller(self, key: str | None) -> Caller | None:
        """None for a missing or unknown key."""
        if not self.required:
            return Caller(self._tenants.partition_of(None), operator=True)
        if self._operator.required and self._operator.partition_of(key) is not None:
            return Caller(None, operator=True)
        partition = self._tenants.partition_of(key)
        return Caller(partition) if partition is not None else None


def key_of(scope: Mapping[str, Any]) -> str | None:
    """The key of an `Authorization: Bearer` or, as Anthropic's clients send it, an `x-api-key` header; with both, none.

    Raises: RefusedError for a header that is there twice.
    """
    bearer, plain = header_of(scope, b"authorization"), header_of(scope, b"x-api-key")
    return None if bearer is not None and plain is not None else bearer_key(bearer) or plain


def bearer_key(authorization: str | None) -> str | None:
    """The key in an `Authorization: Bearer KEY` header (RFC 6750); None if the header is missing or of another scheme."""
    scheme, _, key = (authorization or "").strip().partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _lines(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(
            f"cannot read the API keys file {str(file)!r}: {error.strerror}; give a file that can be read"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the API keys file {str(file)!r} is not UTF-8: save it as UTF-8 text") from error
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _name(key: str, digest: bytes, secret: str | None) -> str:
    if secret is None:
        return digest.hex()[:16]
    return hmac.new(secret.encode("utf-8", "surrogatepass"), key.encode(), hashlib.sha256).hexdigest()[:32]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
