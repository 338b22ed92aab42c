"""Which calls of `generate` can be served from single prompts' state, and which must go to the model as they are.

What is not named here goes to the model: an argument of a later release, or of a model's own, may mean anything.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

PROMPT_KEYS = frozenset({"input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids"})
SERVED = PROMPT_KEYS | {
    "generation_config", "logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria", "streamer", "tokenizer",
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "disable_compile", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "eos_token_id", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "guidance_scale", "length_penalty",
    "max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size",
    "num_beams", "num_return_sequences", "output_logits", "output_scores", "pad_token_id", "remove_invalid_values",
    "renormalize_logits", "repetition_penalty", "return_dict_in_generate", "sequence_bias", "stop_strings",
    "suppress_tokens", "temperature", "top_h", "top_k", "top_p", "typical_p", "use_cache", "watermarking_config",
}  # fmt: skip
"""Arguments with which a call that starts from stored state returns what it returns without."""
_CONFIGURED = (
    # rows or layers of the whole prompt are returned, and a hit computes one row
    "output_attentions", "output_hidden_states",
    # another way to decode, or another kind of cache
    "assistant_early_exit", "cache_config", "cache_implementation", "compile_config", "constraints", "dola_layers",
    "force_words_ids", "is_assistant", "low_memory", "max_cache_len", "penalty_alpha", "prefill_chunk_size",
    "prompt_lookup_num_tokens", "token_healing", "use_mtp",
)  # fmt: skip
_OF_THE_BATCH = (
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
    "return_dict_in_generate",
    # a row that these end is written on where no end token is set
    "stop_strings",
    "max_time",
)
_SEE_PADDING = (
    "bad_words_ids", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "forced_bos_token_id",
    "logits_processor", "max_length", "min_length", "no_repeat_ngram_size", "prefix_allowed_tokens_fn",
    "repetition_penalty", "return_dict_in_generate",
    "sequence_bias", "stop_strings", "stopping_criteria", "streamer", "watermarking_config",
)  # fmt: skip


class Arguments:
    """One call's arguments over the given configuration over the model's own.

    mask  the attention mask: that of the call, or the one that transformers infers from padding tokens
    """

    def __init__(self, arguments: Mapping[str, Any], model: Any) -> None:
        self.given = arguments
        self._configs = (arguments.get("generation_config"), model.generation_config)
        self._context = getattr(model.config, "max_position_embeddings", None)
        ids, self.mask = arguments.get("input_ids"), arguments.get("attention_mask")
        if self.mask is None and _are_ids(ids):
            pad = self.setting("pad_token_id")
            known = pad is not None and pad not in self.ends
            self.mask = (ids != pad).long() if known else torch.ones_like(ids)

    @property
    def ends(self) -> list[int]:
        """The end tokens; empty if there are none."""
        given = self.setting("eos_token_id")
        return [] if given is None else torch.as_tensor(given).reshape(-1).tolist()

    @property
    def filler(self) -> int:
        """The token behind the end of a shorter answer: with beams never a padding token 0, as in transformers."""
        pad, ends = self.setting("pad_token_id"), self.ends
        if ends and (pad is None or (pad == 0 and (self.setting("num_beams") or 1) > 1)):
            return ends[0]
        return int(pad or 0)

    def setting(self, name: str) -> Any:
        """What holds for this call; None if nothing says, or if the call says None."""
        if name in self.given:
            return self.given[name]
        return next((value for config in self._configs if (value := getattr(config, name, None)) is not None), None)

    def why_untouched(self, images: bool) -> str:
        """Why the call must go to the model as it is; empty if single prompts can serve it."""
        ids, mask = self.given.get("input_ids"), self.mask
        if not _are_ids(ids):
            return "no token ids"
        if ids.numel() == 0:
            return "no tokens"
        for name, value in self.given.items():
            if name not in SERVED and value is not None and value is not False:
                return f"{name} is given"
        for name in _CONFIGURED:
            if self.setting(name):
                return f"{name} is configured"
        if self.setting("use_cache") is False:
            return "use_cache is off"
        if self.setting("guidance_scale") not in (None, 1):
            return "guidance_scale runs a second prompt"
        if "pixel_values" in self.given and not images:
            return "pictures for a model whose pictures are not supported"
        if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape or not _left_padded(mask):
            return "an attention mask with holes or right padding"
        if ids.shape[0] > 1 and (name := next(filter(self._in_use, _OF_THE_BATCH), "")):
            return f"{name} with a batch"
        if self.padded and (name := next(filter(self._in_use, _SEE_PADDING), "")):
            return f"{name} with padding"
        return ""

    @property
    def padded(self) -> bool:
        return not bool((self.mask == 1).all())

    def _in_use(self, name: str) -> bool:
        value = self.setting(name)
        if name == "max_length" and self.setting("max_new_tokens") is not None:
            return False
        if name == "max_length" and value is None:  # 20 new tokens, as far as the context goes
            return self._context is not None and self.given["input_ids"].shape[1] + 20 > self._context
        return bool(value) and not (name.endswith("penalty") and value == 1)


def _are_ids(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype in (torch.int32, torch.int64)


def _left_padded(mask: torch.Tensor) -> bool:
    plain = ((mask == 0) | (mask == 1)).all()
    return bool(plain and (mask[:, -1] == 1).all() and (mask[:, 1:] >= mask[:, :-1]).all())
