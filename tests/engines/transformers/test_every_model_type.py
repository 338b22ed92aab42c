"""Every causal and image-text type of transformers while attached: answers as without, in every call, and a reason where
nothing is reused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from tests.documents import COSTS
from tests.tiny_models import CAUSAL, IMAGE_TEXT, Numbers, pixels_of, small_model, tokenizer, vocabulary

import dejakv
from dejakv.config import SemanticCacheConfig
from dejakv.engines.transformers import TransformersEngine
from dejakv.errors import ModelError
from dejakv.models.cache_name import CACHE_NAME
from dejakv.records import Record
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings

pytestmark = pytest.mark.filterwarnings("ignore")
"""Types warn of their own settings, and of what they do not support."""

NEWEST = CACHE_NAME == "cache"
NOT_BUILT = {
    "causal": {
        "blt": "no attribute 'num_hidden_layers'",  # the cache of its own generate asks for it
        "gemma3n": "timm",
        # It runs behind another model.
        "gemma4_assistant": "inputs_embeds and shared_kv_states cannot be None|must be 0, got 256",
        "gemma4_unified_assistant": "inputs_embeds and shared_kv_states cannot be None|set of layer types",
        "musicgen": "text_encoder|dropout",  # a model for each part, given by name
        "musicgen_melody": "text_encoder|dropout",
    },
    "image-text": {
        "apertus1p5": "no projections around the quantizer",
        "blip-2": "pixel_values",
        "evolla": "Unrecognized configuration class",
        "fast_vlm": "timm",
        "gemma3n": "timm",
        "idefics": "Exactly 1 of pixel_values",
        "instructblip": "pixel_values",
        "instructblipvideo": "pixel_values",
        "dots3_note": "43,670,728 parameters",
        "mistral4": "The size of tensor a",
        "mistral_large4": "kv_source_layers",
        "molmo2": "vision_feature_layer",
        "muse_spark": "patch_sizes",
        "perception_lm": "timm",
        "pi0": "has no attribute 'generate'",
        "pix2struct": "too many indices",
        "pp_formulanet": "not enough values to unpack",
        "udop": "has to be defined for encoder-decoder generation",
        "vision-encoder-decoder": "cannot be instantiated",
    },
}
"""Types that cannot be built small, or that generate nothing from token ids, and what they say. One that can be built fails here."""
if NEWEST:  # what answers otherwise before transformers 5.24
    NOT_BUILT["image-text"]["llama4"] = "image_outputs"
else:
    NOT_BUILT["image-text"] |= {
        "kosmos-2": "You have to specify pixel_values",
    }
REFUSED = {"causal": "", "image-text": "florence2 t5gemma2"}
"""Encoder-decoders, which `attach` refuses."""
IN_FULL = {
    "causal": {
        "is no per-token KV": "deepseek_v4",
        "index out of range": "qwen4_exp qwen4_exp_text",
        "its layers keep no per-token KV": "falcon_mamba mamba mamba2 openai-gpt"
        + " recurrent_gemma xlm" * (not NEWEST),
        "does not use a dynamic KV cache": "minimax reformer rwkv xlnet xlstm",
        "logits from reused state differ": "cpmant" + " recurrent_gemma" * NEWEST,
        "expanded size of the tensor": "xlm" * NEWEST,
        "which its own cache forgets and no mask hides": "moshi",
        "`use_cache` is only supported for": "prophetnet",
        "use_cache is off": "mpt",
    },
    "image-text": {
        "is no per-token KV": "unlimited_ocr",
        "logits from reused state differ": "paligemma",
        "either `pixel_values` or": "kosmos-2" * NEWEST,
        "index out of range": "qwen4_exp",
        "pictures for a model whose pictures are not supported": "blip",
    },
}
"""Types of which nothing is reused, by the reason. Every other type hits."""
PADDED = {
    "causal": "bart bigbird_pegasus blenderbot blenderbot-small deepseek_v32 git marian mbart mvp pegasus plbart trocr whisper",
    "image-text": "git kosmos-2.5",
}
"""Types whose padded batches go to the model: its answers depend on padding."""

LEFT_OUT = {("image-text", "glm5_next"), ("image-text", "diffusion_gemma")}
"""One call of `generate` takes five seconds, or answers at random."""
ALWAYS = frozenset(
    "bart bloom cohere2 cosmos3_edge cpmant deepseek_v3 falcon gemma2 gemma4 git gpt2 gpt_neo gpt_oss jamba kosmos-2.5 llama "
    "llama4 llava mamba mistral mllama moshi mpt opt phi3 prophetnet qwen2_5_vl qwen3_next reformer whisper".split()
)
"""A type of each kind of attention and cache; the others run in `make soak`."""
KINDS = [
    pytest.param(auto, kind, marks=() if kind in ALWAYS else pytest.mark.soak)
    for auto, kinds in (("causal", CAUSAL), ("image-text", IMAGE_TEXT))
    for kind in kinds
    if (auto, kind) not in LEFT_OUT
]


def prompts() -> list[dict[str, torch.Tensor]]:
    """A prompt, a longer one that begins with it, and both as a left-padded batch."""
    generator = torch.Generator().manual_seed(1)
    long = torch.randint(5, 90, (1, 29), generator=generator)
    short = long[:, :20]
    mask = (torch.arange(29)[None] >= torch.tensor([[0], [9]])).long()
    batch = torch.cat([long, torch.nn.functional.pad(short, (9, 0))])
    plain = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in (short, long)]
    return [*plain, {"input_ids": batch, "attention_mask": mask}]


def ask(model: Any, kind: str, image_text: bool, prompt: dict[str, torch.Tensor]) -> torch.Tensor:
    pixels = pixels_of(kind) if image_text else {}
    answer = model.generate(**prompt, **pixels, max_new_tokens=3, do_sample=False)
    return answer if isinstance(answer, torch.Tensor) else answer.sequences


class Asked:
    """A type's answers to each prompt twice: whether they are the model's own, and the records of each prompt."""

    def __init__(self, model: Any, kind: str, image_text: bool = False) -> None:
        self.records: list[list[Record]] = []
        expected = [ask(model, kind, image_text, prompt) for prompt in prompts()]
        told: list[Record] = []
        config = SemanticCacheConfig(semantic_text=False, costs=COSTS)
        with dejakv.attach(model, Numbers(), config, on_record=told.append) as cache:
            for prompt, tokens in zip(prompts(), expected, strict=True):
                for _ in ("miss", "hit"):
                    assert torch.equal(ask(model, kind, image_text, prompt), tokens)
                    cache.flush()
                self.records.append(told.copy())
                told.clear()

    def methods(self) -> list[list[str]]:
        return [[record.method for record in records] for records in self.records]

    def reasons(self) -> list[str]:
        """Of each prompt, asked for the second time."""
        return [records[-1].reason for records in self.records]


def expected(kind: str, auto: str) -> tuple[str, bool]:
    """Why nothing of a type is reused, and whether its padded batches go to the model."""
    reason = next((reason for reason, kinds in IN_FULL[auto].items() if kind in kinds.split()), "")
    return reason, kind in PADDED[auto].split()


@pytest.mark.parametrize(("auto", "kind"), KINDS)
def test_a_type_answers_as_without(auto: str, kind: str) -> None:
    image_text = auto == "image-text"
    if cause := NOT_BUILT[auto].get(kind):
        with pytest.raises(Exception, match=cause):
            ask(small_model(kind, image_text), kind, image_text, prompts()[0])
        return
    model = small_model(kind, image_text)
    if kind in REFUSED[auto].split():
        with pytest.raises(ModelError, match="encoder-decoder"), dejakv.attach(model, Numbers()):
            pass
        return
    asked = Asked(model, kind, image_text)
    reason, padded = expected(kind, auto)
    if reason:
        assert asked.methods() == [["none"] * 2] * 3
        assert all(reason in said for said in asked.reasons())
    elif padded:
        assert asked.methods() == [["none", "exact"], ["prefix", "exact"], ["none"] * 2]
        assert "padding" in asked.reasons()[2]
    else:
        assert asked.methods() == [["none", "exact"], ["prefix", "exact"], ["exact"] * 4]


def raising(model: Any, field: str) -> Any:
    """The model with a configuration that refuses to name one field, as Gemma 4's does where layers differ."""
    plain = type(model.config)

    def read(config: Any, name: str) -> Any:
        if name == field:
            raise ValueError(f"{field} may vary across layers")
        return plain.__getattribute__(config, name)

    members = {"__getattribute__": read, "__module__": plain.__module__}
    model.config.__class__ = type(plain.__name__, (plain,), members)
    return model


@pytest.mark.parametrize("field", ["vocab_size", "image_token_id", "intermediate_size"])
def test_a_field_that_raises_when_it_is_read_costs_nothing_where_nothing_needs_it(field: str) -> None:
    asked = Asked(raising(small_model("llama", False), field), "llama")
    assert asked.methods() == [["none", "exact"], ["prefix", "exact"], ["exact"] * 4]


def test_a_field_that_raises_is_the_reason_where_it_is_needed() -> None:
    asked = Asked(raising(small_model("llama", False), "rope_scaling"), "llama")
    assert set(asked.reasons()) == {"its rope_scaling cannot be read: ValueError: rope_scaling may vary across layers"}


@pytest.fixture
def mamba(tmp_path: Path) -> str:
    """A folder with a small Mamba and a tokenizer."""
    model = small_model("mamba", False, vocab_size=vocabulary())
    model.generation_config.update(pad_token_id=1, eos_token_id=1, bos_token_id=0)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_server_answers_with_a_mamba_and_says_why_it_reuses_nothing(mamba: str) -> None:
    engine = TransformersEngine.from_pretrained(mamba)
    with TestClient(create_app(ServerSettings(max_new_tokens=4, costs=COSTS), engine)) as client:
        body = {"prompt": "the red ball is on the mat", "max_new_tokens": 4, "temperature": 0}
        answers = [client.post("/v1/generate", json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    first, second = (answer.json() for answer in answers)
    assert first["text"] == second["text"]
    assert not second["cache_hit"]
    assert "no per-token KV" in second["reason"]
