"""DejaKV's worker side in vLLM on a small model that runs as vLLM's models do on a GPU: save, exact hit and blend, step by step.

KV caches have FlashAttention's layout of vLLM 0.32, `[blocks, kv_heads, block_tokens, 2 * head_dim]` with a block's tokens before its heads in
memory. The model is bf16, and has norms, rotation and attention in float32 where vLLM's have.
"""

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tests.gpu.pretended import Gpu
from vllm.forward_context import get_forward_context

from dejakv.blend.offsets import OffsetCorrection, corrected
from dejakv.engines.vllm.blend import fused
from dejakv.engines.vllm.blend.blend import BlendRunner
from dejakv.engines.vllm.blend.correction_table import CorrectionTable
from dejakv.engines.vllm.blend.rotary import LayerRotaryTables
from dejakv.engines.vllm.blend.rows import PromptRows, RowForward
from dejakv.engines.vllm.blend.state import BlendState
from dejakv.engines.vllm.generations import WeightDigests, WeightsWatch
from dejakv.engines.vllm.messages import LoadOrder, SaveOrder, StepPlan
from dejakv.engines.vllm.pages import PagedKV
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.engines.vllm.worker import WorkerSide
from dejakv.identity import exact_key
from dejakv.store.base import StateInfo
from dejakv.store.store import Store

BLOCK, HEADS, KV_HEADS, WIDTH, HIDDEN = 16, 4, 2, 16, 32
POSITIONS, VOCABULARY, SENTENCE_END = 4096, 500, 10
TIMEOUT_S = 60.0


class Flash:
    """In the place of `FlashAttentionImpl`: its two kernels."""

    num_heads, num_kv_heads, head_size, scale, logits_soft_cap = HEADS, KV_HEADS, WIDTH, WIDTH**-0.5, None

    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu = gpu

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        # As `reshape_and_cache_flash`, which wants the heads of a token side by side.
        assert key.stride()[1:] == value.stride()[1:] == (WIDTH, 1)

        def write(key: Any, value: Any, cache: Any, slots: Any) -> None:
            keys, values = cache.transpose(1, 2).split(WIDTH, dim=-1)
            written = slots >= 0
            block, offset = slots[written] // BLOCK, slots[written] % BLOCK
            keys[block, offset], values[block, offset] = (
                key[: len(slots)][written].to(cache.dtype),
                value[: len(slots)][written].to(cache.dtype),
            )

        self._launch("reshape_and_cache_flash", write, key, value, cache, slots, writes=(cache,))

    def forward(self, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any) -> Any:
        def attend(query: Any, cache: Any, starts: Any, lengths: Any, tables: Any, output: Any) -> None:
            for number, length in enumerate(lengths.tolist()):
                begin, end = starts[number : number + 2].tolist()
                past = (
                    cache.transpose(1, 2)[tables[number, : -(-length // BLOCK)].long()].flatten(0, 1)[:length].float()
                )
                keys, values = past.repeat_interleave(HEADS // KV_HEADS, 1).split(WIDTH, dim=-1)
                scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), keys) * self.scale
                places = torch.arange(length, device=query.device)
                later = places[None] > places[length - (end - begin) :, None]
                output[begin:end] = torch.einsum(
                    "hqk,khd->qhd", scores.masked_fill_(later, -math.inf).softmax(-1), values
                ).to(output.dtype)

        common = (metadata.query_start_loc, metadata.seq_lens, metadata.block_table_tensor)
        self._launch("flash_attn_varlen", attend, query, cache, *common, output, writes=(output,))
        return output

    def _launch(self, name: str, run: Callable[..., None], *tensors: Any, writes: tuple[Any, ...]) -> None:
        run(*tensors) if self._gpu is None else self._gpu.launch(name, run, *tensors, writes=writes)


class Attention(torch.nn.Module):
    attn_backend = SimpleNamespace(forward_includes_kv_cache_update=False)
    sliding_window = None

    def __init__(self, name: str, gpu: Gpu | None) -> None:
        super().__init__()
        self.layer_name, self.impl, self.kv_cache = name, Flash(gpu), None

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        context = get_forward_context()
        output = torch.empty_like(query)
        self.impl.do_kv_cache_update(self, key, value, self.kv_cache, context.slot_mapping[self.layer_name])
        return self.impl.forward(
            self, query, key, value, self.kv_cache, context.attn_metadata[self.layer_name], output=output
        )


class RotaryEmbedding(torch.nn.Module):
    is_neox_style = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(POSITIONS).float(), 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH))
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], -1).to(torch.bfloat16).to(device)

    def forward(self, positions: Any, rows: Any) -> Any:
        cos, sin = self.cos_sin_cache.index_select(0, positions).float().unsqueeze(1).chunk(2, dim=-1)
        numbers, partners = rows.float().chunk(2, dim=-1)
        return torch.cat((numbers * cos - partners * sin, partners * cos + numbers * sin), dim=-1).to(rows.dtype)


class Layer(torch.nn.Module):
    def __init__(
        self, number: int, rotary: RotaryEmbedding, draw: Callable[..., torch.Tensor], gpu: Gpu | None
    ) -> None:
        super().__init__()
        self.attn, self.rotary_emb = Attention(f"layers.{number}.attn", gpu), rotary
        self.register_buffer("inward", draw(HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH))
        self.register_buffer("outward", draw(HEADS * WIDTH, HIDDEN))

    def forward(self, positions: Any, hidden: Any) -> Any:
        wide = hidden.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(hidden.dtype)
        query, key, value = (
            (normed @ self.inward).view(len(hidden), -1, WIDTH).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        )
        query, key = self.rotary_emb(positions, query), self.rotary_emb(positions, key)
        return hidden + self.attn(query, key, value).flatten(1) @ self.outward


class Model(torch.nn.Module):
    def __init__(self, layers: int, device: torch.device, gpu: Gpu | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * shape[0] ** -0.5).to(torch.bfloat16).to(device)

        rotary = RotaryEmbedding(device)
        self.register_buffer("table", draw(VOCABULARY, HIDDEN))
        self.layers = torch.nn.ModuleList(Layer(number, rotary, draw, gpu) for number in range(layers))

    def embed_input_ids(self, ids: Any) -> Any:
        return torch.nn.functional.embedding(ids, self.table)

    def forward(self, input_ids: Any, positions: Any, **_: Any) -> Any:
        hidden = self.embed_input_ids(input_ids)
        for layer in self.layers:
            hidden = layer(positions, hidden)
        return hidden


def emulated_kernels(gpu: Gpu | None) -> fused.Kernels:
    """In the place of the Triton kernels: they read and write at addresses, each in one launch."""

    def memory(address: int, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        nbytes = (int(offsets.max()) + 1) * dtype.itemsize
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)

    def offsets(steps: Any, slots: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        page, token = slots // steps.block, slots % steps.block
        heads, numbers = (torch.arange(size) for size in shape)
        rows = page * steps.page + token // steps.group_size * steps.group + token % steps.group_size * steps.token
        columns = numbers // steps.pack_size * steps.pack + numbers % steps.pack_size * steps.number
        return rows[:, None, None] + (heads * steps.head)[:, None] + columns

    def copy_rows(source: Any, target: Any, index: Any, rotary: Any) -> None:
        read, write = source.steps, target.steps
        of_layers = list(range(source.layers))

        def run(source_memory: Any, target_memory: Any, index: Any, bases: Any, *of_tables: Any) -> None:
            dtype = source_memory.dtype
            here, there = (
                offsets(steps, slots, source.shape) for steps, slots in zip((read, write), index, strict=False)
            )
            for layer in of_layers:
                begin = source_memory.data_ptr() + layer * read.layer * dtype.itemsize
                into = (
                    int(bases[layer])
                    if target.bases is not None
                    else target_memory.data_ptr() + layer * write.layer * dtype.itemsize
                )
                keys, values = (memory(begin, at, dtype)[at] for at in (here, here + read.value))
                if of_tables:
                    table, addresses = of_tables
                    places = torch.arange(table.numel())
                    rows = memory(int(addresses[layer]), places, table.dtype)[places].view(table.shape)
                    keys = LayerRotaryTables([(rows, rotary.neox_style)]).moved(keys[:, None], index[2], index[3])[:, 0]
                for at, part in ((there, keys), (there + write.value, values)):
                    memory(into, at, dtype)[at] = part

        bases = index if target.bases is None else target.bases
        tensors = (
            source.memory,
            target.memory,
            index,
            bases,
            *(() if rotary is None else (rotary.table, rotary.bases)),
        )
        run(*tensors) if gpu is None else gpu.launch("copy_rows", run, *tensors, writes=(target.memory,))

    def correct_rows(layer: int, key: Any, value: Any, rows: Any, source: Any, target: Any, table: Any) -> None:
        read, write = source.steps, target.steps

        def run(key: Any, value: Any, rows: Any, memory_: Any, cache: Any, bases: Any, *parts: Any) -> None:
            table, dtype = CorrectionTable(*parts), cache.dtype
            begin = memory_.data_ptr() + layer * read.layer * dtype.itemsize
            into = (
                int(bases[layer])
                if target.bases is not None
                else cache.data_ptr() + layer * write.layer * dtype.itemsize
            )
            pieces: dict[int, list[list[int]]] = {}
            for tile in table.tiles.tolist():
                pieces.setdefault(tile[2], []).append(tile)
            # By pieces, as operations of torch do: the result is theirs bit for bit.
            for tiles in pieces.values():
                first, _, anchor, anchors, weight = tiles[0]
                count = sum(tile[1] for tile in tiles)
                rest, slots = (each[first : first + count] for each in (table.rest, table.slots))
                anchored, places = (each[anchor : anchor + anchors] for each in (table.anchors, table.places))
                weights = table.weights[weight : weight + count * anchors].view(count, anchors)
                fresh = torch.stack((key[rows[places]], value[rows[places]])).transpose(1, 2)
                wanted = torch.cat((anchored, rest))
                at = offsets(read, wanted, source.shape)
                state = torch.stack(
                    [memory(begin, at + half * read.value, dtype)[at + half * read.value] for half in range(2)]
                )
                order = torch.arange(len(wanted))
                move = OffsetCorrection(order[anchors:], order[:anchors], order[:anchors], weights)
                moved = corrected(state.transpose(1, 2), fresh, move).transpose(1, 2)
                there = offsets(write, slots, source.shape)
                for half in range(2):
                    memory(into, there + half * write.value, dtype)[there + half * write.value] = moved[half]

        bases = rows if target.bases is None else target.bases
        tensors = (key, value, rows, source.memory, target.memory, bases, *table)
        run(*tensors) if gpu is None else gpu.launch("correct_rows", run, *tensors, writes=(target.memory,))

    return fused.Kernels(copy_rows, correct_rows)


class Server:
    """One worker, its prompts and its blocks, on a device."""

    def __init__(
        self,
        config: Any,
        layers: int,
        blocks: int,
        gpu: Gpu | None = None,
        device: torch.device | None = None,
        pinned_bytes: int = 64 << 20,
    ) -> None:
        self.gpu = gpu
        device = device or (torch.device("cpu") if gpu is None else gpu.device)
        self.model = Model(layers, device, gpu)
        attention = {layer.attn.layer_name: layer.attn for layer in self.model.layers}
        shape = (blocks, BLOCK, KV_HEADS, 2 * WIDTH)
        caches = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device=device).permute(0, 2, 1, 3) for name in attention
        }
        for name, layer in attention.items():
            layer.kv_cache = caches[name]

        group = SimpleNamespace(layer_names=list(attention), build_metadata=lambda common: common)
        runner = SimpleNamespace(vllm_config=config, device=device, attn_groups=[[group]])
        self.paged = PagedKV(attention, caches, BLOCK, blocks, torch.bfloat16, entries=True)
        self.forward = RowForward(runner, self.model, attention, BLOCK)
        settings = ConnectorSettings.from_extra({"mode": "blend", "blend_quality": "strict"})
        rotary = LayerRotaryTables.from_model(self.model, list(attention.values()))
        ends = np.array([SENTENCE_END])
        kernels = fused.triton_kernels if gpu is None else lambda: emulated_kernels(gpu)
        with patch.object(fused, "triton_kernels", kernels):
            blends = BlendRunner(self.forward, rotary, self.paged, settings.blend_config(), POSITIONS, 8192, ends)
        self.store = Store()
        self.worker = WorkerSide(
            self.store, self.paged, blends, WeightsWatch(WeightDigests(self.model)), TIMEOUT_S, 1 << 40, pinned_bytes
        )
        self._free = list(range(2, blocks))
        self.fallbacks: list[str] = []

    def release(self, *tables: tuple[int, ...]) -> None:
        for table in tables:
            self._free += table

    def blocks(self, tokens: int) -> tuple[int, ...]:
        table, self._free = self._free[: -(-tokens // BLOCK)], self._free[-(-tokens // BLOCK) :]
        assert len(table) == -(-tokens // BLOCK)
        return tuple(table)

    def compute(self, ids: np.ndarray) -> tuple[int, ...]:
        """Compute a prompt as vLLM does, in new blocks."""
        table = self.blocks(len(ids))
        self.forward.run([PromptRows(torch.from_numpy(ids), torch.arange(len(ids)), table)])
        return table

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Any:
        self.worker.start_loads(plan)
        # Or the number of steps, each of which looks at the weights, would be the threads'.
        wait([item.fetched for item in self.worker.loads._loading if item.fetched is not None], TIMEOUT_S)
        self.worker.copy_saves(plan)
        self.worker.finish(plan)
        report = self.worker.report()
        self.fallbacks += [] if report is None else report.fallbacks
        return report

    def save(self, ids: np.ndarray, table: tuple[int, ...]) -> StateInfo:
        """Order the copy of a prompt's state; a thread stores it."""
        tokens = tuple(ids.tolist())
        meta = StateInfo(exact_key("p", "e", tokens, ()), "p", "e", tokens, "", "", created=time.time())
        self.step(StepPlan(saves=[SaveOrder(meta, (table,), 0, 0, len(ids), True)], computing=True))
        return meta

    def load(self, order: LoadOrder, room: int = 8192) -> Any:
        """Steps until a load has ended."""
        report, until = self.step(StepPlan(loads=[order], room=room)), time.monotonic() + TIMEOUT_S
        while not (report and report.loaded):
            assert time.monotonic() < until
            report = self.step(StepPlan(idle=True, room=room))
        return report.loaded[0]

    def start_blend(self, order: LoadOrder) -> BlendState:
        """Order a blend, and wait for its draft."""
        self.worker.start_loads(StepPlan(loads=[order]))
        arrived = self.worker.loads._loading[-1].fetched.result(TIMEOUT_S)
        assert isinstance(arrived, BlendState), arrived
        return arrived

    def state(self, table: Sequence[int], tokens: int) -> torch.Tensor:
        """K and V in the blocks, in host memory."""
        entries = self.paged.gather(table, tokens)
        return getattr(entries, "elem", entries).cpu().clone()

    def close(self) -> None:
        self.worker.close()


def prompts(tokens: int, donors: int, seed: int = 1) -> tuple[list[np.ndarray], np.ndarray]:
    """Donors, and a prompt of about so many tokens that has a passage of each behind another beginning, with an edit in its middle."""
    rng = np.random.default_rng(seed)
    passages = [rng.integers(12, 480, tokens // donors - 40) for _ in range(donors)]
    for passage in passages:
        passage[24::25] = SENTENCE_END
    stored = [
        np.concatenate([rng.integers(12, 480, 37), [SENTENCE_END], passage, rng.integers(12, 480, 20)])
        for passage in passages
    ]
    for passage in passages:
        passage[len(passage) // 2] = 11
    target = np.concatenate(
        [rng.integers(12, 480, 60), [SENTENCE_END], *passages, [SENTENCE_END], rng.integers(12, 480, 30)]
    )
    return stored, target[: len(target) // BLOCK * BLOCK]


def started(
    config: Any,
    layers: int,
    tokens: int,
    donors: int,
    gpu: Gpu | None,
    device: torch.device | None = None,
    pinned_bytes: int = 64 << 20,
) -> tuple[Server, list[StateInfo], np.ndarray]:
    """A server that has computed and stored the donors, and the prompt to blend."""
    stored, target = prompts(tokens, donors)
    server = Server(config, layers, 4 + 4 * (tokens // BLOCK), gpu, device, pinned_bytes)
    metas = [server.save(ids, server.compute(ids)) for ids in stored]
    server.worker.saver.flush()
    return server, metas, target


def blend_order(
    server: Server, metas: Sequence[StateInfo], target: np.ndarray
) -> tuple[LoadOrder, tuple[int, ...], int]:
    stop = len(target) - BLOCK
    table = server.blocks(len(target))
    ids = tuple(meta.id for meta in metas)
    return LoadOrder("blend", ids, (table[: stop // BLOCK],), 0, stop, tuple(target.tolist())), table, stop
