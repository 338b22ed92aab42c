"""A real engine of the patched vLLM, with a connector that supplies wrong state; prints what a ladder of requests found, as JSON.

python patched_program.py MODEL
"""

import json
import random
import sys
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CommitPolicy,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

BLOCK = 32
REGISTERED: list[str] = []
"""Names of what the workers were given, in the order of the calls."""


class Blocks(KVConnectorMetadata):
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


class WrongState(KVConnectorBase_V1):
    """Supplies the same wrong state for all whole blocks of a request that names a policy."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.caches: dict[str, torch.Tensor] = {}
        self.ids: list[int] = []

    def register_model(self, model: torch.nn.Module) -> None:
        REGISTERED.append(type(model).__name__)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        REGISTERED.append("KV caches")
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Blocks)
        for cache in self.caches.values():
            part = cache[metadata.ids]
            cache[metadata.ids] = 4 * torch.randn(
                part.shape, generator=torch.Generator().manual_seed(0), dtype=part.dtype
            )

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if not request.kv_transfer_params:
            return 0, False
        whole = (request.num_prompt_tokens - 1) // BLOCK * BLOCK
        return max(0, whole - num_computed_tokens), False

    def get_commit_policy(self, request: Any, num_external_tokens: int) -> CommitPolicy:
        assert num_external_tokens > 0
        return CommitPolicy[request.kv_transfer_params["policy"]]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            whole = (request.num_prompt_tokens - 1) // BLOCK
            self.ids += blocks.get_block_ids()[0][whole - num_external_tokens // BLOCK : whole]

    def build_connector_meta(self, scheduler_output: Any) -> Blocks:
        ids, self.ids = self.ids, []
        return Blocks(ids)


def prompt(seed: int, count: int = 300) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(8, 480) for _ in range(count)]


def main(model: str) -> None:
    transfer = KVTransferConfig(
        kv_connector="WrongState", kv_connector_module_path="patched_program", kv_role="kv_both"
    )
    llm = LLM(
        model, kv_transfer_config=transfer, dtype="float32", max_model_len=1024, enforce_eager=True, max_num_seqs=8,
        block_size=BLOCK, enable_prefix_caching=True,
    )  # fmt: skip

    def ask(tokens: list[int], salt: str, policy: str = "") -> tuple[list[int], int]:
        """Token ids of the answer, and how many of the prompt's tokens came from a cache."""
        extra = {"kv_transfer_params": {"policy": policy}} if policy else None
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args=extra)
        (result,) = llm.generate([{"prompt_token_ids": tokens, "cache_salt": salt}], params, use_tqdm=False)
        return list(result.outputs[0].token_ids), result.num_cached_tokens or 0

    one, part = prompt(1), prompt(1)[:160]  # the beginning is computed before: five exact blocks
    ask(part, "wrong")
    wrong, _ = ask(one, "wrong", "REQUEST_ONLY")
    rungs = {
        "same": one,
        "longer": one + prompt(2, 64),
        "shorter": one[:256],
        "next turn": one + wrong + prompt(3, 40),
        "exact beginning": part + prompt(4, 100),
    }
    found: dict[str, Any] = {"wrong": wrong != ask(one, "truth")[0]}
    for policy in CommitPolicy:
        found[policy.name] = {}
        for rung, tokens in rungs.items():
            salt = f"{policy.name} {rung}"
            ask(part, salt)
            given = ask(one, salt, policy.name) == (wrong, 288)
            answer, cached = ask(tokens, salt)
            found[policy.name][rung] = [given, cached, answer == ask(tokens, "truth")[0]]
    print(json.dumps({"registered": sys.modules["patched_program"].REGISTERED, "found": found}))


if __name__ == "__main__":
    import patched_program  # vLLM imports it by this name

    patched_program.main(sys.argv[1])
