"""The work that reuse pays for, on a real language model: what blend saves beyond prefix caching, and what it changes.

python -m research.workloads                                    # repo, rag, sessions through transformers
.venv-vllm/bin/python -m research.workloads --engine vllm       # the same through vLLM, into the same folder
python -m research.workloads --report                           # tables and picture of what is measured so far

`make workloads` does the three. A command that was stopped goes on where it was; a finished stream is not measured again.
"""
