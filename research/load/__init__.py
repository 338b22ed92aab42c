"""vLLM under load: a real server, requests that arrive whatever it does, and three arms in turns.

    .venv-vllm/bin/python -m research.load --output load.json --quick                     # rag at 80%, a few minutes
    .venv-vllm/bin/python -m research.load --output load.json --requests 8 --warm 8 --rounds 1   # less of each, see docs/results/load.md
    .venv-vllm/bin/python -m research.load --output load.json                             # hours; a stopped command goes on
    python -m research.load --report load.json                                            # load.md beside it

Arms are servers: vLLM's prefix caching alone (`prefix`), and the connector in modes `exact` and `blend` with default settings. All three run
all the time, and one at a time gets requests. Greedy, fixed seeds.
"""
