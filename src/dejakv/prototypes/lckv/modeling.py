"""LCKV models for transformers: `AutoModelForCausalLM` loads them for the type `lckv-llama`."""

from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from dejakv.models.cache_name import CACHE_NAME
from dejakv.prototypes.lckv.attention import LCKVDecoderLayer, RowMasks
from dejakv.prototypes.lckv.cache import LCKVCache, cached_length
from dejakv.prototypes.lckv.configuration import LCKVLlamaConfig
from dejakv.prototypes.lckv.passes import CondensedPasses, HiddenRows, LoopIterations


class LCKVLlamaPreTrainedModel(LlamaPreTrainedModel):
    """Base class of the models, with what transformers asks of it."""

    config_class = LCKVLlamaConfig
    config: LCKVLlamaConfig
    supports_gradient_checkpointing = False
    _no_split_modules = ["LCKVDecoderLayer"]  # noqa: RUF012 (the name and form that transformers reads)
    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_compile_fullgraph = False
    _can_record_outputs = {}  # noqa: RUF012 (a layer runs many times in a forward)


class LCKVLlamaModel(LCKVLlamaPreTrainedModel):
    """Decoder without its head."""

    def __init__(self, config: LCKVLlamaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            LCKVDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.layout = config.layout
        self.post_init()

    def passes(self, cache: Cache | None, tokens: int) -> CondensedPasses:
        """Start the passes of a forward over `tokens` new tokens behind a cache."""
        return CondensedPasses(self.layout, cast(Any, self.layers), cache, tokens)

    def rows(
        self,
        embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        past: int,
    ) -> HiddenRows:
        """Return the rows of the new tokens.

        Positions default to those after the `past` tokens, without padding.
        """
        batch, tokens = embeds.shape[:2]
        if position_ids is None:
            if attention_mask is not None and attention_mask.ndim == 2:
                # Padding counts for no position.
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
            else:
                position_ids = torch.arange(past, past + tokens, device=embeds.device)[None]

        rotary = self.rotary_emb(embeds, position_ids)
        rotary = tuple(part.expand(batch, -1, -1) for part in rotary)
        return HiddenRows(
            embeds,
            cast(Any, rotary),
            RowMasks.of(attention_mask, batch, past, tokens, embeds.device),
        )

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Cache | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states [batch, rows, hidden] behind the last norm.

        Rows supplied by a similar task (`LCKVCache.donor_rows`) are left out: the result has the
        computed rows alone, the last one last.

        The cache is `cache` or, as `CACHE_NAME` says, `past_key_values`.

        Raises
        ------
        ValueError
            For unsupported arguments.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if output_attentions or output_hidden_states:
            raise ValueError(
                "an LCKV model runs its layers many times: it returns no attentions or hidden "
                "states"
            )

        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = LCKVCache(self.layout)
        donor_rows, iterations = (
            None,
            LoopIterations(self.config.forward_passes, self.config.backward_passes),
        )
        if isinstance(cache, LCKVCache):
            # For one prefill: decoding computes every row.
            donor_rows, cache.donor_rows = cache.donor_rows, None
            if cache.settled:
                iterations = LoopIterations.to_the_end(embeds.shape[1])

        rows = self.rows(embeds, attention_mask, position_ids, cached_length(cache, self.layout))
        passes = self.passes(cache, embeds.shape[1])
        rows = passes.run_layers(rows, self.layout.bottom)
        if self.layout.loop:
            if donor_rows is not None:
                donor_rows = donor_rows.widened(embeds.shape[0])
                rows = rows.pick(donor_rows.rows)
            rows = passes.settle(rows, iterations, donor_rows)
            rows = passes.run_layers(rows, self.layout.top)

        # Only now: all layers read the cache without the new tokens.
        passes.commit()
        # The field's name depends on the library, so that no type can be known for it.
        fields: dict[str, Any] = {CACHE_NAME: cache if use_cache else None}
        return BaseModelOutputWithPast(last_hidden_state=self.norm(rows.hidden), **fields)


class LCKVLlamaForCausalLM(LCKVLlamaPreTrainedModel, GenerationMixin):
    """Decoder with its head; `generate` keeps an `LCKVCache`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LCKVLlamaConfig) -> None:
        super().__init__(config)
        self.model = LCKVLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits [batch, rows, vocabulary]; with `labels` [batch, tokens] also the loss."""
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = cast(torch.Tensor, out.last_hidden_state)
        # 0 keeps all rows: slice(-0, None) begins at the first.
        logit_rows = (
            slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        )
        logits = self.lm_head(hidden[:, logit_rows, :])

        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )

        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE_NAME: out.get(CACHE_NAME)})

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Make an `LCKVCache`: `generate` would make a cache with room for every layer."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation={kind!r} has no condensed form: leave it out")
        if generation_config.use_cache and model_kwargs.get(CACHE_NAME) is None:
            model_kwargs[CACHE_NAME] = LCKVCache(self.model.layout)
