"""All at once: chunked prefill, asynchronous saves, prefix caching, mixed lengths, preemption, a small store."""

import random

from vllm_harness import BLENDING, EXTENSION, changed, running, tokens, worker_side

BASES = [tokens(length, seed) for seed, length in enumerate((40, 130, 333, 600), 60)]
OPTIONS = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 6,
    "num_gpu_blocks_override": 64,
    "long_prefill_token_threshold": 64,
}


def _stream(count, seed):
    rng = random.Random(seed)
    stream = []
    for _ in range(count):
        base = rng.choice(BASES)
        kind = rng.choice(["same", "longer", "near", "cut"])
        prompt = {
            "same": base,
            "longer": base + tokens(rng.randrange(1, 60), rng.randrange(5)),
            "near": changed(base, 0.1, rng.randrange(3), keep_last=8),
            "cut": base[: rng.randrange(20, len(base))],
        }[kind]
        stream.append((prompt, rng.choice([None, "tenant"]), kind == "near" and rng.random() < 0.6))
    return stream


STREAM = _stream(90, 3)


def _ask(engine, *, blends):
    prompts, salts = [prompt for prompt, _, _ in STREAM], [salt for _, salt, _ in STREAM]
    wishes = [{"mode": "blend"} if blend else None for _, _, blend in STREAM] if blends else None
    return engine.ask(prompts, salt=salts, wish=wishes, max_tokens=10)


def test_everything_on(tmp_path):
    """Every exactly served request answers as without the connector, in two passes and with the store shared over a
    restart."""
    with running(connector=False, **OPTIONS) as engine:
        truth = _ask(engine, blends=False)
    extra = {
        **BLENDING,
        "store_dir": str(tmp_path),
        "max_bytes": 25_000_000,
        "blend_max_share": 0.9,
        "lookup_timeout_s": 30,
    }
    reused = blended = evicted = 0
    for _ in range(2):
        with running(extra=extra, worker_extension_cls=EXTENSION, **OPTIONS) as engine:
            for _ in range(2):
                for expected, output in zip(truth, _ask(engine, blends=True), strict=True):
                    assert output.told["approximate"] or output.tokens == expected.tokens
                    reused += output.told["method"] == "exact"
                    blended += output.told["method"] == "blend"
                engine.settle()
                engine.reset_prefix_cache()
            evicted += sum(worker_side().store.stats().evictions.values())
    assert evicted >= 10
    assert reused >= 50
    assert blended >= 1
