"""GGUF files as models: the weights that were written come back, and what cannot be read says so."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.conftest import FAMILIES, WORDS, tiny_model, write_gguf
from tests.services import python

from dejakv.engines.transformers import TransformersEngine
from dejakv.errors import ModelError
from dejakv.models import load
from dejakv.models.gguf import load_gguf_tokenizer
from dejakv.request import Request, Sampling


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_as_it_was_written(family: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    written = write_gguf(file, family)
    model, tokenizer = load(file)
    assert tokenizer("ab a")["input_ids"] == [tokenizer.convert_tokens_to_ids(t) for t in ("ab", "Ġa")]
    got = model.state_dict()
    assert all(got[name].equal(tensor) for name, tensor in written.items())
    ids = torch.tensor([[3, 5, 7, 11, 2]])
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, tiny_model(family)(input_ids=ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("said", "added"),
    [
        ({}, (0, 0)),
        ({"bos": True}, (1, 0)),
        ({"bos": False, "eos": True}, (0, 1)),
        ({"bos": True, "eos": True}, (1, 1)),
        ({"pre": "llama-bpe"}, (1, 0)),
        ({"pre": "llama-bpe", "bos": False}, (0, 0)),
        ({"pre": ""}, (1, 0)),
        ({"pre": "", "bos": False, "eos": False}, (0, 0)),
    ],
    ids=str,
)
def test_the_tokenizer_adds_what_llama_cpp_adds(
    family: str, said: dict[str, Any], added: tuple[int, int], tmp_path: Path
) -> None:
    """As `tokenizer.ggml.add_bos_token` and `add_eos_token` say; without them by the kind of tokenizer."""
    write_gguf(tmp_path / "model.gguf", family, **said)
    tokenizer = load_gguf_tokenizer(tmp_path / "model.gguf")
    plain = tokenizer("ab a", add_special_tokens=False)["input_ids"]
    assert plain
    assert tokenizer("ab a")["input_ids"] == [0] * added[0] + plain + [1] * added[1]


def test_a_prompt_for_the_engine_begins_as_in_llama_cpp(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", bos=True)
    engine = TransformersEngine.from_pretrained(str(tmp_path / "model.gguf"))
    for prompt in ("ab a", "<s>ab a"):
        ids = engine.prepare(Request("1", prompt, prompt)).token_ids
        assert list(ids) == [0, *(WORDS.index(word) for word in ("ab", "Ġa"))]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_engine_reuses_state_of_a_gguf(family: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, family)
    engine = TransformersEngine.from_pretrained(str(file))
    assert engine.capabilities.reuse
    assert not hasattr(engine.model.config, "quantization_config")
    file.rename(tmp_path / "renamed.gguf")
    again = TransformersEngine.from_pretrained(str(tmp_path / "renamed.gguf"))
    assert again.epoch == engine.epoch  # the weights count, not the name of their file
    answer = engine.full(engine.prepare(Request("1", "abc ab", "abc ab", sampling=Sampling(3))))
    assert len(answer.token_ids) == 3


def test_an_unknown_family(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", architecture="clip")
    with pytest.raises(ModelError, match=r"model.gguf cannot be read.*clip.*Llama, Qwen and Mistral"):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize("kept", [0, 3, 200, 5_000, -1, -4_000])
def test_a_truncated_file(kept: int, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match="cannot be read"):
        load(file)


def test_altered_headers_are_errors_of_ours_or_models(tmp_path: Path) -> None:
    """Sixty files with eight altered bytes each before the weights: a clear error, or a model, never another exception."""
    file = tmp_path / "model.gguf"
    write_gguf(file)
    whole, rng, refused = file.read_bytes(), random.Random(0), 0
    for _ in range(60):
        spoiled = bytearray(whole)
        for _ in range(8):
            spoiled[rng.randrange(2_500)] = rng.randrange(256)
        file.write_bytes(spoiled)
        try:
            load(file)
        except ModelError as error:
            assert "model.gguf cannot be read" in str(error)  # noqa: PT017 (most raise, some load)
            refused += 1
    assert refused > 30


def test_too_little_memory_says_so(tmp_path: Path) -> None:
    """In a process of its own, whose memory is limited once everything is imported. The file claims a large embedding."""
    write_gguf(tmp_path / "model.gguf", tokens=1_000_000)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "import accelerate, gguf, torch, transformers\n"
        "from transformers import LlamaForCausalLM\n"
        "from dejakv.errors import ModelError\n"
        "from dejakv.models.gguf import load_gguf_model\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))\n"
        "try:\n"
        "    load_gguf_model(Path(sys.argv[1]))\n"
        "except ModelError as error:\n"
        "    print(error)\n"
    )
    done = python("-c", code, tmp_path / "model.gguf")
    assert "too little memory to read model.gguf" in done.stdout, done.stderr
