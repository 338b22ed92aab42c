"""Names of partitions that tell a reader of the folder nothing: HMACs with a secret that is not in it."""

import hashlib
import hmac

from dejakv.errors import ConfigError
from dejakv.identity import check_partition
from dejakv.request import DEFAULT_PARTITION

SECRET = "DEJAKV_PARTITION_SECRET"
"""Where both servers, and `dejakv cache`, look for the secret."""

LEAST_SECRET = 16
"""Characters of a secret."""


class PartitionNames:
    """Stands between the names that a program chooses and those that are stored: in catalogs and in the ids of entries.

    A secret kept beside the entries would hide nothing from who reads them, so there is none by default: give one from elsewhere.
    Another secret makes other partitions. The default partition is nobody's, and keeps its name.

    Raises: ConfigError for a secret that is too short.
    """

    def __init__(self, secret: str) -> None:
        self._secret = checked(secret)

    def stored(self, partition: str) -> str:
        """The name under which a partition's entries are stored. Raises: InputError for what is no name."""
        check_partition(partition)
        return partition if partition == DEFAULT_PARTITION else f"name-{keyed(self._secret, partition)}"


def checked(secret: str) -> str:
    """The secret. Raises: ConfigError for one that is too short."""
    if len(secret) < LEAST_SECRET:
        raise ConfigError(
            f"{SECRET} has {len(secret)} characters: give {LEAST_SECRET} or more that nobody can guess, or unset it"
        )
    return secret


def keyed(secret: str, text: str) -> str:
    """HMAC-SHA-256 of a text, its first 32 hexadecimal digits."""
    return hmac.new(secret.encode("utf-8", "surrogatepass"), text.encode(), hashlib.sha256).hexdigest()[:32]
