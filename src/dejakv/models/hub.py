"""The hub of models, asked once whether it answers: without a network its client would try each file for half a minute."""

import socket
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies

CONNECT_SECONDS = 5.0


@cache
def without_network() -> bool:
    """Whether only the hub's cache on this machine can be read: HF_HUB_OFFLINE is set, or the hub cannot be reached, in which case the
    client is told so. With a proxy it is taken as reachable."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not getproxies():
        address = urlsplit(constants.ENDPOINT)
        port = address.port or (80 if address.scheme == "http" else 443)
        try:
            socket.create_connection((address.hostname or "", port), CONNECT_SECONDS).close()
        except OSError:
            constants.HF_HUB_OFFLINE = True
    return bool(constants.HF_HUB_OFFLINE)
