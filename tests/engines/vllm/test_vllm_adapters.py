"""What proves which weights a LoRA adapter has, without an engine."""

import os
import time
from types import SimpleNamespace

import pytest

from dejakv.engines.vllm.identity import LoraAdapters, UnprovenAdapter


def _files(folder, weights=b"1", config="{}"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(config)
    return folder


def _lora(folder, number=1, name="a", **options):
    values = {"load_inplace": False, "is_3d_lora_weight": False} | options
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(folder), **values)


def _server(base="base", **options):
    time.sleep(0.02)  # a file system's clock ticks every few milliseconds
    return LoraAdapters(base, **options)


def test_epochs_go_by_weights_and_how_they_are_applied(tmp_path):
    """Another weight, configuration, base model or way of applying is another epoch; a name and an id are not."""
    one, two = _files(tmp_path / "one"), _files(tmp_path / "two", b"2")
    alpha, again = _files(tmp_path / "alpha", config='{"lora_alpha": 2}'), _files(tmp_path / "again")
    server = _server()
    epochs = [
        server.epoch_of(None),
        server.epoch_of(_lora(one)),
        server.epoch_of(_lora(two, 2)),
        server.epoch_of(_lora(alpha, 3)),
        server.epoch_of(_lora(one, 4, is_3d_lora_weight=True)),
        _server("other").epoch_of(_lora(one)),
        _server(applied={"lora_dtype": "torch.float16"}).epoch_of(_lora(one)),
    ]
    assert epochs[0] == "base"
    assert len(set(epochs)) == len(epochs)
    assert server.epoch_of(_lora(again, 9, "b")) == epochs[1]


def _rewrite(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"9")


def _rewrite_with_old_times(folder):
    weights = folder / "adapter_model.safetensors"
    before = weights.stat()
    weights.write_bytes(b"9")  # as long as before
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


def _swap(folder):
    _files(folder.parent / "new", b"9")
    folder.rename(folder.parent / "old")
    (folder.parent / "new").rename(folder)


def _add(folder):
    (folder / "adapter_model.bin").write_bytes(b"9")


def _remove(folder):
    (folder / "adapter_config.json").unlink()


def _link(folder):
    folder.rename(_files(folder.parent / "v2", b"9").parent / "v1")
    folder.symlink_to(folder.parent / "v2")


@pytest.mark.parametrize("change", [_rewrite, _rewrite_with_old_times, _swap, _add, _remove, _link])
@pytest.mark.parametrize("known", [True, False])
def test_files_that_change_under_the_server_end_the_reuse(tmp_path, change, known):
    """Whether or not the adapter was asked for before: vLLM may have loaded it by then. A restart proves the new files."""
    folder = _files(tmp_path / "a")
    server = _server()
    old = _server().epoch_of(_lora(folder))
    if known:
        assert server.epoch_of(_lora(folder)) == old
    time.sleep(0.02)
    change(folder)
    assert "newer than the server" in server.doubt(_lora(folder))
    assert not server.may_store(_lora(folder))
    with pytest.raises(UnprovenAdapter, match="restart the server"):
        server.epoch_of(_lora(folder))
    assert _server().epoch_of(_lora(folder)) != old


def test_adapters_that_cannot_be_read_here(tmp_path):
    (tmp_path / "empty").mkdir()
    server = _server(forbidden="")
    with pytest.raises(UnprovenAdapter, match="download it and name the folder"):
        server.epoch_of(_lora("somebody/adapter"))
    with pytest.raises(UnprovenAdapter, match="holds none of"):
        server.epoch_of(_lora(tmp_path / "empty", 2))
    assert _server(forbidden="no").doubt(_lora(tmp_path / "empty")) == "no"


def test_base_rows_beside_an_adapter(tmp_path):
    """Where vLLM's kernels apply the adapter to them, no base state is stored from then on; the adapter's is."""
    lora = _lora(_files(tmp_path / "one"))
    leaking, sound = _server(leaks=True), _server()
    for server in (leaking, sound):
        server.step([None, None])
        server.step([lora, lora])
        server.step([])
        assert server.may_store(None)
        server.step([None, lora])
        server.step([None])
        assert server.may_store(lora)
        assert server.doubt(None) == ""
    assert not leaking.may_store(None)
    assert sound.may_store(None)
