"""What the vLLM connector saves and costs, each benchmark beside the same work without it, on the CPU or a GPU.

    .venv-vllm/bin/python -m research.vllm ttft --pairs 2                      # exact hits and blends against full prefill
    .venv-vllm/bin/python -m research.vllm ttft --model llama-3.1-8b --lengths 1000 8000 32000
    .venv-vllm/bin/python -m research.vllm misses --pairs 8                    # requests that reuse nothing
    .venv-vllm/bin/python -m research.vllm workload --pairs 3                  # a stream with 40% near-duplicates
    .venv-vllm/bin/python -m research.vllm decoding --pairs 2                  # others decode while blends arrive

Each arm runs in a fresh process (vLLM keeps connectors in globals), the arms take turns, and prefix caching is on in all of them.
Greedy. Intervals are 95%, of paired values.
"""
