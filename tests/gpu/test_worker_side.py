"""The worker side on a pretended GPU: right values however late its copies are, and what it launches, waits for and copies.

Counts are of the engine loop and of threads together, except for waits. They are taken at two depths of the model, so that each is so many a layer and
so many beside them. `research.gpu.arithmetic.COUNTS` holds what is reached, and what is wanted where that is less.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from research.gpu.arithmetic import COUNTS
from tests.gpu.pretended import Counts, Gpu, pretended
from tests.gpu.worker import BLOCK, KV_HEADS, WIDTH, Server, blend_order, prompts, started

from dejakv.engines.vllm import device
from dejakv.engines.vllm.device import CudaCopies, RangePool
from dejakv.engines.vllm.generations import CHANGED
from dejakv.engines.vllm.messages import LoadOrder, LoadResult

TOKENS, DONORS = 640, 3
LAYERS = (3, 6)
PAGE = 2 * KV_HEADS * BLOCK * WIDTH * 2


def blended(config: Any, gpu: Gpu | None, pinned_bytes: int = 64 << 20) -> tuple[torch.Tensor, LoadResult]:
    server, metas, target = started(config, 2, TOKENS, DONORS, gpu, pinned_bytes=pinned_bytes)
    order, table, stop = blend_order(server, metas, target)
    if gpu is not None:
        gpu.take()
    result = server.load(order)
    assert not result.problem
    state = server.state(table, stop)
    server.close()
    return state, result


@pytest.fixture(scope="module")
def by_cpu(config: Any) -> tuple[torch.Tensor, LoadResult]:
    state, result = blended(config, None)
    assert 0 < result.computed < TOKENS // 2
    return state, result


@pytest.mark.parametrize(
    ("index", "pinned", "batch", "stage"), [(0, 999, 99, 999), (1, 999, 99, 5), (1, 5, 2, 999), (0, 0, 2, 999), (1, 3, 99, 2), (0, 999, 99, 0)]
)  # fmt: skip
def test_a_blend_is_that_of_the_cpu_bit_for_bit(
    config: Any, monkeypatch: Any, by_cpu: Any, index: int, pinned: int, batch: int, stage: int
) -> None:
    """However many pages the pool of pinned memory, a batch and the stage have room for."""
    monkeypatch.setattr(device, "UPLOAD_BYTES", batch * 2 * PAGE)
    monkeypatch.setattr(device, "STAGE_BYTES", max(1, stage * 2 * PAGE))
    state, wanted = by_cpu
    for seed in (1, 2):
        with pretended(index, seed) as gpu:
            blend, result = blended(config, gpu, max(1, pinned * 2 * PAGE))
            counts = gpu.take()
        assert torch.equal(blend, state)
        assert result.computed == wanted.computed
        assert not counts.races
        # A donor goes up in one batch or several, and a batch that has gone up makes room.
        fits = pinned >= min(batch + 16, 43) and stage > 0
        assert result.unpinned != fits


def test_rows_that_are_not_computed_hardly_depend_on_how_the_others_were_split(config: Any) -> None:
    """Into forwards of few sequences, as a GPU's backend may demand. Layer by layer it is another computation, but no other correction."""
    states: list[torch.Tensor] = []
    for runs in (None, 4):
        with pretended(1) as gpu:
            server, metas, target = started(config, 2, TOKENS, DONORS, gpu)
            server.forward.max_runs = runs
            order, table, stop = blend_order(server, metas, target)
            blend, runner, forwards = server.start_blend(order), server.worker.blend_runner, 0
            with torch.inference_mode():
                runner.check(blend)
                runner.begin(blend)
                donors, rows = server.state(table, stop), blend.rows
                while not blend.over:
                    runner.advance([blend], 8192)
                    forwards += 1
            assert (forwards == 1) == (runs is None)
            states.append(server.state(table, stop).float())
            assert not gpu.take().races
            server.close()
    rest = torch.ones(stop, dtype=torch.bool)
    rest[rows] = False
    whole, split = (state[:, 1][:, :, rest] for state in states)
    moved = (whole - donors.float()[:, 1][:, :, rest]).abs().mean()
    assert moved > 0
    assert (split - whole).abs().mean() < 0.05 * moved


def saved_and_loaded(config: Any, index: int, seeds: range, pinned_bytes: int = 64 << 20) -> tuple[list[bool], Counts]:
    """Whether state comes back as it was computed, though its blocks are overwritten as soon as a save is ordered; and what saves took."""
    right: list[bool] = []
    saves = Counts()
    with pretended(index) as gpu:
        server = Server(config, 1, 32, gpu, pinned_bytes=pinned_bytes)
        for seed in seeds:
            gpu.random.seed(seed)
            ids = prompts(120, 1, seed)[0][0]
            table, other = server.compute(ids), server.blocks(len(ids))
            before = server.state(table, len(ids) - 1)
            gpu.take()
            meta = server.save(ids, table)
            saves.add(gpu.take())

            if seed % 2:
                # Or a later operation on the stream, such as the next one, might do what an event has to.
                server.worker.saver.flush()
            for cache in server.paged.caches.values():
                cache.zero_()
            server.worker.saver.flush()
            problem = server.load(LoadOrder("hit", (meta.id,), (other,), 0, len(ids) - 1)).problem
            right.append(not problem and torch.equal(server.state(other, len(ids) - 1), before))
            server.release(table, other)
            saves.races.update(gpu.take().races)
        server.close()
    return right, saves


def test_saves_and_exact_hits_are_right_however_late_copies_are(config: Any, monkeypatch: Any) -> None:
    for index, stage in ((0, 1 << 20), (1, 3 * PAGE)):
        # The second one is smaller than a prompt, so that pages wait for its halves.
        monkeypatch.setattr(device, "STAGE_BYTES", stage)
        right, saves = saved_and_loaded(config, index, range(25))
        assert all(right)
        assert not saves.races
        assert not saves.loop_waits


@pytest.mark.parametrize(("pinned", "stage"), [(64, 64 << 20), (1 << 62, 64 << 20), (64 << 20, 64)])
def test_memory_that_is_too_small_or_refused_costs_time_alone(
    config: Any, monkeypatch: Any, pinned: int, stage: int
) -> None:
    monkeypatch.setattr(device, "STAGE_BYTES", stage)
    right, saves = saved_and_loaded(config, 1, range(3), pinned)
    assert all(right)
    assert not saves.races


@pytest.mark.parametrize("first", ["save", "load"])
def test_nothing_is_stored_or_used_once_the_weights_were_changed(config: Any, first: str) -> None:
    """Though the host does not wait for the comparison in the step that begins it."""
    with pretended() as gpu:
        server = Server(config, 1, 32, gpu)
        (ids, other), _ = prompts(200, 2)
        table, blocks, empty = server.compute(ids), server.compute(other), server.blocks(len(ids))
        meta = server.save(ids, table)
        server.worker.saver.flush()

        server.model.table.elem.mul_(2)
        if first == "save":
            spoiled = server.save(other, blocks)
            server.worker.saver.flush()
            assert server.store.meta(spoiled.id) is None
        assert server.store.meta(meta.id) is not None
        assert server.load(LoadOrder("hit", (meta.id,), (empty,), 0, len(ids) - 1)).problem == CHANGED
        server.close()


def test_a_pool_lends_what_is_free_and_waits_for_more() -> None:
    pool = RangePool(torch.empty(256, dtype=torch.uint8))
    first, second = pool.lend((3, 40)), pool.lend((100,))
    assert first is not None
    assert second is not None
    assert first.tensor.shape == (3, 40)
    assert pool.lend((1,)) is None
    assert pool.lend((257,), wait_s=60.0) is None, "it never fits"
    del first
    third = pool.lend((128,), wait_s=60.0)
    del second, third
    assert pool.lend((256,)) is not None, "neighbours are one range again"


def saving(*, event: str = "", waits: bool = True, pinned: bool = True, blocks: bool = False) -> Callable[..., Any]:
    """`CudaCopies._leave` with a fault."""

    def leave(copies: CudaCopies, pages: torch.Tensor, host: torch.Tensor) -> Any:
        early = copies._event_on(copies._down)
        if waits:
            copies._down.wait_stream(torch.cuda.current_stream(copies.device))
        with torch.cuda.stream(copies._down):
            if pinned:
                host.copy_(pages, non_blocking=True)
            else:
                host.copy_(torch.empty(host.shape, dtype=host.dtype).copy_(pages, non_blocking=True))
        late = copies._event_on(torch.cuda.Stream(copies.device) if event == "elsewhere" else copies._down)
        if blocks:
            late.synchronize()
        return early if event == "early" else late

    return leave


def loading(*, early: bool = False, waits: bool = True) -> Callable[..., Any]:
    """`CudaCopies.load` with a fault."""

    def load(copies: CudaCopies, host: torch.Tensor, put: Callable[..., object]) -> Any:
        event = copies.load_event()
        if waits:
            copies._up.wait_stream(torch.cuda.current_stream(copies.device))
        with torch.cuda.stream(copies._up):
            put(host.to(copies.device, non_blocking=True), 0)
        return event if early else copies.load_event()

    return load


Right = Callable[[list[bool], Counts], bool]
FAULTS: dict[str, tuple[str, Callable[..., Any], Right]] = {
    "no event": ("_leave", saving(event="early"), lambda right, _: not all(right)),
    "event of another stream": ("_leave", saving(event="elsewhere"), lambda right, _: not all(right)),
    "copy beside the pages": ("_leave", saving(waits=False), lambda _, saves: bool(saves.races)),
    "pageable": ("_leave", saving(pinned=False), lambda _, saves: saves.copied("pageable", "d2h") > 0),
    "wait of the loop": (
        "_leave",
        saving(blocks=True),
        lambda _, saves: any(
            "_prepare_save" in where or " leave" in where or "save" in where for where in saves.loop_waits
        ),
    ),
    "load without an event": ("load", loading(early=True), lambda right, saves: not all(right) or bool(saves.races)),
    "load beside the loop": ("load", loading(waits=False), lambda _, saves: bool(saves.races)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_copies_are_found(config: Any, monkeypatch: Any, fault: str) -> None:
    name, faulty, shows = FAULTS[fault]
    monkeypatch.setattr(CudaCopies, name, faulty)
    assert shows(*saved_and_loaded(config, 0, range(10)))


def counted(config: Any, layers: int) -> dict[str, Counts]:
    """What each step takes."""
    counts: dict[str, Counts] = {}
    with pretended(1, 0) as gpu:
        # An event has passed when it is asked for, or steps would be as many as chance has it.
        gpu.random.random = lambda: 0.0
        server = Server(config, layers, 4 + 5 * (TOKENS // BLOCK), gpu)
        donors, target = prompts(TOKENS, DONORS)
        tables = [server.compute(ids) for ids in donors]
        metas = []
        for ids, table in zip(donors, tables, strict=True):
            gpu.take()
            metas.append(server.save(ids, table))
            server.worker.saver.flush()
            counts["save"] = gpu.take()

        table = server.blocks(len(donors[0]))
        assert not server.load(LoadOrder("hit", (metas[0].id,), (table,), 0, len(donors[0]) - 1)).problem
        counts["hit"] = gpu.take()

        order, _, _ = blend_order(server, metas, target)
        blend, runner = server.start_blend(order), server.worker.blend_runner
        counts["draft"] = gpu.take()
        server.worker.loads.take_news()
        counts["take"] = gpu.take()
        with torch.inference_mode():
            runner.check(blend)
            blend.checked = True
            counts["check"] = gpu.take()
            assert blend.draft.question_rows
            runner.begin(blend)
            counts["begin"] = gpu.take()
            while not blend.over:
                runner.advance([blend], 8192)
            counts["advance"] = gpu.take()
        server.close()
    return counts


@pytest.fixture(scope="module")
def counts(config: Any) -> tuple[dict[str, Counts], dict[str, Counts]]:
    few, many = (counted(config, layers) for layers in LAYERS)
    return few, many


@pytest.mark.parametrize("step", COUNTS)
def test_launches_and_waits_keep_within_their_budgets(counts: Any, step: str) -> None:
    few, many = (each[step] for each in counts)
    for name, (a_layer, beside) in COUNTS[step].items():
        growth = many.figures[name] - few.figures[name]
        reached = f"{step}, {name}: {few.figures[name]} and {many.figures[name]} at {LAYERS} layers"
        assert growth <= a_layer * (LAYERS[1] - LAYERS[0]), reached
        assert many.figures[name] <= a_layer * LAYERS[1] + beside, reached
    assert not few.races
    assert not many.races


def test_state_is_copied_once_each_way(counts: Any) -> None:
    """A save takes a prompt's pages down once, a hit takes them up once; nothing else is of that size."""
    for layers, each in zip(LAYERS, counts, strict=True):
        page = layers * 2 * KV_HEADS * BLOCK * WIDTH * 2
        pages = -(-len(prompts(TOKENS, DONORS)[0][0]) // BLOCK)
        assert each["save"].copied("d2h") == each["save"].copied("d2h", "pinned", "async")
        # And whether the weights differ.
        assert each["save"].copied("d2h") == pages * page + 1
        assert pages * page <= each["hit"].copied("h2d") < (pages + 1) * page
        # Donors of a blend too; what else goes up are tokens, to compare their embeddings.
        assert each["draft"].copied("h2d", "pinned", "async") > TOKENS // BLOCK * page
        assert each["draft"].copied("h2d", "pageable") < 8 * TOKENS
