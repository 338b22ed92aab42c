"""Names of Sim-LLM's document, called as it calls them, on the bundled layer-condensed model."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.prototypes.conftest import Names
from transformers import BatchEncoding

from dejakv.errors import InputError
from dejakv.models import path
from dejakv.models.cache_name import CACHE_NAME
from dejakv.prototypes.sim_llm import (
    InterTaskKVManager,
    LlamaForCausalLMWithKVReuse,
    LlamaModelWithKVReuse,
    SimLLMInference,
    TaskCacheEntry,
)

PROMPT = "<s> Ann lives in Rome. Bob works as a baker. <q> What is the job of Bob? <a>"


@pytest.fixture(scope="module")
def model() -> Any:
    return LlamaForCausalLMWithKVReuse.from_pretrained("docs-lckv", device="cpu")


def test_sim_llm_manager() -> None:
    names = Names("sim_llm_manager")
    manager = InterTaskKVManager(
        embedding_dim=8, max_cache_size=2, similarity_threshold=0.8, num_hyperplanes=16, device="cpu"
    )
    task = manager.generate_task_id("Where does Bob work?")
    state = torch.randn(2, 1, 2, 3, 4).unbind(0)
    embedding = torch.ones(8)
    added = manager.add_task(task, embedding, state, token_ids=(1, 2, 3))
    found = manager.search_similar_task(embedding)
    assert isinstance(added, TaskCacheEntry)
    assert isinstance(found, TaskCacheEntry)
    assert found.task_id == task == manager.generate_task_id("Where does Bob work?")
    assert (manager.get_statistics()["entries"], manager.get_statistics()["hits"]) == (1, 1)
    manager.reset()
    assert manager.search_similar_task(embedding) is None
    names("TaskCacheEntry", "InterTaskKVManager", "max_cache_size", "similarity_threshold", "device")
    names.having(manager, "InterTaskKVManager.")
    names.done()


def test_sim_llm_model(model: Any) -> None:
    names = Names("sim_llm_model")
    model.set_kv_manager(model.make_manager(max_cache_size=4))
    ids = model.tokenizer(PROMPT, return_tensors="pt").input_ids
    first = model.generate_with_kv_reuse(ids, task_id="query_001", max_new_tokens=4)
    again = model.generate_with_kv_reuse(ids, task_id="query_002", max_new_tokens=4)
    assert again.tolist() == first.tolist()
    assert model.manager.get_statistics()["hits"] == 1
    names("LlamaForCausalLMWithKVReuse")
    names.having(model, "LlamaForCausalLMWithKVReuse.")
    names.done()


def test_sim_llm_decoder(model: Any) -> None:
    """The model without its head computes a repeated task's last rows alone, with the same state behind the last one."""
    names = Names("sim_llm_decoder")
    decoder = LlamaModelWithKVReuse(model.model, model.tokenizer)
    ids = decoder.tokenizer(PROMPT, return_tensors="pt").input_ids
    computed = decoder(ids)  # without a manager: in full
    assert computed.last_hidden_state.shape[1] == ids.shape[1]

    decoder.make_manager(max_cache_size=4)
    first, again = decoder(ids, task_id="query_001"), decoder(ids)
    assert torch.equal(first.last_hidden_state, computed.last_hidden_state)
    assert again.last_hidden_state.shape[1] < ids.shape[1]
    assert torch.allclose(again.last_hidden_state[:, -1], first.last_hidden_state[:, -1], atol=1e-4)
    assert again[CACHE_NAME].get_seq_length() == ids.shape[1]
    assert decoder.manager is not None
    assert (decoder.manager.get_statistics()["entries"], decoder.manager.get_statistics()["hits"]) == (1, 1)

    model.set_kv_manager(decoder.manager)  # one cache of tasks serves both
    logits = model(ids).logits
    assert torch.allclose(logits[:, -1], model.model(ids).logits[:, -1], atol=1e-3)
    for wrong in ([[]], [[1], [2]], [1]):
        with pytest.raises(InputError):
            decoder(wrong)
    names("LlamaModelWithKVReuse")
    names.done()


ADVANCED = """
from dejakv.prototypes.sim_llm import (
    InterTaskKVManager,
    LlamaForCausalLMWithKVReuse
)
from transformers import AutoTokenizer

# Load model and tokenizer
model = LlamaForCausalLMWithKVReuse.from_pretrained(
    MODEL,
    torch_dtype=torch.float16
).cuda()

tokenizer = AutoTokenizer.from_pretrained(MODEL)

# Create KV manager
kv_manager = InterTaskKVManager(
    embedding_dim=model.config.hidden_size,
    max_cache_size=100,
    similarity_threshold=0.8
)

# Connect KV manager to model
model.set_kv_manager(kv_manager)

# Generate with KV reuse
inputs = tokenizer("What is AI?", return_tensors="pt").to("cuda")
outputs = model.generate_with_kv_reuse(
    inputs["input_ids"],
    task_id="query_001",
    max_new_tokens=50
)
"""
"""As it stands in the document, but for the model and the package's name."""


def test_the_documents_advanced_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU `cuda` is the CPU here."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(LlamaForCausalLMWithKVReuse, "cuda", LlamaForCausalLMWithKVReuse.cpu)
        monkeypatch.setattr(BatchEncoding, "to", lambda self, device: self)
    names: dict[str, Any] = {"torch": torch, "MODEL": str(path("docs-lckv"))}
    exec(ADVANCED, names)
    model, inputs, manager = names["model"], names["inputs"], names["kv_manager"]
    assert isinstance(model, LlamaForCausalLMWithKVReuse)
    assert model.dtype == torch.float16
    assert names["outputs"].shape[1] > inputs["input_ids"].shape[1]
    assert manager.get_statistics()["entries"] == 1
    assert model.to("cpu").cpu() is model
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = model.no_such_thing


def test_the_documents_basic_usage_counts_no_hit_for_nothing_saved() -> None:
    inference = SimLLMInference.from_pretrained(model_path="docs-lckv", max_cache_size=100, similarity_threshold=0.8)
    answers = [
        inference.generate(text, max_new_tokens=4)
        for text in ("What is machine learning?", "Explain machine learning.")
    ]
    assert all(answer.result.computed == answer.result.prompt_tokens for answer in answers)
    assert inference.get_statistics()["hit_rate"] == 0.0


def test_sim_llm_inference() -> None:
    names = Names("sim_llm_inference")
    inference = SimLLMInference.from_pretrained(
        model_path="docs-lckv", max_cache_size=4, similarity_threshold=0.9, num_hyperplanes=16, device="cpu"
    )
    answer = inference.generate(PROMPT, max_new_tokens=4, task_id="one", enable_kv_reuse=True)
    assert inference.batch_generate([PROMPT, PROMPT], max_new_tokens=4) == [answer, answer]
    assert inference.get_statistics()["hits"] == 2
    assert inference.generate(PROMPT, max_new_tokens=4, enable_kv_reuse=False) == answer
    inference.set_similarity_threshold(0.5)
    assert inference.get_statistics()["threshold"] == 0.5
    inference.reset_cache()
    assert inference.get_statistics()["entries"] == 0
    names("SimLLMInference", "model_path", "enable_kv_reuse", "task_id")
    names.having(inference, "SimLLMInference.")
    names.done()


def test_sim_llm_demo(capsys: pytest.CaptureFixture[str]) -> None:
    names = Names("sim_llm_demo")
    line = "--demo_mode basic --model_path docs-lckv --max_cache_size 8 --similarity_threshold 0.8".split()
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "sim_llm.py"))
    example["main"]([*names.line(line), "--cases", "1", "--facts", "6", "--device", "cpu"])
    assert "a new task" in capsys.readouterr().out
    names("examples/sim_llm_demo.py")
    names.done()
