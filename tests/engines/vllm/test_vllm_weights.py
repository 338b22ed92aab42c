"""Weights that change under a server: nothing of the old ones is served as exact, and nothing of the new ones outlives them."""

import random
import threading

import pytest
import torch
from vllm import SamplingParams
from vllm_harness import running, tokens, worker_side

from dejakv.datasets.docs import ask, make_document, prompt_of

EMBEDDING = "model.embed_tokens.weight"


def _prompts(engine, count=10):
    rng = random.Random(3)
    encode = engine.llm.get_tokenizer().encode
    documents = [make_document(rng, 40) for _ in range(count)]
    return [encode(prompt_of(d.text, ask(d.facts[3], rng)), add_special_tokens=False) for d in documents]


def _model(engine):
    return engine.core.model_executor.driver_worker.worker.model_runner.get_model()


@torch.no_grad()
def _shuffled(weight):
    return weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))]


@torch.no_grad()
def _update(engine):
    """Other weights, written in place as a trainer's update is. Returns a call that writes the former ones back."""
    weight = dict(_model(engine).named_parameters())[EMBEDDING]
    before = weight.clone()
    weight.copy_(_shuffled(weight))

    @torch.no_grad()
    def restore():
        weight.copy_(before)

    return restore


def _reset(engine):
    return engine.llm.reset_prefix_cache(reset_connector=True)


def _answers(outputs):
    return [output.tokens for output in outputs]


def _methods(outputs):
    return {output.told["method"] for output in outputs}


@pytest.fixture(scope="module")
def truth():
    """Prompts, and full computation's answers with the weights on disk and with the updated ones."""
    with running(connector=False) as engine:
        prompts = _prompts(engine)
        old = _answers(engine.ask(prompts))
        _update(engine)
        engine.reset_prefix_cache()
        new = _answers(engine.ask(prompts))
    assert sum(one != other for one, other in zip(old, new, strict=True)) >= 9
    return prompts, old, new


def test_reload_never_serves_old_state(truth, tmp_path):
    """An update, its reset, and back again, in one process and then in another one on the same folder. What was stored before
    the update is found again as soon as its weights are back."""
    prompts, old, new = truth
    first, others = prompts[:5], prompts[5:]
    extra = {"store_dir": str(tmp_path)}
    with running(extra=extra) as engine:
        assert _answers(engine.ask(first)) == old[:5]
        engine.settle()
        restore = _update(engine)
        assert _reset(engine)
        for expected in ({"none"}, {"exact"}):  # stored under the new weights, and found under them
            outputs = engine.ask(prompts)
            assert _answers(outputs) == new
            assert _methods(outputs) == expected
            engine.settle()
            engine.reset_prefix_cache()
        restore()
        assert _reset(engine)
        outputs = engine.ask(prompts)
        assert _answers(outputs) == old
        assert _methods(outputs[:5]) == {"exact"}
        assert _methods(outputs[5:]) == {"none"}
        _update(engine)  # what the restart must not find: prompts that only the new weights have seen
        assert _reset(engine)
        engine.ask([[*prompt, 9] for prompt in others])
        engine.settle()
    with running(connector=False) as engine:
        longer = _answers(engine.ask([[*prompt, 9] for prompt in others]))
    with running(extra=extra) as engine:
        outputs = engine.ask(prompts)
        assert _answers(outputs) == old
        assert _methods(outputs[:5]) == {"exact"}
        assert _answers(engine.ask([[*prompt, 9] for prompt in others])) == longer


def test_a_save_under_way_at_a_reset_is_dropped(truth, tmp_path):
    prompts, _, new = truth
    with running(extra={"store_dir": str(tmp_path)}) as engine:
        store, go = worker_side().store, threading.Event()
        put = store.put
        store.put = lambda chunk: (go.wait(), put(chunk))[1]
        engine.ask(prompts[:1], max_tokens=8)
        restore = _update(engine)
        assert _reset(engine)
        go.set()
        engine.settle()
        engine.reset_prefix_cache()
        (output,) = engine.ask(prompts[:1])
        assert output.told["method"] == "none"
        assert output.tokens == new[0]
        engine.settle()
        restore()
        assert _reset(engine)
        (output,) = engine.ask(prompts[:1])
        assert output.told["method"] == "none"


@pytest.mark.parametrize("done", [False, True])
def test_a_load_at_a_reset_is_not_used(truth, tmp_path, done):
    """The state is on its way, or in its blocks and not yet computed with, when the weights change."""
    prompts, _, new = truth
    with running(extra={"store_dir": str(tmp_path), "memory_bytes": 0, "load_timeout_s": 60}) as engine:
        engine.ask(prompts[:1])
        engine.settle()
        engine.reset_prefix_cache()
        store, go = worker_side().store, threading.Event()
        get = store.get_parts
        store.get_parts = lambda id, rows=None: (go.wait(), get(id, rows))[1]
        tell = {"kv_transfer_params": {"dejakv": {}}}
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args=tell)
        engine.llm.llm_engine.add_request("one", {"prompt_token_ids": prompts[0]}, greedy)
        scheduler = engine.core.scheduler
        while not len(worker_side().loads):
            engine.llm.llm_engine.step()
        if done:
            go.set()
            while not scheduler.finished_recving_kv_req_ids:
                engine.llm.llm_engine.step()
        _update(engine)
        assert not _reset(engine), "blocks are in use: vLLM's own cache could not be reset"
        go.set()
        outputs = []
        while engine.llm.llm_engine.has_unfinished_requests():
            outputs = engine.llm.llm_engine.step() or outputs
        assert tuple(outputs[0].outputs[0].token_ids) == new[0]
        assert outputs[0].kv_transfer_params["dejakv"]["method"] == "none"

        (output,) = engine.ask(prompts[1:2])
        assert "reset again" in output.told["reason"]
        engine.settle()
        assert _reset(engine)
        for expected in ({"none"}, {"exact"}):
            outputs = engine.ask(prompts[1:3])
            assert _methods(outputs) == expected
            assert _answers(outputs) == new[1:3]
            engine.settle()
            engine.reset_prefix_cache()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_cost_nothing(truth, tmp_path, level):
    """vLLM resets connectors when it goes to sleep. The weights are the same afterwards, so what is stored is found."""
    prompts, old, _ = truth
    with running(extra={"store_dir": str(tmp_path)}) as engine:
        engine.ask(prompts[:3])
        engine.settle()
        engine.core.sleep(level)
        engine.core.wake_up()
        outputs = engine.ask(prompts[:4])
        assert [output.told["method"] for output in outputs] == ["exact"] * 3 + ["none"]
        assert _answers(outputs) == old[:4]
        engine.settle()
        engine.reset_prefix_cache()
        assert _methods(engine.ask(prompts[:4])) == {"exact"}


def test_a_sleep_ends_what_runs(truth):
    """Requests that vLLM aborts for a pause hold no block for a copy of their state: the reset would fail."""
    prompts, old, _ = truth
    with running(extra={}) as engine:
        greedy = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        engine.llm.llm_engine.add_request("one", {"prompt_token_ids": prompts[0]}, greedy)
        while not engine.llm.llm_engine.step():  # its first token is out, and its state is not yet copied
            pass
        engine.core.sleep(1)
        engine.core.wake_up()
        engine.llm.llm_engine.abort_request(["one"])  # in one process, vLLM tells its own front nothing of it
        assert _answers(engine.ask(prompts[1:2])) == old[1:2]


@torch.no_grad()
def _in_place(engine):
    _update(engine)


@torch.no_grad()
def _through_data(engine):
    weight = dict(_model(engine).named_parameters())[EMBEDDING]
    weight.data.copy_(_shuffled(weight))


@torch.no_grad()
def _another_tensor(engine):
    module = _model(engine).model.embed_tokens
    module.weight = torch.nn.Parameter(_shuffled(module.weight), requires_grad=False)


def _reloaded(engine):
    """The same checkpoint: packed weights of vLLM's CPU kernels are made anew then, and nobody can compare them."""
    engine.llm.collective_rpc("reload_weights")


@pytest.mark.parametrize("change", [_in_place, _through_data, _another_tensor, _reloaded])
def test_a_change_without_a_reset_is_noticed(truth, tmp_path, change):
    """Nothing is served or stored from then on, until a reset: vLLM's own prefix cache still has the old state."""
    prompts, old, new = truth
    answers = old if change is _reloaded else new
    with running(extra={"store_dir": str(tmp_path)}) as engine:
        engine.ask(prompts[:2])
        engine.settle()
        change(engine)
        engine.reset_prefix_cache()  # vLLM's own blocks only
        held = {meta.id for meta in worker_side().store.metas()}
        outputs = engine.ask(prompts[:3]) + engine.ask(prompts[3:4])
        assert _answers(outputs) == answers[:4]
        assert _methods(outputs) == {"none"}
        assert "without a reset" in outputs[-1].told["reason"]
        engine.settle()
        assert {meta.id for meta in worker_side().store.metas()} == held
        assert _reset(engine)
        for expected in ({"none"}, {"exact"}):
            outputs = engine.ask(prompts[:4])
            assert _methods(outputs) == expected
            assert _answers(outputs) == answers[:4]
            engine.settle()
            engine.reset_prefix_cache()


def test_a_prompt_of_one_step_between_two_updates(truth, tmp_path):
    """Computed with weights that are gone when its state is copied: it is not stored under those that are back."""
    prompts, old, new = truth
    with running(extra={"store_dir": str(tmp_path)}) as engine:
        engine.ask([tokens(40, 1)])
        engine.settle()
        store, stored = worker_side().store, []
        put = store.put
        store.put = lambda chunk: (stored.append(list(chunk.meta.token_ids)), put(chunk))[1]
        restore = _update(engine)
        assert _answers(engine.ask(prompts[:1], max_tokens=1)) == [new[0][:1]]
        restore()
        engine.settle()
        assert stored == [], "not for a moment: another process could find it"
        assert _reset(engine)
        assert _answers(engine.ask(prompts[:1])) == old[:1]
