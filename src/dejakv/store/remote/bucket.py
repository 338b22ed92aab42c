"""Objects in a bucket through `obstore`: S3 and its relatives, Google Cloud Storage, Azure.

    <prefix>/dejakv-store.json              the marker: which format the objects have
    <prefix>/segments/NAME.safetensors      one object a segment
    <prefix>/tombstones/N                   see `tombstones`

Objects are created and never written over (`If-None-Match`), so that replicas need no transaction.
Credentials, region and endpoint are those of the environment, as `obstore` finds them. Other
objects below the prefix are never read or removed.
"""

import errno
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np

from dejakv.errors import MissingExtraError, StoreError
from dejakv.store.base import CorruptState
from dejakv.store.claim import FORMAT, MARKER, RANK, SEGMENT, SEGMENTS
from dejakv.store.counters import logger
from dejakv.store.objects import Bytes, ObjectMissing, Objects, StoreUnavailable
from dejakv.store.remote.health import CircuitBreaker, LinkTiming
from dejakv.store.remote.packed import MORE, check_zstd, packed, unpacked, unpacked_head
from dejakv.store.remote.tombstones import TombstoneSet

# HTTP is used only where the endpoint says so.
_CLIENT = {"connect_timeout": "2s", "timeout": "20s", "allow_http": True}
_RETRY = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
}
_TOMBSTONES = "tombstones"
_DENIED = re.compile(r"401 Unauthorized|403 Forbidden|privileges")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
_FULL = re.compile(r"507 Insufficient|QuotaExceeded|StorageFull|InsufficientStorage")
_REMEDIES = (
    (_NO_BUCKET, "make the bucket, or name another"),
    (_FULL, "it is full: make room in it or raise its quota"),
    (
        re.compile(r"Object Lock"),
        "use a bucket without object lock: what is stored must be removable",
    ),
    (
        re.compile(r"169\.254\.\d|metadata\.google|Account must be specified|token request"),
        "no credentials were found: set them in the environment (s3: AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY; gs: "
        "GOOGLE_APPLICATION_CREDENTIALS; az: AZURE_STORAGE_ACCOUNT_NAME and "
        "AZURE_STORAGE_ACCOUNT_KEY)",
    ),
    (
        re.compile(r"301 Moved|PermanentRedirect|AuthorizationHeaderMalformed|region"),
        "the bucket is in another region: set AWS_REGION to the bucket's",
    ),
    (
        re.compile(r"RequestTimeTooSkewed"),
        "this machine's clock differs from the service's: set it",
    ),
    (
        _DENIED,
        "the credentials of the environment are refused: they must let you read, write, delete "
        "and list below the prefix",
    ),
    (
        re.compile(r""),
        "see that the service answers and that the endpoint is right (of S3: AWS_ENDPOINT_URL)",
    ),
)
"""Patterns of a service's message with their remedies; the first match counts."""


class BucketObjects(Objects):
    """Objects below the prefix of a bucket.

    Parameters
    ----------
    url : str
        `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`.
    compress : bool
        Whether to pack what is put. Packed objects are read in either case.
    make : bool
        False: nothing is written at the start, and there may be no store.

    Raises
    ------
    MissingExtraError
        Without obstore, or without zstandard for `compress`.
    StoreError
        If the bucket cannot be used, with what to change.
    """

    shared = True

    def __init__(self, url: str, compress: bool = False, make: bool = True) -> None:
        try:
            import obstore.store
            from obstore.exceptions import AlreadyExistsError, BaseError
        except ImportError as error:
            raise MissingExtraError("obstore", "remote", f"the store {url}") from error

        self.url = url.rstrip("/")
        self._exists = AlreadyExistsError
        self._errors = (BaseError, OSError, ValueError)
        if compress:
            check_zstd()

        self._compress = compress
        self.breaker, self.link = CircuitBreaker(), LinkTiming()
        self.tombstones = TombstoneSet(self)
        try:
            options: Any = {"client_options": _CLIENT, "retry_config": _RETRY}
            self._store: Any = obstore.store.from_url(self.url, **options)
            self._check(make)
        except (*self._errors, StoreUnavailable, ObjectMissing, CorruptState) as error:
            message = str(error.__cause__ or error).partition("\n\nDebug source")[0]
            remedy = next(remedy for pattern, remedy in _REMEDIES if pattern.search(message))
            raise StoreError(
                f"{self.url} cannot be a store ({_error_line(message)}): {remedy}"
            ) from error

    def put(self, name: str, parts: Sequence[Any]) -> bool:
        """Create an object; False if the name is taken."""
        # One request and no multipart upload: the object is there whole, or not at all.
        return self._create(_path(name), packed(parts) if self._compress else b"".join(parts))

    def get(self, name: str) -> Bytes:
        """Return all bytes of an object, unpacked."""
        return unpacked(
            np.frombuffer(self._read(lambda: self._store.get(_path(name)).bytes(), name), np.uint8),
            name,
        )

    def head(self, name: str, size: int) -> tuple[bytes, int]:
        """Return the first bytes of an object and its size, both as they were before packing.

        Parameters
        ----------
        name : str
            Name of the object.
        size : int
            Bytes wanted. A packed object gives no byte behind its description.

        Raises
        ------
        ObjectMissing
            If there is no such object.
        StoreUnavailable
            If the service fails.
        """

        def read() -> tuple[bytes, int]:
            # A packed object's description begins later.
            response = self._store.get(_path(name), options={"range": (0, size + MORE)})
            return bytes(response.bytes()), int(response.meta["size"])

        first, whole_size = unpacked_head(*self._read(read, name))
        return first[:size], whole_size

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; missing ones are ignored."""
        self._delete([_path(name) for name in names])

    def list(self) -> Iterator[str]:
        """Yield the names of all segments."""
        for file in self._files(SEGMENTS):
            if SEGMENT.fullmatch(file):
                yield file.removesuffix(".safetensors")

    def numbers(self) -> Iterator[int]:
        """Yield the numbers of all tombstones (see `tombstones.NumberedObjects`)."""
        return (int(file) for file in self._files(_TOMBSTONES) if file.isascii() and file.isdigit())

    def note(self, number: int) -> bytes:
        """Return the content of a tombstone."""
        path = f"{_TOMBSTONES}/{number}"
        return self._read(lambda: bytes(self._store.get(path).bytes()), path)

    def write_note(self, number: int, body: bytes) -> bool:
        """Create a tombstone; False if the number is taken."""
        return self._create(f"{_TOMBSTONES}/{number}", body)

    def drop_notes(self, numbers: Iterable[int]) -> None:
        """Remove tombstones; missing ones are ignored."""
        self._delete([f"{_TOMBSTONES}/{number}" for number in numbers])

    def stores(self) -> Sequence[str]:
        """List the addresses of this store, if it was made, and of the ranks' stores below it."""
        listing = self._call_in_bucket(lambda: self._store.list_with_delimiter(""))
        addresses = [self.url] if any(item["path"] == MARKER for item in listing["objects"]) else []
        return addresses + [
            f"{self.url}/{name}"
            for name in sorted(listing["common_prefixes"])
            if RANK.fullmatch(name)
        ]

    def _files(self, folder: str) -> Iterator[str]:
        pages = self._store.list(f"{folder}/")
        while (page := self._call_in_bucket(lambda: next(pages, None))) is not None:
            for item in page:
                yield str(item["path"]).rpartition("/")[2]

    def _delete(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        try:
            self._call_service(lambda: self._store.delete(paths))
        # One of them is missing, and the others may be there still.
        except FileNotFoundError:
            for path in paths:
                with suppress(FileNotFoundError):
                    self._call_service(lambda path=path: self._store.delete(path))

    def _create(self, path: str, data: bytes) -> bool:
        try:
            self._call_in_bucket(
                lambda: self._store.put(path, data, mode="create", use_multipart=False)
            )
        except self._exists:
            return False
        return True

    def _read(self, read: Callable[[], Any], name: str) -> Any:
        try:
            return self._call_service(read)
        except FileNotFoundError as error:
            # A missing bucket is no proof that an object has left: nothing may be forgotten for it.
            if _NO_BUCKET.search(str(error)):
                raise _unavailable(error) from error
            raise ObjectMissing(name) from error

    def _call_in_bucket(self, call: Callable[[], Any]) -> Any:
        """Ask the service for what only a missing bucket can lack: then it is unavailable."""
        try:
            return self._call_service(call)
        except FileNotFoundError as error:
            raise _unavailable(error) from error

    def _call_service(self, call: Callable[[], Any]) -> Any:
        """Ask the service, unless it fails and is left alone for a moment.

        Raises
        ------
        FileNotFoundError
            If the object or the bucket is missing.
        StoreUnavailable
            If the service fails. The error of an object that exists is passed on.
        """
        if not self.breaker.allows():
            # At once: each caller would wait for the client's retries otherwise.
            raise StoreUnavailable(
                OSError(
                    errno.EIO, f"the service of {self.url} fails: it is asked again in a moment"
                )
            )

        try:
            answer = call()
        # An answer, too: the service works.
        except (FileNotFoundError, self._exists):
            self.breaker.worked()
            raise
        except self._errors as error:
            self.breaker.failed()
            raise _unavailable(error) from error

        self.breaker.worked()
        return answer

    def _check(self, make: bool) -> None:
        """Read or make the marker, and see that the bucket can be listed and creates only.

        Raises
        ------
        StoreError
            For another marker, or a service that writes over objects. Errors of reading are passed
            on.
        """
        marker = json.dumps({"format": FORMAT}).encode()

        def read() -> bytes:
            return bytes(self._store.get(MARKER).bytes())

        try:
            stored_marker = self._read(read, MARKER)
        except ObjectMissing:
            if make:
                self._create(MARKER, marker)
            stored_marker = self._read(read, MARKER) if make else marker

        if stored_marker != marker:
            raise StoreError(
                f"{self.url}/{MARKER} is not the marker of format {FORMAT}: another version of "
                "DejaKV, or another program, made it; "
                "give another prefix"
            )

        try:
            # Tried at the start: some services accept the condition and ignore it.
            overwritten = make and self._create(MARKER, marker)
        except StoreUnavailable as error:
            if error.reason != "full":
                raise
            logger.warning("%s is full: its content is served, and nothing is stored", self.url)
            overwritten = False

        if overwritten:
            raise StoreError(
                f"the service of {self.url} writes over objects that it is told to create only "
                "(If-None-Match), so that replicas would "
                "destroy each other's: use a newer version of it, or another service"
            )

        # One page: a refused listing should show now, and not in the background.
        next(self.list(), None)


def _path(name: str) -> str:
    return f"{SEGMENTS}/{name}.safetensors"


def _error_line(text: str) -> str:
    """Return what a service said, on one line."""
    # S3 answers in XML; only code and message help the user.
    error_fields = re.search(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", text, re.DOTALL)
    return " ".join((f"{error_fields[1]}: {error_fields[2]}" if error_fields else text).split())[
        :300
    ]


def _unavailable(error: BaseException) -> StoreUnavailable:
    # What follows is the client's internal state, of no use to who reads it.
    text = str(error).partition("\n\nDebug source")[0]
    full, denied = _FULL.search(text), _DENIED.search(text)
    return StoreUnavailable(
        OSError(errno.ENOSPC if full else errno.EACCES if denied else errno.EIO, _error_line(text))
    )
