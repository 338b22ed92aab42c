from hypothesis import given
from hypothesis import strategies as st

from dejakv.identity import BLOCK_TOKENS, Span, common_prefix
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.memory import MemoryStore
from dejakv.store.prefix import PrefixIndex


def store_of(*prompts: tuple[str, tuple[int, ...], tuple[Span, ...]]) -> tuple[MemoryStore, PrefixIndex]:
    import numpy as np

    store = MemoryStore()
    index = PrefixIndex(store)
    for name, tokens, spans in prompts:
        meta = ChunkMeta(name, "p", "e", tokens, "", "", spans=spans)
        store.put(Chunk(meta, Tensor(np.zeros(1, np.float32), "F32")))
        index.add(meta)
    return store, index


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=70), min_size=1, max_size=6), st.data())
def test_it_is_the_longest_of_all_that_share_a_block(prompts: list[list[int]], data: st.DataObject) -> None:
    wanted = data.draw(st.sampled_from(prompts)) + data.draw(st.lists(st.integers(0, 1), max_size=20))
    stored = {f"{number}": tuple(tokens) for number, tokens in enumerate(prompts)}
    _, index = store_of(*((name, tokens, ()) for name, tokens in stored.items()))
    shared = [common_prefix(wanted, tokens) for tokens in stored.values()]
    best = min(max(n for n in shared), len(wanted) - 1)
    hit = index.longest("p", "e", wanted)
    if max(shared) >= BLOCK_TOKENS and len(wanted) > BLOCK_TOKENS:
        assert hit is not None
        assert hit.tokens == best
    elif hit is not None:
        assert hit.tokens == min(common_prefix(wanted, stored[hit.donor]), len(wanted) - 1)


def test_never_the_whole_prompt() -> None:
    _, index = store_of(("a", tuple(range(32)), ()))
    hit = index.longest("p", "e", range(32))
    assert hit is not None
    assert hit.tokens == 31


def test_the_whole_prompt_where_it_is_asked_for() -> None:
    _, index = store_of(("a", tuple(range(40)), ()))
    hit = index.longest("p", "e", range(32), whole=True)
    assert hit is not None
    assert (hit.donor, hit.tokens) == ("a", 32)


def test_partition_epoch_and_pictures_are_walls() -> None:
    tokens = tuple(range(48))
    _, index = store_of(("a", tokens, (Span(16, 16, "red"),)))
    assert index.longest("q", "e", tokens, (Span(16, 16, "red"),)) is None
    assert index.longest("p", "f", tokens, (Span(16, 16, "red"),)) is None
    other = index.longest("p", "e", tokens, (Span(16, 16, "blue"),))
    assert other is not None
    assert other.tokens == 16


def test_removed_chunks_are_not_found() -> None:
    _, index = store_of(("a", tuple(range(32)), ()), ("b", tuple(range(20)), ()))
    index.remove("a")
    hit = index.longest("p", "e", range(32))
    assert hit is not None
    assert (hit.donor, hit.tokens) == ("b", 20)
    index.remove("b")
    index.remove("b")
    assert index.longest("p", "e", range(32)) is None
    assert len(index) == 0
