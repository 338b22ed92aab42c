"""Random calls of `generate`: attached, on misses and on hits, each returns what the model alone returns.

`DEJAKV_SOAK_ROUNDS=5 pytest tests/exactness/test_generate_options.py -s` makes thousands of them, from `DEJAKV_SOAK_SEED` on.
"""

import copy
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from tests.soak import soak_rounds, soak_seed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import dejakv
from dejakv.records import Record

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of options that are drawn together

WORDS = 97
CALLS = 25 if soak_rounds() == 1 else 400 * soak_rounds()
"""For each kind of model. Each call is asked twice."""
CONFIGURED = (
    "do_sample", "eos_token_id", "max_new_tokens", "num_beams", "pad_token_id", "repetition_penalty",
    "return_dict_in_generate", "temperature", "top_k", "use_cache",
)  # fmt: skip
"""Options that are given in a `GenerationConfig` now and then."""

SMALL = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.4,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "padding": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, bos_token_id=None, eos_token_id=2, pad_token_id=1)),
    "padding of zero": lambda: hf.MistralForCausalLM(
        hf.MistralConfig(**SMALL, bos_token_id=None, eos_token_id=[2, 9], pad_token_id=0, sliding_window=12)
    ),
    "no end": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**SMALL, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    ),
    "padding without an end": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**SMALL, bos_token_id=None, eos_token_id=None, pad_token_id=1)
    ),
    "configured": lambda: configured(
        hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL, head_dim=8, bos_token_id=None, eos_token_id=2, pad_token_id=None))
    ),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Transformers logs of options that are drawn together."""
    level = hf.logging.get_verbosity()
    hf.logging.set_verbosity_error()
    yield
    hf.logging.set_verbosity(level)


def configured(model: Any) -> Any:
    """A model whose own configuration says how it generates."""
    model.generation_config.num_beams = 2
    model.generation_config.repetition_penalty = 1.2
    model.generation_config.max_length = 60
    return model


def made(kind: str) -> Any:
    """A random model with sharp logits: rounding does not change its answers."""
    torch.manual_seed(5)
    return MODELS[kind]().eval()


def words() -> Any:
    """A tokenizer of numbers, with an end token."""
    raw = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w3"))
    raw.pre_tokenizer = Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="w2", pad_token="w1", unk_token="w3")


class Bias(LogitsProcessor):
    """Depends on the first token and on the length of what it is shown."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, int(input_ids[0, 0]) % scores.shape[1]] += 3.0
        scores[:, input_ids.shape[1] % scores.shape[1]] += 2.0
        return scores


class Heard(BaseStreamer):
    """Everything that was streamed."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.tokens.append("end")


class Caller:
    """Draws calls over few prompts, which come again whole, cut short, made longer and with a word exchanged."""

    def __init__(self, rng: random.Random, model: Any) -> None:
        self.rng, self.model = rng, model
        self.texts = [self.drawn(length) for length in (18, 24, 33, 40, 50)]

    def drawn(self, length: int) -> list[int]:
        return [self.rng.randrange(3, WORDS) for _ in range(length)]

    def prompt(self) -> list[int]:
        text, kind = list(self.rng.choice(self.texts)), self.rng.random()
        if kind < 0.45:
            return text
        if kind < 0.65:
            return text[: self.rng.randrange(1, len(text))]
        if kind < 0.85:
            return text + self.drawn(self.rng.randrange(1, 12))
        if kind < 0.93:
            text[self.rng.randrange(len(text))] = self.rng.randrange(WORDS)
            return text
        return self.drawn(self.rng.randrange(1, 30))

    def inputs(self) -> dict[str, torch.Tensor]:
        """Token ids and perhaps their mask; padded on the left, seldom on the right, with the padding token or another."""
        rng = self.rng
        prompts = [self.prompt() for _ in range(rng.choice([1, 1, 1, 1, 2, 3]))]
        width = max(map(len, prompts)) + (rng.randrange(1, 5) if rng.random() < 0.15 else 0)
        right = rng.random() < 0.06
        pad = self.model.generation_config.pad_token_id
        fill = rng.choice([0, 1, 1, 1]) if pad is None else pad
        rows, masks = [], []
        for prompt in prompts:
            spare = width - len(prompt)
            rows.append(prompt + [fill] * spare if right else [fill] * spare + prompt)
            masks.append([1] * len(prompt) + [0] * spare if right else [0] * spare + [1] * len(prompt))
        ids, mask = torch.tensor(rows), torch.tensor(masks)
        if rng.random() < 0.05:
            mask[0, rng.randrange(width)] = 0
        given = {"input_ids": ids.to(torch.int32) if rng.random() < 0.1 else ids}
        if rng.random() < 0.65:
            kind = rng.choice([torch.int64, torch.int64, torch.int64, torch.bool, torch.int32, torch.float32])
            given["attention_mask"] = mask.to(kind)
        return given

    def options(self, width: int) -> dict[str, Any]:
        """Options that transformers takes together, or refuses."""
        rng, given = self.rng, dict[str, Any]()

        def maybe(share: float, name: str, *values: Any) -> None:
            if rng.random() < share:
                given[name] = rng.choice(values)

        given["max_new_tokens"] = rng.choice([1, 2, 5, 9])
        maybe(0.2, "num_beams", 2, 3, 4)
        maybe(0.75, "do_sample", False, False, True)
        if given.get("do_sample"):
            maybe(0.6, "temperature", 0.5, 1.5)
            maybe(0.5, "top_k", 3, 20)
            maybe(0.4, "top_p", 0.5, 0.9)
            maybe(0.2, "min_p", 0.1)
            maybe(0.1, "typical_p", 0.6)
            maybe(0.1, "epsilon_cutoff", 0.01)
            maybe(0.1, "eta_cutoff", 0.01)
        maybe(0.12, "num_return_sequences", 2, 3)
        maybe(0.1, "repetition_penalty", 1.3, 0.8)
        maybe(0.06, "no_repeat_ngram_size", 2, 3)
        maybe(0.04, "encoder_repetition_penalty", 1.5)
        maybe(0.04, "encoder_no_repeat_ngram_size", 2)
        maybe(0.08, "min_new_tokens", 3)
        maybe(0.04, "min_length", 30, 60)
        maybe(0.05, "bad_words_ids", [[5], [7, 8]])
        maybe(0.04, "suppress_tokens", [4, 5, 6, 9])
        maybe(0.04, "begin_suppress_tokens", [4, 5, 6, 9, 11])
        maybe(0.04, "forced_eos_token_id", 2)
        maybe(0.04, "forced_bos_token_id", 9)
        maybe(0.04, "exponential_decay_length_penalty", (2, 1.5))
        maybe(0.04, "renormalize_logits", True)
        maybe(0.03, "remove_invalid_values", True)
        maybe(0.04, "sequence_bias", {(9,): 5.0, (11, 12): -3.0})
        maybe(0.05, "length_penalty", 0.2, 2.0)
        maybe(0.05, "early_stopping", True, "never")
        maybe(0.12, "eos_token_id", 2, [2, rng.randrange(3, WORDS)], rng.randrange(3, WORDS), None)
        maybe(0.1, "pad_token_id", 0, 1, 2, rng.randrange(3, WORDS), None)
        maybe(0.1, "return_dict_in_generate", True)
        if given.get("return_dict_in_generate"):
            maybe(0.5, "output_scores", True)
            maybe(0.3, "output_logits", True)
            maybe(0.1, "output_hidden_states", True)
            maybe(0.1, "output_attentions", True)
        maybe(0.03, "use_cache", False, True)
        maybe(0.03, "cache_implementation", "static", "dynamic", "offloaded")
        maybe(0.02, "prefill_chunk_size", 8)
        maybe(0.02, "prompt_lookup_num_tokens", 3)
        maybe(0.02, "guidance_scale", 1.5, 1.0)
        maybe(0.02, "max_time", 0.0, 600.0)
        maybe(0.04, "logits_processor", LogitsProcessorList([Bias()]))
        maybe(0.04, "stopping_criteria", StoppingCriteriaList([MaxLengthCriteria(width + 3)]))
        maybe(0.03, "prefix_allowed_tokens_fn", lambda row, ids: [3 + (int(ids[-1]) + step) % 40 for step in range(5)])
        maybe(0.03, "stop_strings", ["w7", "w30"], "w1")
        maybe(0.05, "streamer", Heard)
        if "stop_strings" in given:
            given["tokenizer"] = words()
        if rng.random() < 0.08:
            given.pop("max_new_tokens")
            maybe(0.8, "max_length", width + 1, width + 4, 40)
        if rng.random() < 0.15:
            moved = {name: given.pop(name) for name in CONFIGURED if name in given}
            given["generation_config"] = GenerationConfig(**moved)
        return given

    def call(self) -> dict[str, Any]:
        given = self.inputs()
        rows, width = given["input_ids"].shape
        given |= self.options(width)
        kind = self.rng.random()
        if kind < 0.02:
            given["position_ids"] = torch.arange(width)[None].expand(rows, -1) + 2
        elif kind < 0.04:
            given["inputs_embeds"] = self.model.get_input_embeddings()(given.pop("input_ids")).detach()
        elif kind < 0.06:
            given["past_key_values"] = hf.DynamicCache
        elif kind < 0.2:
            given["inputs"] = given.pop("input_ids")
        return given


def asked(generate: Any, call: Mapping[str, Any], seed: int) -> tuple[Any, Any]:
    """What the call returns or raises, and what was streamed."""
    given = {name: value() if isinstance(value, type) else copy.deepcopy(value) for name, value in call.items()}
    torch.manual_seed(seed)
    try:
        out = generate(**given)
    except Exception as error:
        out = error
    return out, getattr(given.get("streamer"), "tokens", None)


def of_rows(alone: Any, call: Mapping[str, Any], seed: int) -> list[list[int]]:
    """New tokens of each prompt of a sampled batch: the rows are drawn one after the other."""
    given = dict(call)
    ids = given.pop("input_ids", None)
    ids = given.pop("inputs") if ids is None else ids
    mask, found = given.pop("attention_mask", None), list[list[int]]()
    if mask is None:
        pad, ends = (_setting(alone, given, name) for name in ("pad_token_id", "eos_token_id"))
        real = pad is not None and pad not in torch.as_tensor([] if ends is None else ends).reshape(-1).tolist()
        mask = (ids != pad).long() if real else torch.ones_like(ids)
    torch.manual_seed(seed)
    for row, kept in zip(ids, mask.bool(), strict=True):
        prompt = row[kept][None]
        out = alone.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **copy.deepcopy(given))
        found += out[:, prompt.shape[1] :].tolist()
    return found


def _setting(model: Any, given: Mapping[str, Any], name: str) -> Any:
    if name in given:
        return given[name]
    configs = (given.get("generation_config"), model.generation_config)
    return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)


def difference(got: Any, want: Any) -> str:
    """Where two results differ; empty if they do not."""
    if isinstance(want, Exception) or isinstance(got, Exception):
        return "" if type(got) is type(want) else f"{got!r} in place of {want!r}"
    if isinstance(want, torch.Tensor):
        same = isinstance(got, torch.Tensor) and got.dtype == want.dtype and torch.equal(got, want)
        return "" if same else f"{got} in place of {want}"
    if set(got) != set(want) or type(got) is not type(want):
        return f"{type(got)} {set(got)} in place of {type(want)} {set(want)}"
    if not torch.equal(got.sequences, want.sequences):
        return f"{got.sequences} in place of {want.sequences}"
    for name in set(want) - {"sequences", "past_key_values"}:
        ours, theirs = flat(got[name]), flat(want[name])
        if [part.shape for part in ours] != [part.shape for part in theirs]:
            return f"{name}: other shapes"
        if not all(torch.allclose(a, b, atol=1e-2, rtol=1e-3) for a, b in zip(ours, theirs, strict=True)):
            return f"{name}: other values"
    return ""


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value or () for tensor in flat(part)]


def behind(out: Any, call: Mapping[str, Any], rows: Sequence[list[int]]) -> str:
    """Where a batch differs from its prompts and the new tokens of its rows, which may be filled."""
    ids = call["input_ids"] if "input_ids" in call else call["inputs"]
    width, longest = ids.shape[1], max(map(len, rows))
    same = (
        torch.equal(out[:, :width], ids.repeat_interleave(len(rows) // len(ids), 0)) and out.shape[1] == width + longest
    )
    same = same and all(new[: len(row)] == row for new, row in zip(out[:, width:].tolist(), rows, strict=True))
    return "" if same else f"{out} in place of {rows}"


@pytest.mark.parametrize("kind", MODELS)
def test_random_calls_return_what_the_model_alone_returns(kind: str) -> None:
    rng, model = random.Random(f"{soak_seed()} {kind}"), made(kind)
    alone, caller, records = copy.deepcopy(model), Caller(rng, model), list[Record]()
    wrong, counts = list[str](), Counter[str]()
    with dejakv.attach(model, words(), on_record=records.append) as cache:
        for number in range(CALLS):
            call, seed = caller.call(), rng.randrange(1 << 30)
            want, streamed = asked(alone.generate, call, seed)
            for turn in ("first", "again"):
                records.clear()
                got, heard = asked(model.generate, call, seed)
                cache.flush()
                served = [record for record in records if record.request_id != "untouched"]
                sampled = len(served) > 1 and _setting(model, call, "do_sample")
                if sampled and isinstance(got, torch.Tensor):
                    found = behind(got, call, of_rows(alone, call, seed))
                else:
                    found = difference(got, want) or ("" if heard == streamed else f"streamed {heard}, not {streamed}")
                counts["answers"] += 1
                counts["hits"] += any(record.provenance.startswith("hit") for record in records)
                counts["untouched"] += any(record.request_id == "untouched" for record in records)
                counts["refused"] += isinstance(want, Exception)
                if found:
                    wrong.append(f"call {number}, {turn}, {[record.provenance for record in records]}, {call}: {found}")
    print(f"{kind}: {CALLS} calls, {dict(counts)}, {len(wrong)} wrong")
    assert not wrong, f"{len(wrong)} of {counts['answers']} answers; the first: {wrong[0]}"
    assert counts["hits"] > 0.25 * counts["answers"], counts


def equal(model: Any, calls: Sequence[Mapping[str, Any]], *, hits: bool = True, attached: Any = None) -> list[Record]:
    """Asks each call of the model alone, attached, and attached again; what each must return is the same."""
    wants = [asked(model.generate, call, 1)[0] for call in calls]
    records: list[Record] = []
    attached = model if attached is None else attached
    with dejakv.attach(attached, words(), on_record=records.append) as cache:
        for call, want in zip(calls, wants, strict=True):
            for _ in range(2):
                got, _ = asked(attached.generate, call, 1)
                cache.flush()
                assert not difference(got, want), difference(got, want)
    assert not hits or any(record.provenance.startswith("hit") for record in records)
    return records


def prompts(*lengths: int, pad: int) -> torch.Tensor:
    """Random prompts of these lengths, padded on the left."""
    torch.manual_seed(sum(lengths))
    width = max(lengths)
    rows = [torch.randint(3, WORDS, (length,)) for length in lengths]
    return torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=pad) for row in rows])


def test_a_mask_is_inferred_from_padding_as_transformers_does() -> None:
    calls = [{"input_ids": prompts(*lengths, pad=1), "max_new_tokens": 6} for lengths in ((12, 20), (9, 14, 22))]
    records = equal(made("padding"), calls)
    assert {record.request_id == "untouched" for record in records} == {False}
    # Padding that is an end token, too, is text, and so is padding that nobody named.
    equal(made("padding"), [{**calls[0], "eos_token_id": [1, 2]}])
    equal(made("no end"), calls)
    equal(made("padding without an end"), calls)


def test_a_hole_that_is_inferred_goes_to_the_model() -> None:
    ids = prompts(20, pad=1)
    ids[0, 7] = 1
    records = equal(made("padding"), [{"input_ids": ids, "max_new_tokens": 4}], hits=False)
    assert {record.request_id for record in records} == {"untouched"}


def test_rows_that_ended_are_filled_as_transformers_fills_them() -> None:
    model, ids = made("padding of zero"), prompts(12, 16, 20, pad=0)
    ends = [int(model.generate(ids[:1], max_new_tokens=3, do_sample=False)[0, -1])]
    for beams in ({}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}):
        equal(model, [{"input_ids": ids, "max_new_tokens": 9, "eos_token_id": ends, **beams}])


def test_no_end_token_is_added_where_none_is_configured() -> None:
    model, words_ = made("no end"), words()
    call = {"input_ids": prompts(20, pad=1), "max_new_tokens": 9}
    words_.eos_token = f"w{int(model.generate(**call)[0, 21])}"
    want = model.generate(**call)
    with dejakv.attach(model, words_) as cache:
        for _ in range(2):
            assert torch.equal(model.generate(**call), want)
            cache.flush()


def test_a_compiled_model_is_served() -> None:
    model = made("padding")
    compiled: Any = torch.compile(model, backend="eager")
    records = equal(model, [{"input_ids": prompts(20, pad=1), "max_new_tokens": 5}], attached=compiled)
    assert "generate" not in vars(compiled)
    assert [record.method for record in records] == ["none", "exact"]


PRECISIONS = """
import torch
import dejakv
from tests.exactness.test_generate_options import made, prompts, words

model, call, records = made("padding"), {"input_ids": prompts(20, pad=1), "max_new_tokens": 3}, []

def ask_twice(cache):
    for _ in range(2):
        model.generate(**call)
        cache.flush()

with dejakv.attach(model, words(), on_record=records.append) as cache:
    ask_twice(cache)
    torch.set_float32_matmul_precision("medium")
    ask_twice(cache)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    ask_twice(cache)
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    ask_twice(cache)
    torch.backends.fp32_precision = "tf32"
    ask_twice(cache)
with dejakv.attach(model, words(), on_record=records.append) as cache:
    ask_twice(cache)
print(*(record.method for record in records))
"""


def test_every_way_to_set_the_precision_of_products_is_taken_and_counts() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PRECISIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["none", "exact"] * 6


def test_prefix_tuning_around_an_attached_model_logs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    from peft import PrefixTuningConfig, get_peft_model

    model, ids = made("padding"), prompts(20, pad=1)
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4}
    torch.manual_seed(1)
    tuned = get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")).eval()
    want = tuned.generate(**call)
    with dejakv.attach(model, words()) as cache:
        for _ in range(2):
            assert torch.equal(tuned.generate(**call), want)
            cache.flush()
    assert not [record for record in caplog.records if record.exc_info or "could not" in record.getMessage()]
