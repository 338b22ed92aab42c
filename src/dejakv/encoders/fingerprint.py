"""Fingerprint of an embedder, 32 digits, so that an index never mixes the vectors of two."""

from typing import Any

from dejakv.identity import digest_of

WHOLE_BELOW = 256 * 1024**2
SAMPLES = 4096


def module_fingerprint(module: Any) -> str:
    """Names, shapes, types and values of a torch module's parameters and buffers, and its structure.

    All values up to 256 MiB (0.2 s); of larger models 4,096 of each tensor, evenly spread: training changes nearly all of them.
    """
    state = {name: tensor for name, tensor in module.state_dict().items() if hasattr(tensor, "numel")}
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    parts: list[str | bytes] = [repr(module)]
    for name in sorted(state):
        tensor = state[name].detach()
        parts.append(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}")
        flat = tensor.reshape(-1)
        if total > WHOLE_BELOW:
            flat = flat[:: max(1, flat.numel() // SAMPLES)]
        parts.append(_bytes(flat))
    return digest_of(*parts)[:32]


def _bytes(flat: Any) -> bytes:
    import torch

    return flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()
