"""Whether starting from an exact prefix is faster than computing the whole prompt.

Rows behind a prefix attend with an explicit mask, of which torch's attention on a CPU computes every element. A whole
prompt has a causal mask, of which it computes half. So a prefix that is a small part of a long prompt makes the request
slower. On SmolLM2-135M (1,300 tokens, one core): 16 tokens held 1.19 times the time of full prefill, 162 tokens 1.03 times,
325 tokens .89 times; here the limit is 193.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PrefixCost:
    """Floating-point operations of one model, embeddings left out.

    row   of one token in all layers, attention to other tokens apart
    pair  of one token that attends to one other in all layers; 0 where a prefix costs nothing beyond its load
    """

    row: int
    pair: int

    @classmethod
    def of(cls, model: Any, attention: str) -> "PrefixCost":
        """The cost in a model of transformers. A GPU's kernels skip what an explicit mask hides, and eager attention
        computes it for whole prompts too: there every prefix pays."""
        embeddings = model.get_input_embeddings().weight
        if attention != "sdpa" or embeddings.device.type != "cpu":
            return cls(1, 0)
        config = model.config.get_text_config(decoder=True)
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        weights = sum(p.numel() for name, p in model.named_parameters() if "layers." in name and "vision" not in name)
        return cls(2 * weights, 4 * layers * width)

    def pays(self, held: int, tokens: int) -> bool:
        """True if a prompt of `tokens` tokens, the first `held` of which are stored, is faster from there."""
        masked, causal = (tokens - held) * tokens, tokens * tokens / 2
        return held * self.row > (masked - causal) * self.pair
