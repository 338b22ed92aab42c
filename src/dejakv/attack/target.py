"""A server to attack: its address, the clients of two keys, and whether it is the operator's own or this process's."""

import ipaddress
import socket
import ssl
from contextlib import ExitStack, closing
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from dejakv.attack.client import Client, GoneError, Pace
from dejakv.errors import ConfigError

PER_SECOND, TOTAL = 20.0, 4000
"""What is sent to a server that is not this process's."""
LARGEST_REMOTE = 1 << 20
"""Bytes of the largest body that is sent to it."""
NO_KEYS = "the server requires no API keys, so that all its callers share one partition"
ONE_KEY = "one key has one partition: give --other-key too"


@dataclass
class Target:
    """first, second  the clients of two partitions; `second` is None with one key, or where all callers are one
    nobody         a client without a key
    alone          why there is no second partition
    own            it runs in this process, with a small budget of entries and nobody else's requests"""

    url: SplitResult
    first: Client
    second: Client | None
    nobody: Client
    pace: Pace
    model: str
    alone: str = ""
    own: bool = False

    def connect(self) -> socket.socket:
        """A plain connection, for what no client would send. Reading from it fails after 30 seconds."""
        self.pace.wait()
        secure = self.url.scheme == "https"
        address = (self.url.hostname or "", self.url.port or (443 if secure else 80))
        connection = socket.create_connection(address, timeout=30)
        if not secure:
            return connection
        return ssl.create_default_context().wrap_socket(connection, server_hostname=address[0])

    def close(self) -> None:
        for client in (self.first, self.second, self.nobody):
            if client is not None:
                client.close()


def address_of(url: str) -> SplitResult:
    """Raises: ConfigError for what is no address of a server."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known, parts = False, urlsplit("")
    if not known or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"--server {url[:200]!r} is no address of a server: give http://HOST:PORT")
    return parts


def is_loopback(url: SplitResult) -> bool:
    """Whether the address is this machine's own, by its name or number alone: no name is looked up."""
    host = url.hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_target(url: SplitResult, key: str | None, other: str | None, pace: Pace, *, own: bool = False) -> Target:
    """The server, after a look at it. Raises: ConfigError if it does not answer, is none of DejaKV's, or refuses a key."""
    if key is not None and key == other:
        raise ConfigError("--api-key and --other-key are the same key, which has one partition: give another one")
    with ExitStack() as opened:
        nobody = opened.enter_context(closing(Client(url, None, pace)))
        given = [one for one in (key, other) if one is not None] or [None]
        clients = [opened.enter_context(closing(Client(url, one, pace))) for one in given]
        model, open_to_all = _looked_at(url, clients, nobody, key)
        opened.pop_all()
    second = clients[1] if len(clients) > 1 and not open_to_all else None
    if second is None and len(clients) > 1:
        clients[1].close()
    alone = NO_KEYS if open_to_all else "" if second is not None else ONE_KEY
    return Target(url, clients[0], second, nobody, pace, model, alone, own)


def _looked_at(url: SplitResult, clients: list[Client], nobody: Client, key: str | None) -> tuple[str, bool]:
    """The server's model, and whether it serves callers without a key."""
    shown = url.geturl()
    try:
        open_to_all = nobody.get("/v1/cache/stats").status == 200
        for flag, client in zip(("--api-key", "--other-key"), clients, strict=False):
            reply = client.get("/v1/cache/stats")
            if reply.status == 401 and key is None:
                raise ConfigError(f"{shown} refuses callers without a key: give --api-key and --other-key")
            if reply.status == 401:
                raise ConfigError(f"{shown} refuses the key of {flag}: give one of its API keys (see docs/server.md)")
            if reply.status != 200 or "lookups" not in reply.json:
                raise ConfigError(
                    f"--server {shown} is no server of DejaKV (/v1/cache/stats: {reply.status}): give its address"
                )
        listed = clients[0].get("/v1/models").json.get("data") or [{}]
    except GoneError as error:
        raise ConfigError(f"--server: {error}: start it, or give its address") from error
    return str(listed[0].get("id", "")), open_to_all
