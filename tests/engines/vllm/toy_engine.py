"""vLLM's scheduler and both sides of the connector around a model of integers, whose answers can be worked out by hand.

The model's state of a token is a sum over the states of all tokens before it, and it has them from the KV cache alone. So one row that is
missing, foreign, stale, of a rejected draft or of other weights changes the answer. A step takes a millisecond.
"""

import copy
import functools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, SpeculativeConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm_harness import DOCS, worker_side

from dejakv.engines.vllm.bind import WorkerExtension

BLOCK, LAYERS, WIDTH = 16, 2, 4
ROW = LAYERS * 2 * WIDTH * 4
"""Bytes of a token's state."""
MODULUS, FACTORS, TOKEN = 999_983, (31, 57), (7919, 104_729)
DRAIN_S = 60.0
"""How long requests may take to come to their end; a request that hangs would take for ever."""


def state(layer: int, weight: int, token: int, before: int) -> int:
    """A token's state. `before` is the sum of the states of the tokens before it, each times its place."""
    return (FACTORS[layer] * before + TOKEN[layer] * token + weight) % MODULUS


def answer(prompt: Sequence[int], count: int, weight: int) -> list[int]:
    """What full computation answers."""
    tokens, sums, made = list(prompt), [0] * LAYERS, list[int]()
    for place, token in enumerate([*prompt, *[-1] * (count - 1)]):
        token = tokens[place] if token < 0 else token
        states = [state(layer, weight, token, sums[layer]) for layer in range(LAYERS)]
        sums = [(before + (place + 1) * each) % MODULUS for before, each in zip(sums, states, strict=True)]
        if place >= len(prompt) - 1:
            made.append(sampled(states))
            tokens.append(made[-1])
    return made


def sampled(states: Sequence[int]) -> int:
    return 8 + sum(states) % 400


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=False)


class Attention:
    """Writes K and V side by side, as FlashAttention does."""

    def __init__(self) -> None:
        self.impl = self

    def do_kv_cache_update(self, _layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        cache[slots // BLOCK, :, slots % BLOCK] = torch.cat([keys, values], dim=-1)


@dataclass
class Live:
    """A request as the model runner knows it."""

    tokens: list[int]
    blocks: list[int]
    prompt: int


class Worker(WorkerExtension):
    """In the place of vLLM's worker: it has a model runner."""

    def __init__(self, vllm_config: Any, model_runner: "Runner") -> None:
        self.vllm_config, self.model_runner = vllm_config, model_runner


class Runner:
    """In the place of vLLM's model runner: it computes what is scheduled, and has the connector do its part as vLLM's does."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, model: Weights, *, extended: bool) -> None:
        self._config, self._model = vllm_config, model
        self._worker = Worker(vllm_config, self) if extended else None
        shape = (kv_cache_config.num_blocks, 1, BLOCK, 2 * WIDTH)
        self._caches = {f"layer.{number}": torch.zeros(shape) for number in range(LAYERS)}
        vllm_config.compilation_config.static_forward_context = {name: Attention() for name in self._caches}
        ensure_kv_transfer_initialized(vllm_config, kv_cache_config)
        get_kv_transfer_group().register_kv_caches(self._caches)
        self._live: dict[str, Live] = {}
        self.computed: Counter[str] = Counter()
        self._rng = random.Random(0)
        self.drafts: dict[str, list[int]] = {}
        self.rejected = self.accepted = 0

    def get_model(self) -> Weights:
        return self._model

    def step(self, output: Any) -> ModelRunnerOutput:
        for name in output.finished_req_ids:
            self._live.pop(name, None)
        if not output.total_num_scheduled_tokens:
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self._config)
        starts = self._taken_in(output)
        hooks = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output)
        with set_forward_context(None, self._config), hooks as connector_output:
            drafted = output.scheduled_spec_decode_tokens
            made = {
                name: self._forward(name, starts[name], n, drafted.get(name, []))
                for name, n in output.num_scheduled_tokens.items()
            }
            speculative = self._config.speculative_config
            if speculative is not None:
                self.drafts = {
                    name: self._draft(name, speculative.num_speculative_tokens) for name, out in made.items() if out
                }
        names = list(made)
        places = {name: place for place, name in enumerate(names)}
        return ModelRunnerOutput(names, places, [made[name] for name in names], kv_connector_output=connector_output)

    def _taken_in(self, output: Any) -> dict[str, int]:
        """From which token on each request of the step is to be computed."""
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._live[new.req_id] = Live(list(new.prompt_token_ids), list(new.block_ids[0]), len(new.prompt_token_ids))
            starts[new.req_id] = new.num_computed_tokens
        known = output.scheduled_cached_reqs
        for name, blocks, start in zip(known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True):
            if name in known.resumed_req_ids:
                self._live[name].blocks = []
            self._live[name].blocks += blocks[0] if blocks else []
            starts[name] = start
        return starts

    def _draft(self, name: str, count: int) -> list[int]:
        """The next tokens, of which some are wrong. Their state is computed, too, and lies in the KV cache when they are rejected."""
        drafts = answer(self._live[name].tokens, count, int(self._model.weight.sum()))
        return [token if self._rng.random() < 0.7 else 7 for token in drafts]

    def _forward(self, name: str, start: int, count: int, drafts: Sequence[int]) -> list[int]:
        live, weight = self._live[name], int(self._model.weight.sum())
        stop, tokens = start + count, [*live.tokens, *drafts]
        assert stop <= len(tokens), f"{name}: more is scheduled than there are tokens"
        assert stop <= BLOCK * len(live.blocks), f"{name}: tokens without a block"
        self.computed[name] += count
        places = torch.arange(stop)
        blocks = torch.tensor(live.blocks)[places // BLOCK]
        last: list[list[int]] = []
        for layer, cache in enumerate(self._caches.values()):
            rows = cache[blocks[:start], 0, places[:start] % BLOCK].to(torch.int64).tolist()
            before = sum((place + 1) * (2 * row[2] - row[WIDTH]) for place, row in enumerate(rows)) % MODULUS
            fresh: list[list[float]] = []
            for place in range(start, stop):
                made = state(layer, weight, tokens[place], before)
                before = (before + (place + 1) * made) % MODULUS
                fresh.append([0, 0, made, 0, made, 0, 0, 0])  # K and V
            cache[blocks[start:], 0, places[start:] % BLOCK] = torch.tensor(fresh, dtype=cache.dtype)
            last.append([int(row[2]) for row in fresh[-1 - len(drafts) :]])
        if stop < len(live.tokens):
            return []
        made = [sampled(states) for states in zip(*last, strict=True)]
        right = next((place for place, draft in enumerate(drafts) if draft != made[place]), len(drafts))
        self.accepted, self.rejected = self.accepted + right, self.rejected + len(drafts) - right
        live.tokens += made[: right + 1]
        return made[: right + 1]


@dataclass
class Asked:
    """A request and what became of it. `weight` is that of the model when it came, `computed` how many tokens were not in the KV cache."""

    prompt: list[int]
    count: int
    salt: str | None
    wish: dict[str, Any]
    weight: int
    tokens: list[int] = field(default_factory=list[int])
    told: dict[str, Any] = field(default_factory=dict[str, Any])
    over: bool = False
    computed: int = 0


@functools.cache
def _base_config() -> Any:
    options = EngineArgs(
        model=str(DOCS), dtype="float32", max_model_len=256, enforce_eager=True, block_size=32, async_scheduling=False,
        kv_transfer_config=_transfer({}), enable_prefix_caching=True,
    )  # fmt: skip
    init_none_hash(sha256)
    return options.create_engine_config()


def _transfer(extra: dict[str, Any]) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="DejaKVConnector",
        kv_connector_module_path="dejakv.engines.vllm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"lookup_timeout_s": 30, "min_new_tokens": 1, "refresh_s": 0, **extra},
    )


def start_distributed(folder: Path) -> None:
    """A world of one rank, as a worker has it."""
    with set_current_vllm_config(_base_config()):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def end_distributed() -> None:
    cleanup_dist_env_and_memory()


class ToyEngine:
    """One engine. Only one may be open at a time; `start_distributed` goes before the first.

    budget  tokens of a step
    blocks  of the KV cache
    extra   `kv_connector_extra_config`
    prefix  whether vLLM has its own prefix cache
    extended  whether the worker has the extension that hands over the model
    drafts  tokens of speculative decoding
    transfer  `kv_transfer_config`, in place of `extra`
    """

    def __init__(
        self,
        extra: dict[str, Any],
        *,
        budget: int = 64,
        blocks: int = 40,
        seqs: int = 4,
        prefix: bool = True,
        extended: bool = True,
        drafts: int = 0,
        transfer: KVTransferConfig | None = None,
    ) -> None:
        config = copy.deepcopy(_base_config())
        config.kv_transfer_config = transfer or _transfer(extra)
        config.cache_config.num_gpu_blocks, config.cache_config.block_size = blocks, BLOCK
        config.cache_config.enable_prefix_caching = prefix
        config.scheduler_config.max_num_batched_tokens = budget
        config.scheduler_config.max_num_seqs = seqs
        config.scheduler_config.enable_chunked_prefill = True
        if drafts:
            config.speculative_config = SpeculativeConfig(
                method="ngram", num_speculative_tokens=drafts,
                target_model_config=config.model_config, target_parallel_config=config.parallel_config,
            )  # fmt: skip
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32)
        group = KVCacheGroupSpec([f"layer.{number}" for number in range(LAYERS)], spec)
        kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        self.model = Weights()
        with set_current_vllm_config(config):
            self.scheduler = Scheduler(config, kv, StructuredOutputManager(config), BLOCK)
            self.runner = Runner(config, kv, self.model, extended=extended)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.asked: dict[str, Asked] = {}

    @property
    def weight(self) -> int:
        return int(self.model.weight.sum())

    def add(self, prompt: Sequence[int], *, count: int = 1, salt: str | None = None, **wish: Any) -> str:
        """A new request; its name."""
        name = str(len(self.asked))
        extra = {"kv_transfer_params": {"dejakv": wish}}
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, extra_args=extra)
        self.asked[name] = Asked(list(prompt), count, salt, wish, self.weight)
        made = Request(name, list(prompt), params, None, cache_salt=salt, block_hasher=self._hasher)
        self.scheduler.add_request(made)
        return name

    def abort(self, name: str) -> None:
        self.asked[name].over = True
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        output = self.scheduler.schedule()
        made = self.scheduler.update_from_output(output, self.runner.step(output))
        drafts, self.runner.drafts = self.runner.drafts, {}
        if drafts:
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))
        for one in (item for outputs in made.values() for item in outputs.outputs):
            asked = self.asked[one.request_id]
            if asked.over:
                continue
            asked.tokens += one.new_token_ids
            asked.over = one.finish_reason is not None
            if asked.over:
                asked.told = (one.kv_transfer_params or {"dejakv": {}})["dejakv"]
                asked.computed = self.runner.computed[one.request_id]

    def drain(self) -> None:
        """Steps until no request is left and no block is held."""
        ends = time.monotonic() + DRAIN_S
        while self.scheduler.has_requests() or self.held:
            self.step()
            assert time.monotonic() < ends, f"still there: {list(self.scheduler.requests)}, {self.held} blocks held"

    def settle(self) -> None:
        """Drains, and steps until all that is to be stored is stored and confirmed."""
        self.drain()
        for _ in range(2):  # what is stored in one is confirmed in the next
            worker_side().saver.flush(10)
            self.step()

    def forget(self) -> None:
        """All is stored, and vLLM's own prefix cache is empty: what is reused from here on comes from the store."""
        self.settle()
        assert self.reset()

    def ask(self, prompt: Sequence[int], **options: Any) -> Asked:
        """One request, from its arrival to its end."""
        name = self.add(prompt, **options)
        self.drain()
        return self.asked[name]

    @property
    def held(self) -> int:
        """Blocks that are in use; one is nobody's."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    @property
    def loading(self) -> int:
        """How many requests wait for a load, or are over and wait for a copy."""
        return sum(
            one.status == RequestStatus.WAITING_FOR_REMOTE_KVS or one.is_finished()
            for one in self.scheduler.requests.values()
        )

    @property
    def arrived(self) -> bool:
        """Whether vLLM was told that a load is over, and has not scheduled its request since."""
        return bool(self.scheduler.finished_recving_kv_req_ids)

    def reset(self, *, connector: bool = False, running: bool = False) -> bool:
        return self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)

    def close(self) -> None:
        self.scheduler.shutdown()
        ensure_kv_transfer_shutdown()
