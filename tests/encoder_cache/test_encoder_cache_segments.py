"""Clips by segments: overlapping clips share, whole clips are known without decoding."""

import threading

import numpy as np
import pytest

from dejakv.encoder_cache import SegmentedClips, VisualKVCache, segment_hashes
from dejakv.errors import InputError


def frames(start, stop):
    return [b"frame %d" % number for number in range(start, stop)]


class Tower:
    def __init__(self):
        self.encoded = []

    def __call__(self, segments):
        self.encoded.extend(segments)
        return [np.full((2, 4), int(segment.split()[1]), np.float32) for segment in segments]


def decode(raw):
    start, stop = map(int, raw.split())
    return frames(start, stop)


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_overlapping_clips_encode_only_what_is_new(modality):
    view, tower = VisualKVCache().view("e"), Tower()
    clips = SegmentedClips(view, modality)
    first = clips.get_or_compute(b"0 10", decode, tower)
    second = clips.get_or_compute(b"6 14", decode, tower)
    assert tower.encoded == frames(0, 14)
    assert [int(item[0, 0]) for item in first] == list(range(10))
    assert [int(item[0, 0]) for item in second] == list(range(6, 14))
    assert second[0] is first[6]
    assert view.stats().encoder_runs == 14
    assert view.stats().hits == 4


def test_a_clip_seen_before_is_not_even_decoded():
    clips = SegmentedClips(VisualKVCache().view("e"))
    clips.get_or_compute(b"0 3", decode, Tower())
    again = clips.get_or_compute(b"0 3", pytest.fail, pytest.fail)
    assert len(again) == 3


def test_a_known_clip_whose_segments_left_is_decoded_again():
    cache, tower = VisualKVCache(), Tower()
    clips = SegmentedClips(cache.view("e"))
    clips.get_or_compute(b"0 3", decode, tower)
    cache.clear()
    clips.get_or_compute(b"0 3", decode, tower)
    assert len(tower.encoded) == 6


def test_a_repeated_segment_is_encoded_once():
    tower = Tower()
    got = SegmentedClips(VisualKVCache().view("e")).get_or_compute(
        b"still", lambda raw: [b"frame 1", b"frame 1", b"frame 2"], tower
    )
    assert tower.encoded == [b"frame 1", b"frame 2"]
    assert got[0] is got[1]


def test_clips_larger_than_the_cache_are_served_all_the_same():
    tower = Tower()
    clips = SegmentedClips(VisualKVCache(max_entries=2).view("e"))
    got = clips.get_or_compute(b"0 20", decode, tower)
    assert [int(item[0, 0]) for item in got] == list(range(20))


def test_only_so_many_clips_are_remembered():
    clips = SegmentedClips(VisualKVCache().view("e"), max_clips=2)
    for raw in (b"0 2", b"1 3", b"2 4"):
        clips.get_or_compute(raw, decode, Tower())
    decoded = []
    clips.get_or_compute(b"0 2", lambda raw: decoded.append(raw) or decode(raw), Tower())
    assert decoded == [b"0 2"]


def test_concurrent_overlapping_clips_share_a_run():
    view, tower = VisualKVCache().view("e"), Tower()
    clips = SegmentedClips(view)
    raws = [b"%d %d" % (start, start + 12) for start in range(0, 24, 3)]
    got = {}
    threads = [
        threading.Thread(
            target=lambda raw=raw: got.update({raw: clips.get_or_compute(raw, decode, tower)}), daemon=True
        )
        for raw in raws * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tower.encoded) == sorted(frames(0, 33))
    assert [int(item[0, 0]) for item in got[b"6 18"]] == list(range(6, 18))


def test_neighbours_are_in_the_key_where_the_tower_sees_them():
    alone = segment_hashes([b"a", b"b", b"c"])
    assert alone[1] == segment_hashes([b"x", b"b"])[1]
    seen = segment_hashes([b"a", b"b", b"c", b"d", b"e"], context=1)
    assert seen[2] == segment_hashes([b"b", b"c", b"d"], context=1)[1]
    assert seen[1] != segment_hashes([b"x", b"b", b"c"], context=1)[1]
    assert len({*seen, *alone}) == 8


def test_context_tells_the_first_of_two_from_the_second():
    first, second = segment_hashes([b"a", b"b"], context=1)
    assert first != second


@pytest.mark.parametrize(("segments", "context"), [([], 0), ([b"a", b""], 0), ([b"a"], -1)])
def test_no_clip(segments, context):
    with pytest.raises(InputError):
        segment_hashes(segments, context)


def test_wrong_settings():
    with pytest.raises(InputError):
        SegmentedClips(VisualKVCache().view("e"), "smell")
    with pytest.raises(InputError):
        SegmentedClips(VisualKVCache().view("e"), max_clips=0)
