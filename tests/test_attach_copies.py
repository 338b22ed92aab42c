"""Copies of an attached model are plain models; what its owner's code does costs no answer."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.tiny_models import Numbers, generated, number_prompt, tiny_llama

import dejakv
from dejakv.records import Record


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),  # noqa: S301
    "torch.save": saved,
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_an_attached_model_is_not_attached_and_answers_as_itself(way: str) -> None:
    model, ids, records = tiny_llama(), number_prompt(20), list[Record]()
    with dejakv.attach(model, Numbers(), on_record=records.append):
        expected = generated(model, ids)
        twin = COPIES[way](model)
        assert not {"generate", "__getstate__"} & set(vars(twin))
        told = len(records)
        assert torch.equal(generated(twin, ids), expected)
        assert len(records) == told

        vars(twin)["_modules"] = dict(twin._modules)  # `copy.copy` shares it
        twin._modules["lm_head"] = copy.deepcopy(tiny_llama(seed=1).lm_head)
        other = type(twin).generate(twin, ids, max_new_tokens=6, do_sample=False)
        assert not torch.equal(other, expected)
        assert torch.equal(generated(twin, ids), other)
        assert torch.equal(generated(model, ids), expected)
        with dejakv.attach(twin, Numbers()):
            assert torch.equal(generated(twin, ids), other)
    assert torch.equal(generated(twin, ids), other)
    assert not {"generate", "__getstate__"} & set(vars(model))


def test_copying_does_not_change_the_models_epoch() -> None:
    model, ids, records = tiny_llama(), number_prompt(20), list[Record]()
    with dejakv.attach(model, Numbers(), on_record=records.append) as cache:
        generated(model, ids)
        cache.flush()
        copy.deepcopy(model)
        generated(model, ids)
    assert [record.method for record in records] == ["none", "exact"]


def test_an_exception_of_on_record_is_logged_and_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = tiny_llama(), number_prompt(20)
    expected = generated(model, ids)

    def broken(_record: Record) -> None:
        raise RuntimeError("the caller's own")

    with dejakv.attach(model, Numbers(), on_record=broken):
        assert torch.equal(generated(model, ids), expected)
        assert torch.equal(generated(model, ids, use_cache=False), expected)
    assert [line.message for line in caplog.records].count("on_record raised an exception") == 2


def test_dejakv_off_set_while_attached_leaves_calls_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, records = tiny_llama(), number_prompt(20), list[Record]()
    with dejakv.attach(model, Numbers(), on_record=records.append) as cache:
        expected = generated(model, ids)
        cache.flush()
        for value in ("1", "yes", "0"):
            monkeypatch.setenv("DEJAKV_OFF", value)
            assert torch.equal(generated(model, ids), expected)
    assert [record.method for record in records] == ["none", "none", "none", "exact"]
    assert all("DEJAKV_OFF" in record.reason for record in records[1:3])
