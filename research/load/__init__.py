"""vLLM under load: a real server, requests that arrive whatever it does, and three arms in turns.

    .venv-vllm/bin/python -m research.load --output load.json --quick       # rag at 80%
    .venv-vllm/bin/python -m research.load --output load.json               # a stopped command goes on
    python -m research.load --report load.json                              # load.md beside it

Arms are servers: vLLM's prefix caching alone (`prefix`), and the connector in modes `exact` and `blend` with default settings. All three run
all the time, and one at a time gets requests. Greedy, fixed seeds. Exact hits and misses without load: `python -m research.vllm ttft` and `misses`.
"""
