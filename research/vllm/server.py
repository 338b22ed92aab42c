"""An offline vLLM that is stepped by hand, and the models that it runs."""

import os
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejakv.models import path, resolve

BUNDLED = ("docs-lm", "smollm2-135m")
SHAPES: dict[str, dict[str, Any]] = {
    # KV a token in bf16: 12 KiB, 128 KiB, 128 KiB
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32_768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
"""Published configurations. Their weights are random, drawn as vLLM starts."""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
"""What makes a shape small: the same kind of model, to try a case on."""
MODELS = (*BUNDLED, *SHAPES, *(f"{name}-small" for name in SHAPES))
VOCABULARY = range(8, 480)


def folder_of(name: str) -> str:
    """The model's folder; that of a shape is made in the system's folder for temporary files,
    without weights, and kept there.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if name in BUNDLED:
        return str(resolve(name))
    folder = Path(tempfile.gettempdir()) / f"dejakv-shape-{name}"
    if not (folder / "config.json").is_file():
        import torch

        shape = name.removesuffix("-small")
        values = {
            "max_position_embeddings": 131_072,
            **SHAPES[shape],
            **(SMALL if name != shape else {}),
        }
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device("meta"):
            config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
        config.dtype = torch.bfloat16
        folder.mkdir(exist_ok=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(path("docs-lm") / file, folder / file)
        config.save_pretrained(folder)
    return str(folder)


def tokens(count: int, seed: int) -> list[int]:
    """Random token ids."""
    return random.Random(seed).choices(VOCABULARY, k=count)


class Server:
    """vLLM with prefix caching, and with the connector unless `extra` is None."""

    def __init__(self, model: str, extra: dict[str, Any] | None, **options: Any) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import torch
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from dejakv.engines.vllm.bind import EXTENSION
        from dejakv.experiments.vllm_engine import KV_CONNECTOR

        if extra is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                **KV_CONNECTOR, kv_connector_extra_config=extra
            )
            options["worker_extension_cls"] = EXTENSION
        kind = (
            {"dtype": "float32"}
            if model in BUNDLED
            else {"dtype": "bfloat16", "load_format": "dummy"}
        )
        on_cpu = {} if torch.cuda.is_available() else {"enforce_eager": True, "block_size": 32}
        self.llm = LLM(
            folder_of(model),
            enable_prefix_caching=True,
            disable_log_stats=True,
            **{"max_model_len": 2048, "max_num_seqs": 8, **kind, **on_cpu, **options},
        )
        self.engine = self.llm.llm_engine
        self._number = 0

    def add(
        self, prompt: Sequence[int], max_tokens: int, wish: dict[str, Any] | None = None
    ) -> str:
        """Sends a request; `wish`: its `kv_transfer_params` for DejaKV. Returns its id."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"dejakv": wish}} if wish is not None else None
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra
        )
        self._number += 1
        self.engine.add_request(str(self._number), {"prompt_token_ids": list(prompt)}, params)
        return str(self._number)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        wish: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Answers a batch that arrives at once: seconds to the first token, cached tokens, tokens,
        and the connector's word.
        """
        began = time.perf_counter()
        names = [self.add(prompt, max_tokens, wish) for prompt in prompts]
        found: dict[str, dict[str, Any]] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                entry = found.setdefault(output.request_id, {"ttft": time.perf_counter() - began})
                entry["cached"] = output.num_cached_tokens or 0
                entry["tokens"] = list(output.outputs[0].token_ids)
                entry["told"] = told_of(output)
        return [found[name] for name in names]

    def stored(self) -> bool:
        """Waits until every save is stored. False without a connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return has_kv_transfer_group() and get_kv_transfer_group().worker_side.saver.flush()

    def settle(self) -> None:
        """Waits until every save is stored and can be found, and forgets vLLM's own prefixes."""
        if self.stored():
            self.run([[9, 9, 9]], max_tokens=2)
            self.run([[9, 9, 8]], max_tokens=2)
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        self.llm.reset_prefix_cache()


def told_of(output: Any) -> dict[str, Any]:
    """The connector's word on a request."""
    return (output.kv_transfer_params or {}).get("dejakv") or {}
