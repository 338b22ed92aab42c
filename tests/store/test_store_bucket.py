"""A store in a bucket: several machines, what is wrong at the start, and what goes wrong later."""

import http.server
import re
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard
from tests.services import S3Server, free_ports, wait_until

from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.engines.vllm.stores import open_store as open_for_vllm
from dejakv.errors import StoreError
from dejakv.store import Store, open_store
from dejakv.store.base import joined
from dejakv.store.remote import replicas
from dejakv.store.remote.health import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, CircuitBreaker
from dejakv.store.selection import Selection
from dejakv.testing.stored_states import PREAMBLE, check_whole, ids, make_prompt_state, make_stored_state

pytestmark = pytest.mark.slow  # with real services

LONG = (*PREAMBLE, *range(300))


@pytest.fixture
def two(bucket: str) -> Iterator[tuple[Store, Store]]:
    """Two machines' stores on one bucket. They learn of each other when they are told to."""
    with closing(open_store(bucket, background=False)) as one, closing(open_store(bucket, background=False)) as other:
        yield one, other


def objects_of(server: S3Server, bucket: str) -> list[str]:
    """Paths of the segments below a prefix."""
    listed = server.request("GET", "/dejakv", query=f"list-type=2&prefix={bucket[12:]}%2Fsegments%2F").decode()
    return re.findall(r"<Key>(.*?)</Key>", listed)


def test_what_one_machine_stores_another_finds(two: tuple[Store, Store]) -> None:
    """State, and prompts with their texts and vectors, of which no catalog tells it."""
    one, other = two
    stored_state = make_prompt_state(LONG, width=64, vectors={"text": np.arange(3, dtype=np.float32)}, answer="Blue.")
    longer = make_prompt_state((*LONG, *range(40)), width=64)
    assert one.put(stored_state)
    assert other.find("p", "e", LONG) is None
    assert other.catch_up()
    hit = other.find("p", "e", (*LONG, 7))
    assert hit is not None
    assert (hit[0].tokens, hit[0].donor, hit[1].answer) == (len(LONG), stored_state.meta.id, "Blue.")
    assert [meta.vectors["text"].tolist() for meta in other.metas()] == [[0, 1, 2]]
    assert other.put(longer)
    check_whole(other, [stored_state, longer])
    assert other.stats().bytes < 1.1 * longer.tensor.nbytes, "what the first has stored is not stored again"
    new, _ = one.metas_since(one.metas_since()[1])
    assert new == []
    assert one.catch_up()
    check_whole(one, [longer])


def test_what_one_machine_removes_the_others_forget(two: tuple[Store, Store], s3_server: S3Server, bucket: str) -> None:
    one, other = two
    gone: list[str] = []
    other.listen(removed=gone.append)
    stored_states = [make_prompt_state((*LONG, number)) for number in range(3)]
    for stored_state in stored_states:
        assert one.put(stored_state)
    other.catch_up()
    assert ids(other) == {stored_state.meta.id for stored_state in stored_states}
    assert one.delete(stored_states[0].meta.id)
    other.catch_up()
    assert gone == [stored_states[0].meta.id], "the others' state was cut anew"
    for store in (one, other):
        check_whole(store, stored_states[1:])
    one.catch_up()
    check_whole(one, stored_states[1:])
    late = make_prompt_state(range(50), partition="q")
    assert other.put(late)
    assert one.purge(Selection()).prompts == 3, "also what it has not heard of yet"
    assert objects_of(s3_server, bucket) == []
    other.catch_up()
    assert (ids(other), other.stats().bytes) == (set(), 0)


def test_two_machines_that_store_the_same_prompt_keep_one_description(two: tuple[Store, Store]) -> None:
    one, other = two
    stored_state = make_prompt_state(LONG)
    assert one.put(stored_state)
    assert other.put(stored_state)
    for store in (one, other, one, other):
        store.catch_up()
    for store in (one, other):
        check_whole(store, [stored_state])
        assert store.stats().entries == 1
        assert store.stats().corrupt == 0


def test_a_description_that_comes_before_its_state_is_kept(
    two: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    stored_state = make_prompt_state(LONG)
    assert one.put(stored_state)
    present = set(other._objects.list())
    state = {piece.name for piece in one._catalog.longest_prefix(*_keys(stored_state))}
    monkeypatch.setattr(other._objects, "list", lambda: iter(present - state))
    other.catch_up()
    assert other.meta(stored_state.meta.id) is None
    monkeypatch.undo()
    other.catch_up()
    check_whole(other, [stored_state])


def test_what_is_indexed_twice_at_once_stays(two: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a put, or another listing, while a listing reads its header."""
    one, other = two
    stored_state, first, head = make_prompt_state(LONG), threading.Lock(), other._objects.head

    def slow(name: str, size: int) -> tuple[bytes, int]:
        if first.acquire(blocking=False):
            assert other.catch_up()
        return head(name, size)

    assert one.put(stored_state)
    monkeypatch.setattr(other._objects, "head", slow)
    assert other.catch_up()
    for store in two:
        assert store.catch_up()
        check_whole(store, [stored_state])
        assert store.find("p", "e", LONG, whole=True) is not None
        assert ids(store) == {stored_state.meta.id}


def _keys(stored_state: Any) -> tuple[Any, int, float]:
    from dejakv.store.prefix_keys import PrefixKeys

    return PrefixKeys("p", "e", stored_state.meta.token_ids), stored_state.meta.num_tokens, 0.0


def test_a_machine_follows_the_others_by_itself(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "LIST_SECONDS", 0.05)
    monkeypatch.setattr(replicas, "SHARE", 0)  # a busy machine lists slowly
    with closing(open_store(bucket)) as one, closing(open_store(bucket)) as other:
        stored_state = make_prompt_state(LONG)
        assert one.put(stored_state)
        wait_until(lambda: other.meta(stored_state.meta.id) is not None, "the prompt of the other")
        assert one.delete(stored_state.meta.id)
        wait_until(lambda: other.meta(stored_state.meta.id) is None, "the removal by the other")


def test_an_object_that_leaves_between_lookup_and_load_is_a_counted_miss(two: tuple[Store, Store]) -> None:
    one, other = two
    stored_state = make_prompt_state(LONG)
    assert one.put(stored_state)
    other.catch_up()
    hit = other.find("p", "e", LONG, whole=True)
    assert hit is not None
    assert one.purge(Selection()).prompts == 1
    assert other.get_parts(hit[0].donor) is None
    assert other.find("p", "e", LONG) is None
    assert (other.stats().misses, other.stats().hits, other.stats().corrupt) == (1, 0, 0)


def test_the_smallest_budget_on_a_prefix_holds_for_all(bucket: str) -> None:
    """What its machine evicts others miss, and count."""
    stored_states = [make_stored_state(number, nbytes=10_000) for number in range(4)]
    with (
        closing(open_store(bucket, max_bytes=1 << 20, background=False)) as large,
        closing(open_store(bucket, max_bytes=30_000, background=False)) as small,
    ):
        for stored_state in stored_states:
            assert large.put(stored_state)
        assert small.catch_up()
        assert small.put(make_stored_state(4, nbytes=10_000))
        assert small.stats().bytes <= 30_000
        for stored_state in stored_states[:3]:
            assert large.get(stored_state.meta.id) is None
        assert (large.stats().misses, large.stats().corrupt) == (3, 0)
        assert large.catch_up()
        check_whole(large, [stored_states[3], make_stored_state(4, nbytes=10_000)])


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_damaged_and_foreign_objects_are_counted_misses(
    damage: str, two: tuple[Store, Store], s3_server: S3Server, bucket: str
) -> None:
    one, other = two
    stored_state = make_prompt_state(LONG)
    assert one.put(stored_state)
    other.catch_up()
    for path in objects_of(s3_server, bucket):
        held = bytearray(s3_server.request("GET", f"/dejakv/{path}"))
        held[-1] ^= 1
        new = {"cut": bytes(held[:-40]), "flipped": bytes(held), "foreign": b"what somebody else wrote"}[damage]
        s3_server.request("PUT", f"/dejakv/{path}", new)
    for name in ("segments/notes.txt", "somewhere/else"):
        s3_server.request("PUT", f"/dejakv/{bucket[12:]}/{name}", b"another program's")
    assert other.get(stored_state.meta.id) is None
    assert other.stats().corrupt > 0
    with closing(open_store(bucket, background=False)) as third:
        assert third.get(stored_state.meta.id) is None
        assert third.put(stored_state)
        check_whole(third, [stored_state])
    assert s3_server.request("GET", f"/dejakv/{bucket[12:]}/segments/notes.txt") == b"another program's"


def test_vllm_packs_as_well_without_a_folder(bucket: str, s3_server: S3Server) -> None:
    stored_state = make_prompt_state(LONG, width=64)
    own = SimpleNamespace(distributed_executor_backend=None), SimpleNamespace(engine_id=bucket)
    config = SimpleNamespace(parallel_config=own[0], kv_transfer_config=own[1])
    with closing(open_for_vllm(ConnectorSettings(store=bucket, compress=True), config)) as store:
        assert store.put(stored_state)
        check_whole(store, [stored_state])
    sizes = [len(s3_server.request("GET", f"/dejakv/{path}")) for path in objects_of(s3_server, bucket)]
    assert sum(sizes) < stored_state.tensor.nbytes


@pytest.mark.parametrize("damage", ["", "cut", "flipped", "description"])
def test_state_is_packed_without_loss(damage: str, bucket: str, s3_server: S3Server) -> None:
    """Machines that pack and machines that do not share a bucket; damage is a counted miss."""
    stored_state, noise = make_prompt_state(LONG, width=64), make_stored_state(1, nbytes=200_000)
    with closing(open_store(bucket, compress=True, background=False)) as store:
        assert store.put(stored_state)
        assert store.put(noise)
        check_whole(store, [stored_state, noise])
    held = {path: s3_server.request("GET", f"/dejakv/{path}") for path in objects_of(s3_server, bucket)}
    assert sum(map(len, held.values())) < stored_state.tensor.nbytes + noise.tensor.nbytes, "descriptions included"
    assert [data[:4] for data in held.values()].count(b"\x5d\x2a\x4d\x18") == 1, "neither noise nor what is small"
    for path, data in held.items() if damage else ():
        at = {"cut": -40, "flipped": len(data) // 2, "description": 200}[damage]
        new = data[:at] if damage == "cut" else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        s3_server.request("PUT", f"/dejakv/{path}", new)
    with closing(open_store(bucket, background=False)) as other:
        if damage:
            assert other.get(stored_state.meta.id) is None
            assert other.stats().corrupt > 0
        else:
            check_whole(other, [stored_state, noise])
            later = make_prompt_state((*LONG, 1), width=64)
            assert other.put(later)
            check_whole(other, [later])


@pytest.mark.parametrize(
    "liar",
    [
        "6 GiB",
        "2**63",
        "nothing",
        "no size",
        "less",
        "more",
        "cut",
        "frames",
        "header alone",
        "no frame",
        "description",
    ],
)
def test_a_packed_object_that_lies_about_its_size_is_a_counted_miss(
    liar: str, two: tuple[Store, Store], s3_server: S3Server, bucket: str
) -> None:
    """And no memory is taken for what it claims. Its size stands in its beginning and in its zstd frame."""
    store, stored_state = two[0], make_prompt_state(LONG, width=64)
    with closing(open_store(bucket, compress=True, background=False)) as packer:
        assert packer.put(stored_state)
    store.catch_up()
    check_whole(store, [stored_state])
    for path in objects_of(s3_server, bucket):
        held = s3_server.request("GET", f"/dejakv/{path}")
        magic, skipped, size = struct.unpack_from("<IIQ", held)
        if magic != 0x184D2A5D:
            continue
        head, frame = held[16 : 8 + skipped], held[8 + skipped :]
        state = zstandard.ZstdDecompressor().decompress(frame)

        def framed(data: bytes, claimed: int | None = None, known: bool = True) -> bytes:
            """A frame whose header gives `claimed` in eight bytes, or no size (RFC 8878, 3.1.1.1)."""
            made = zstandard.ZstdCompressor(write_content_size=False).compress(data)
            if not known:
                return made
            whole = len(data) if claimed is None else claimed
            return made[:4] + bytes([0xC0 | made[4] & 0x1F]) + made[5:6] + struct.pack("<Q", whole) + made[6:]

        assert zstandard.ZstdDecompressor().decompress(framed(state)) == state
        rest = size - len(state)
        claims, body = {
            "6 GiB": (rest + (6 << 30), framed(state, 6 << 30)),
            "2**63": (rest + (1 << 63), framed(state, 1 << 63)),
            "nothing": (rest, framed(b"")),
            "no size": (size, framed(state, known=False)),
            "less": (size - 4096, framed(state, len(state) - 4096)),
            "more": (size + 4096, framed(state, len(state) + 4096)),
            "cut": (size, frame[:-40]),
            "frames": (size, framed(state[:4096]) + framed(state[4096:])),
            "header alone": (size, frame[:5]),
            "no frame": (size, b""),
            "description": (size, frame),
        }[liar]
        skipped = 2**32 - 1 if liar == "description" else skipped
        s3_server.request("PUT", f"/dejakv/{path}", struct.pack("<IIQ", magic, skipped, claims) + head + body)
    tracemalloc.start()
    try:
        assert store.get(stored_state.meta.id) is None
        assert store.stats().corrupt > 0
        with closing(open_store(bucket, background=False)) as later:
            assert later.get(stored_state.meta.id) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 30


# The service


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server(tmp_path / "s3")
    server.start()
    server.make_bucket("dejakv")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


def test_a_service_that_is_away_costs_misses_and_nothing_is_forgotten(own_server: S3Server) -> None:
    stored_state, later = make_prompt_state(LONG), make_stored_state(1)
    with closing(open_store("s3://dejakv/cache", background=False)) as store:
        assert store.put(stored_state)
        own_server.stop()
        assert store.get(stored_state.meta.id) is None
        assert store.put(later) is False
        assert store.catch_up() is False
        with pytest.raises(StoreError, match="see that the store answers"):
            store.purge(Selection())
        assert store.stats().refused == {"error": 1}
        assert store.stats().corrupt == 0
        own_server.start()
        wait_until(store.catch_up, "the return of the service")
        check_whole(store, [stored_state])
        assert store.put(later)


def test_copies_in_memory_and_on_disk_serve_while_the_service_is_away(own_server: S3Server, tmp_path: Path) -> None:
    stored_state = make_prompt_state(LONG, width=64)
    url, disk = "s3://dejakv/cache", tmp_path / "disk"
    with closing(open_store(url, disk_dir=disk, background=False)) as store:
        assert store.put(stored_state)
    with (
        closing(open_store(url, disk_dir=disk, background=False)) as on_disk,
        closing(open_store(url, memory_bytes=1 << 20, background=False)) as in_memory,
    ):
        check_whole(in_memory, [stored_state])
        own_server.stop()
        check_whole(in_memory, [stored_state])
        check_whole(on_disk, [stored_state])


# Copies on disk


def copies_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("segments/*/*"))


def test_copies_on_disk_keep_to_their_budget(bucket: str, tmp_path: Path) -> None:
    stored_states = [make_stored_state(number, nbytes=10_000) for number in range(8)]
    with closing(open_store(bucket, disk_dir=tmp_path, disk_bytes=50_000, background=False)) as store:
        for stored_state in stored_states:
            assert store.put(stored_state)
            assert sum(path.stat().st_size for path in copies_in(tmp_path)) <= 50_000
        assert copies_in(tmp_path)
        check_whole(store, stored_states)
        assert sum(path.stat().st_size for path in copies_in(tmp_path)) <= 50_000
        assert store.put(make_stored_state(9, nbytes=60_000)), "larger than all copies may be"


def test_a_damaged_copy_is_read_from_the_bucket(bucket: str, tmp_path: Path) -> None:
    stored_state = make_prompt_state(LONG)
    with closing(open_store(bucket, disk_dir=tmp_path, background=False)) as store:
        assert store.put(stored_state)
        for path in copies_in(tmp_path):
            path.write_bytes(path.read_bytes()[:-8] + b"damaged!")
        check_whole(store, [stored_state])
        assert store.stats().corrupt == 0


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_copies_of_what_was_purged_elsewhere_leave(bucket: str, tmp_path: Path, index: str) -> None:
    stored_state = make_prompt_state(LONG)
    with closing(open_store(bucket, disk_dir=tmp_path, background=False)) as store:
        assert store.put(stored_state)
    with closing(open_store(bucket, background=False)) as other:
        assert other.purge(Selection()).prompts == 1
    for file in tmp_path.glob("catalog.sqlite*") if index == "lost" else ():
        file.unlink()
    with closing(open_store(bucket, disk_dir=tmp_path, background=False)) as again:
        assert again.meta(stored_state.meta.id) is None
        assert copies_in(tmp_path) == []


def test_a_folder_is_a_store_or_holds_copies_of_one_bucket(bucket: str, tmp_path: Path) -> None:
    open_store(tmp_path / "own").close()
    open_store(bucket, disk_dir=tmp_path / "copies").close()
    with pytest.raises(StoreError, match="own is a store of its own, or another folder"):
        open_store(bucket, disk_dir=tmp_path / "own")
    with pytest.raises(StoreError, match=f"holds copies from {bucket}: give {bucket} as the store"):
        open_store(tmp_path / "copies")
    with pytest.raises(StoreError, match=f"holds copies from {bucket}"):
        open_store(f"{bucket}/another", disk_dir=tmp_path / "copies")


# What is wrong at the start


@pytest.mark.parametrize(
    ("url", "variables", "said"),
    [
        ("s3://nowhere/cache", {}, "make the bucket, or name another"),
        (None, {"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch.*credentials of the environment are refused"),
        (None, {"AWS_ACCESS_KEY_ID": "nobody"}, "InvalidAccessKeyId.*credentials of the environment are refused"),
        (None, {"AWS_ACCESS_KEY_ID": "reader"}, "AccessDenied.*they must let you read, write, delete and list"),
        (None, {"AWS_ACCESS_KEY_ID": "blind"}, "AccessDenied.*they must let you read, write, delete and list"),
        (None, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "see that the service answers.*AWS_ENDPOINT_URL"),
        (
            "az://container/cache",
            {},
            "Account must be specified.*no credentials were found.*AZURE_STORAGE_ACCOUNT_NAME",
        ),
    ],
)
def test_what_is_wrong_is_told_at_the_start(
    bucket: str, monkeypatch: pytest.MonkeyPatch, url: str | None, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=f"(?s){url or bucket} cannot be a store.*{said}") as found:
        open_store(url or bucket)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 700


@pytest.mark.parametrize(
    "service", ["old", "elsewhere", "newer", "late", "full", "no quota", "locked", "full, with a store"]
)
def test_services_that_cannot_serve_are_named_at_the_start(
    service: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that does not know puts that only create, one whose bucket is in another region, and a store of a newer version."""
    held = {"/dejakv/cache/dejakv-store.json": b'{"format": 3}'} if service == "full, with a store" else {}
    refusals = {
        "elsewhere": (400, b"AuthorizationHeaderMalformed</Code><Message>the region is wrong"),
        "late": (403, b"RequestTimeTooSkewed</Code><Message>too large"),
        "full": (507, b"XMinioStorageFull</Code><Message>Storage backend has reached its minimum free drive threshold"),
        "no quota": (403, b"QuotaExceeded</Code><Message>The quota set for the bucket is exceeded"),
        "locked": (
            400,
            b"InvalidRequest</Code><Message>Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object "
            b"requests with Object Lock parameters",
        ),
    }
    refusals["full, with a store"] = refusals["full"]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if "list-type" in self.path:
                self._answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
            elif self.path in held:
                self._answer(200, held[self.path])
            else:
                self._answer(404, b"<Code>NoSuchKey</Code>")

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if service in refusals:
                status, said = refusals[service]
                return self._answer(status, b"<Error><Code>" + said + b"</Message></Error>")
            if service == "newer" and self.path in held:
                return self._answer(412, b"<Code>PreconditionFailed</Code>")
            held[self.path] = body if service == "old" else b'{"format": 99}'
            return self._answer(200, b"")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.send_header("etag", '"x"')
            self.send_header("last-modified", "Wed, 25 Nov 2026 13:00:00 GMT")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    said = {
        "old": "writes over objects that it is told to create only",
        "elsewhere": "the region is wrong.*set AWS_REGION",
        "newer": "is not the marker of format 3",
        "late": "RequestTimeTooSkewed.*clock differs from the service's: set it",
        "full": "XMinioStorageFull.*it is full: make room in it or raise its quota",
        "no quota": "QuotaExceeded.*it is full: make room in it or raise its quota",
        "locked": "use a bucket without object lock",
        "full, with a store": "",
    }[service]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", free_ports(1)[0]), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "x")
        if said:
            with pytest.raises(StoreError, match=said):
                open_store("s3://dejakv/cache")
            return
        with closing(open_store("s3://dejakv/cache", background=False)) as store:
            assert store.put(make_prompt_state(LONG)) is False
            assert store.stats().refused == {"full": 1}
        assert "is full: its content is served" in caplog.text
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_ranks_are_below_a_store(bucket: str) -> None:
    from dejakv.store.open import find_stores, purge_place

    for rank in range(2):
        with closing(open_store(f"{bucket}/tp-{rank}-of-2", background=False)) as store:
            assert store.put(make_stored_state(rank))
    assert list(find_stores(bucket)) == [f"{bucket}/tp-0-of-2", f"{bucket}/tp-1-of-2"]
    assert purge_place(bucket) == 2
    with closing(open_store(f"{bucket}/tp-0-of-2", background=False)) as store:
        assert ids(store) == set()


@pytest.mark.parametrize("call", ["list_with_delimiter", "delete"])
def test_a_purge_that_the_service_breaks_off_says_so(bucket: str, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    import obstore.store

    from dejakv.store.open import purge_place

    with closing(open_store(bucket, background=False)) as store:
        assert store.put(make_stored_state(1))

    def failing(*_: Any, **__: Any) -> Any:
        raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(obstore.store.S3Store, call, failing)
        with pytest.raises(StoreError, match=r"was not emptied, since its service fails .*purge again"):
            purge_place(bucket)
    assert purge_place(bucket) == 1


def test_parts_of_long_prompts_come_from_a_bucket_one_by_one(two: tuple[Store, Store]) -> None:
    one, other = two
    stored_state = make_prompt_state(range(1000), width=16)
    assert one.put(stored_state)
    other.catch_up()
    parts = other.get_parts(stored_state.meta.id, [(300, 310)]) or ()
    assert [(part.first, part.stop) for part in parts] == [(256, 512)]
    found = joined(parts, 300, 310)
    assert found is not None
    np.testing.assert_array_equal(found.data, stored_state.tensor.data[:, :, :, 300:310])


def test_a_service_that_fails_is_left_alone_and_asked_again(bucket: str, s3_server: S3Server) -> None:
    """Each of many lookups would wait for it otherwise."""
    stored_state, asked = make_prompt_state(LONG), []

    with closing(open_store(bucket, background=False)) as store:
        assert store.put(stored_state)
        real = store._objects._objects._store

        class Failing:
            def get(self, *args: Any, **more: Any) -> Any:
                asked.append(args)
                raise TimeoutError("no answer")

        store._objects._objects._store = Failing()
        for _ in range(20):
            assert store.get(stored_state.meta.id) is None
        assert len(asked) == FAILURES
        store._objects._objects._store = real
        wait_until(lambda: store.get(stored_state.meta.id) is not None, "the next try")
        check_whole(store, [stored_state])
        assert store.stats().corrupt == 0


def test_pauses_grow_and_one_caller_tries_first() -> None:
    now = [0.0]
    breaker = CircuitBreaker(lambda: now[0])
    for _ in range(FAILURES):
        assert breaker.allows()
        breaker.failed()
    assert not breaker.allows()
    assert breaker.away_seconds == 0
    now[0] = FIRST_PAUSE
    assert breaker.away_seconds == FIRST_PAUSE
    assert (breaker.allows(), breaker.allows()) == (True, False)
    for _ in range(20):
        breaker.failed()
    now[0] += LONGEST_PAUSE / 2 - 0.01
    assert not breaker.allows()
    now[0] += LONGEST_PAUSE / 2 + 0.01
    assert breaker.allows()
    breaker.worked()
    assert breaker.away_seconds == 0
    assert breaker.allows()
    breaker.failed()
    assert breaker.allows(), "one failure alone"


@pytest.mark.parametrize(("said", "reason"), [("507 Insufficient Storage", "full"), ("403 Forbidden", "read_only")])
def test_a_bucket_that_takes_nothing_or_keeps_everything(
    two: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch, said: str, reason: str
) -> None:
    """Full, or without permission to write; and with a lock on its objects: what is there is served, and a purge says that it failed."""
    from obstore.exceptions import GenericError

    one, other = two
    stored_state, later = make_prompt_state(LONG), make_stored_state(1)
    assert one.put(stored_state)
    real = one._remote._objects._store  # type: ignore[union-attr]

    class Stubborn:
        def __getattr__(self, name: str) -> Any:
            if name == "delete" or (name == "put" and not locked):
                raise GenericError(f"Server returned non-2xx status code: {said}")
            return getattr(real, name)

    locked = False
    one._remote._objects._store = Stubborn()  # type: ignore[union-attr]
    assert one.put(later) is False
    assert (one.stats().refused, one.stats().corrupt) == ({reason: 1}, 0)
    locked = True
    with pytest.raises(StoreError, match="entries could not be removed"):
        one.purge(Selection())
    assert ids(one) == set(), "nobody finds it here"
    one._remote._objects._store = real  # type: ignore[union-attr]
    wait_until(lambda: other.catch_up() and ids(other) == set(), "the removal by another machine")


@pytest.mark.parametrize("hours", [-1, 1])
def test_clocks_that_are_an_hour_off(bucket: str, hours: int) -> None:
    """What lives for ever is served whatever they say. What has a lifetime is a miss where it seems over, or of the future."""
    lasting, brief = make_prompt_state(LONG), make_prompt_state(range(700, 900), ttl=600.0, created=0.0)
    with (
        closing(open_store(bucket, background=False, clock=lambda: time.time() + 3600 * hours)) as wrong,
        closing(open_store(bucket, background=False)) as right,
    ):
        for mine, other in ((wrong, right), (right, wrong)):
            for stored_state in (lasting, brief):
                assert mine.put(stored_state)
            check_whole(mine, [lasting, brief])
            assert other.catch_up()
            check_whole(other, [lasting])
            assert other.get(brief.meta.id) is None
            assert (other.stats().corrupt, other.stats().misses) == (0, 1)
            assert mine.purge(Selection()).prompts
            other.purge(Selection())
