"""Who is asking: an API key is a partition. The body of a request never names one."""

import hashlib
from pathlib import Path

from dejakv.errors import ConfigError
from dejakv.request import DEFAULT_PARTITION


class ApiKeys:
    """Known keys, kept as digests. Without any, everybody is the default partition."""

    def __init__(self, keys: list[str]) -> None:
        self._partitions = {_digest(key): f"key-{_digest(key)[:16]}" for key in keys}

    @classmethod
    def load(cls, listed: str, file: Path | None) -> "ApiKeys":
        """From a comma-separated list and a file with one key a line. Raises ConfigError if the file cannot be read."""
        keys = [key.strip() for key in listed.split(",") if key.strip()]
        if listed and not keys:
            raise ConfigError("DEJAKV_API_KEYS is set but holds no key: give keys separated by commas, or unset it")
        if file is not None:
            try:
                lines = file.read_text().splitlines()
            except OSError as error:
                raise ConfigError(f"cannot read the API keys file {str(file)!r}: {error.strerror}") from error
            keys += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            if not keys:
                raise ConfigError(f"the API keys file {str(file)!r} holds no key: write one a line")
        return cls(keys)

    @property
    def required(self) -> bool:
        return bool(self._partitions)

    def partition(self, authorization: str | None) -> str | None:
        """The partition of an `Authorization: Bearer KEY` header; None if the key is missing or unknown."""
        if not self._partitions:
            return DEFAULT_PARTITION
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        return self._partitions.get(_digest(key.strip()))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
