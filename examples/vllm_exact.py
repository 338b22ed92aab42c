"""KV that outlives a vLLM process: run it twice, the second time the prompt is not computed.

.venv-vllm/bin/python examples/vllm_exact.py /tmp/dejakv-store
"""

import os
import sys


def main(store_dir: str) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from dejakv.models import path

    llm = LLM(
        str(path("docs-lm")),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        kv_transfer_config=KVTransferConfig(
            kv_connector="DejaKVConnector",
            kv_connector_module_path="dejakv.engines.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"store_dir": store_dir},
        ),
    )
    prompt = {"prompt_token_ids": [8 + number % 400 for number in range(600)]}
    ask = {"kv_transfer_params": {"dejakv": {}}}  # to be told how the prompt ran
    (output,) = llm.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=8, extra_args=ask), use_tqdm=False
    )
    print("prompt tokens", len(output.prompt_token_ids), "not computed", output.num_cached_tokens)
    print("how:", output.kv_transfer_params["dejakv"])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "/tmp/dejakv-store")
