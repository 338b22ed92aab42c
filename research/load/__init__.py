"""vLLM under load: a real server, requests that arrive whatever it does, and three arms in turns.

    .venv-vllm/bin/python -m research.load --output load.json --quick       # rag at 80%, about 4
    minutes .venv-vllm/bin/python -m research.load --output load.json               # about 40
    minutes on two idle cores .venv-vllm/bin/python -m research.load --output load.json --rounds 2
    # goes on with another round, as long python -m research.load --report load.json --report
    load_filled.json    # load.md beside the first, of both

Arms are servers: vLLM's prefix caching alone (`prefix`), and the connector in modes `exact` and
`blend` with default settings. All three run all the time (16 GiB of memory), and one at a time gets
requests. Greedy, fixed seeds. Of the 40 minutes `repo`, `rag` and `mix` take about 11 each and
`sessions` 7; a phase of an arm takes half a minute with all at once and a minute at 50%. What is
finished of a stopped command, workload by workload, has its figures, and the same command goes on
with the rest. Exact hits and misses without load: `python -m research.vllm ttft`, `misses`.
"""
