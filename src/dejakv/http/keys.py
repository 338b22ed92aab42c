"""API keys of clients. A key is a partition; the body of a request never names one."""

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

OPERATOR = "DEJAKV_OPERATOR_KEY"

MIN_SECRET_CHARACTERS = 16
"""Fewest characters of a secret."""

_ALLOWED = frozenset(map(chr, range(0x21, 0x7F))) - {","}


@dataclass(frozen=True)
class ApiCaller:
    """Caller of a request. The operator has no partition if API keys are required."""

    partition: str | None
    operator: bool = False


class ApiKeys:
    """Known keys, kept as SHA-256 digests.

    Without any key, every caller is the operator of the default partition. A key is printable ASCII
    without spaces and commas, since headers carry nothing else reliably. A key that is listed twice
    counts once.

    Parameters
    ----------
    keys : Iterable[str]
        The clients' keys.
    secret : str, optional
        Names of partitions are made with it (HMAC-SHA-256), so that whoever sees them in a folder
        cannot try which key they are of. Another secret makes other partitions. None: the names are
        made of the keys alone.
    operator : str, optional
        Key of the operator, who may do what tenants may not.

    Raises
    ------
    ConfigError
        For a key that no client could send, a secret that is too short, and an operator's key that
        protects nothing or is a tenant's.
    """

    def __init__(
        self, keys: Iterable[str] = (), secret: str | None = None, operator: str | None = None
    ) -> None:
        if secret is not None and len(secret) < MIN_SECRET_CHARACTERS:
            raise ConfigError(
                f"{SECRET} has {len(secret)} characters: give {MIN_SECRET_CHARACTERS} or more "
                "that nobody can guess, or unset it"
            )

        self._callers: dict[bytes, ApiCaller] = {}
        for number, key in enumerate(keys, start=1):
            _check(key, f"API key number {number}")
            # The name is made of the key: the same key has the same partition after a restart.
            self._callers[_digest(key)] = ApiCaller(f"key-{_name(key, secret)}")

        self.names = tuple(str(caller.partition) for caller in self._callers.values())
        """The partitions of the keys, in the order of these."""
        self.required = bool(self._callers)
        """Whether a request must bring a key."""
        self.partitions = max(1, len(self.names))
        """Number of tenants that divide the cache's budgets, at least the default one."""
        if operator is None:
            return
        _check(operator, OPERATOR)
        if not self.required:
            raise ConfigError(
                f"{OPERATOR} is set without API keys, so it protects nothing: give {VARIABLE} or "
                "a file of API keys too, "
                "or unset it"
            )

        if _digest(operator) in self._callers:
            raise ConfigError(f"{OPERATOR} is one of the API keys: give the operator another key")

        self._callers[_digest(operator)] = ApiCaller(None, operator=True)

    @classmethod
    def load(
        cls,
        text: str | None,
        file: str | Path | None,
        secret: str | None = None,
        operator: str | None = None,
    ) -> "ApiKeys":
        """Read keys from a text, separated by commas, and from a file, one a line.

        A source without any key is an error, since its owner believes that keys are required.

        Parameters
        ----------
        text : str or None
            The text; None: there is none.
        file : str, Path or None
            The file, in UTF-8 with or without a byte order mark, with any line ends; `#` begins a
            comment line. None: there is none.
        secret, operator : str, optional
            As of the class.

        Raises
        ------
        ConfigError
            As of the class, and for a source without a key or a file that cannot be read.
        """
        keys: list[str] = []
        if text is not None:
            keys += [key.strip() for key in text.removeprefix("\ufeff").split(",") if key.strip()]
            if not keys:
                raise ConfigError(
                    f"{VARIABLE} is set but holds no key: give keys separated by commas, or unset "
                    "it"
                )

        if file is not None:
            keys += _lines(Path(file).expanduser())
        return cls(keys, secret, operator)

    def caller(self, key: str | None) -> ApiCaller | None:
        """Return the owner of a key; None for a missing or unknown one.

        Keys are compared by digest, so the time tells nothing of the known ones.
        """
        if not self.required:
            return ApiCaller(DEFAULT_PARTITION, operator=True)
        return self._callers.get(_digest(key or ""))


def key_of(scope: Mapping[str, Any]) -> str | None:
    """Return the key of a request's headers; None without a key, or with two.

    The headers are `Authorization: Bearer` and, as Anthropic's clients send it, `x-api-key`.

    Raises
    ------
    RefusedError
        If one of the headers is repeated.
    """
    # With both, a proxy before us may have checked the other one.
    bearer, plain = header_of(scope, b"authorization"), header_of(scope, b"x-api-key")
    return None if bearer is not None and plain is not None else bearer_key(bearer) or plain


def bearer_key(authorization: str | None) -> str | None:
    """Return the key of an `Authorization: Bearer KEY` header (RFC 6750).

    None stands for a missing header, and for one of another scheme.
    """
    scheme, _, key = (authorization or "").strip().partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _lines(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(
            f"cannot read the API keys file {str(file)!r}: {error.strerror}; give a file that can "
            "be read"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the API keys file {str(file)!r} is not UTF-8: save it as UTF-8 text"
        ) from error

    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"the API keys file {str(file)!r} holds no key: write one a line")
    return keys


def _check(key: str, label: str) -> None:
    if not key or not _ALLOWED.issuperset(key):
        raise ConfigError(
            f"{label} cannot be sent in a header: use printable ASCII, without spaces and commas"
        )


def _name(key: str, secret: str | None) -> str:
    if secret is None:
        return _digest(key).hex()[:16]
    return hmac.new(
        secret.encode("utf-8", "surrogatepass"), key.encode(), hashlib.sha256
    ).hexdigest()[:32]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
