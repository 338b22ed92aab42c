"""What the vLLM connector saves and costs, on the CPU or a GPU.

Each benchmark runs beside the same work without the connector.
"""
