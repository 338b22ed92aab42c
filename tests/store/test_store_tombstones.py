"""What was being stored while a machine purged leaves with the next listing, whoever lists; what is stored later stays."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from tests.services import S3Server, wait_until
from tests.store.test_store_bucket import LONG, objects_of
from tests.store.test_store_bucket import two as two

from dejakv.store import Store, open_store
from dejakv.store.objects import ObjectMissing
from dejakv.store.open import purge_place
from dejakv.store.remote.tombstones import RETENTION_SECONDS, TombstoneSet
from dejakv.store.selection import Selection
from dejakv.testing.stored_states import check_whole, ids, make_prompt_state

pytestmark = pytest.mark.slow  # with a real service


@contextmanager
def storing(store: Store, *stored_states: Any) -> Iterator[None]:
    """What is within happens while the service takes its time to take these."""
    began, go, real = threading.Event(), threading.Event(), store._remote._objects.put  # type: ignore[union-attr]

    def slow(*given: Any) -> bool:
        began.set()
        assert go.wait(60)
        return real(*given)

    store._remote._objects.put = slow  # type: ignore[union-attr,method-assign]
    thread = threading.Thread(target=lambda: [store.put(stored_state) for stored_state in stored_states])
    thread.start()
    assert began.wait(60)
    yield
    go.set()
    thread.join()
    store._remote._objects.put = real  # type: ignore[union-attr,method-assign]


@pytest.mark.parametrize("lists", ["the purger", "the writer", "a third"])
def test_a_put_that_began_before_a_purge_leaves(
    lists: str, two: tuple[Store, Store], s3_server: S3Server, bucket: str
) -> None:
    one, other = two
    kept, late = make_prompt_state(LONG, partition="q"), make_prompt_state(LONG)
    assert one.put(kept)
    with storing(other, late):
        assert one.purge(Selection(partition="p")).prompts == 0
    if lists == "a third":
        open_store(bucket, background=False).close()  # it lists when it is opened
    else:
        assert {"the purger": one, "the writer": other}[lists].catch_up()
    mine = {name for (name,) in one._catalog.read("SELECT name FROM segments WHERE partition = 'q'")}
    assert {path.rpartition("/")[2].removesuffix(".safetensors") for path in objects_of(s3_server, bucket)} == mine
    other.catch_up()
    assert ids(other) == {kept.meta.id}
    assert other.put(late), "it may be stored now"
    with closing(open_store(bucket, background=False)) as again:
        check_whole(again, [kept, late])
        again.catch_up()
        check_whole(again, [kept, late])


def test_prompts_that_begin_with_a_purged_one_leave_too(two: tuple[Store, Store]) -> None:
    one, other = two
    donor, longer, apart = (
        make_prompt_state(LONG),
        make_prompt_state((*LONG, *range(500))),
        make_prompt_state((*LONG[:-1], 7)),
    )
    assert one.put(donor)
    other.catch_up()
    with storing(other, longer, apart):
        assert one.purge(Selection(donors=(donor.meta.id,))).prompts == 1
    one.catch_up()
    assert longer.meta.id not in ids(one)
    other.catch_up()
    assert longer.meta.id not in ids(other)


def test_a_command_that_purges_is_remembered_by_those_who_go_on(
    two: tuple[Store, Store], s3_server: S3Server, bucket: str
) -> None:
    one, _ = two
    with storing(one, make_prompt_state(LONG)):
        purge_place(bucket)
    one.catch_up()
    assert (ids(one), objects_of(s3_server, bucket)) == (set(), [])


def test_with_a_feed_nobody_waits_for_a_listing(bucket: str, valkey_server: Any, s3_server: S3Server) -> None:
    with (
        closing(open_store(bucket, feed=valkey_server.url)) as one,
        closing(open_store(bucket, feed=valkey_server.url)) as other,
    ):
        with storing(other, make_prompt_state(LONG)):
            one.purge(Selection())
        wait_until(lambda: objects_of(s3_server, bucket) == [], "the end of what was being stored")
        wait_until(lambda: ids(one) == ids(other) == set(), "its removal")


class Notes(dict[int, bytes]):
    def numbers(self) -> Iterable[int]:
        return list(self)

    def note(self, number: int) -> bytes:
        try:
            return self[number]
        except KeyError as error:
            raise ObjectMissing(str(number)) from error

    def write_note(self, number: int, body: bytes) -> bool:
        return number not in self and self.setdefault(number, body) is body

    def drop_notes(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self[number]


def test_tombstones_outlive_uploads_and_the_last_one_keeps_the_count() -> None:
    notes, now = Notes(), [0.0]
    one, other = (TombstoneSet(notes, lambda: now[0]) for _ in range(2))
    assert other.read_new() == []
    first, second = one.write(Selection("p")), one.write(Selection("q", "e", ("a",), media=frozenset({("q", "m")})))
    assert other.read_new() == [first, second]
    assert (other.read_new(), other.number) == ([], 2)
    notes[3] = b"what somebody else wrote"
    assert (other.read_new(), other.number) == ([], 3)
    now[0] = RETENTION_SECONDS
    one.read_new(), other.read_new()
    assert set(notes) == {1, 2, 3}
    now[0] += 1
    other.read_new()
    assert set(notes) == {3}
    assert (one.read_new(), one.write(Selection()).number, other.read_new()[0].selection) == ([], 4, Selection())
