"""A proxy on loopback in front of a service, which delays, loses answers and answers 503 itself."""

import asyncio
import random
import re
import threading
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass

_HTTP = re.compile(rb"(GET|PUT|POST|HEAD|DELETE) /")
_REFUSED = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True)
class Faults:
    """Chances, for each request.

    delay   of a wait of `seconds` before it goes on
    lost    of an answer that is lost, with its connection, after the service has done what was
            asked
    held    of an answer that never comes, while the connection stays
    failed  of a 503 in place of the service's answer, where the service speaks HTTP
    """

    delay: float = 0.0
    lost: float = 0.0
    held: float = 0.0
    failed: float = 0.0
    seconds: tuple[float, float] = (0.05, 0.5)


CALM = Faults()


class Proxy:
    """Forwards to a port of this machine from its own `port`, in a thread of its own.

    `faults` may be set at any time; `done` counts them.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self.faults = CALM
        self.done = Counter[str]()
        self._target, self._random = target, random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            for _ in range(3):  # what was closed leaves with the loop's next rounds
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _drawn(self) -> str:
        """The fault of a request; empty for none."""
        faults, at = self.faults, self._random.random()
        for name in ("delay", "lost", "held", "failed"):
            at -= getattr(faults, name)
            if at < 0:
                self.done[name] += 1
                return name
        return ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The service may be away, or the proxy is closed.
        with closing(writer), suppress(OSError, asyncio.CancelledError):
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            link = _Link()
            ways = [
                asyncio.ensure_future(self._requests(link, reader, back, writer)),
                asyncio.ensure_future(self._answers(link, there, writer)),
            ]
            with closing(back):
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _requests(
        self,
        link: "_Link",
        reader: asyncio.StreamReader,
        back: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
    ) -> None:
        while data := await reader.read(1 << 16):
            if link.answered or _HTTP.match(data):  # a new request
                link.answered, link.fault = False, self._drawn()
                if link.fault == "delay":
                    await asyncio.sleep(self._random.uniform(*self.faults.seconds))
                if link.fault == "failed":
                    if _HTTP.match(data):
                        writer.write(_REFUSED)
                        await writer.drain()
                    return
            back.write(data)
            await back.drain()

    async def _answers(
        self, link: "_Link", there: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await there.read(1 << 16):
            link.answered = True
            if link.fault == "lost":
                return
            if link.fault == "held":
                await asyncio.sleep(3600)
            writer.write(data)
            await writer.drain()


class _Link:
    """A connection: the fault of its latest request, and whether that has been answered."""

    def __init__(self) -> None:
        self.fault, self.answered = "", True
