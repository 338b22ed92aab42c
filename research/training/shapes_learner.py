"""One training step of shapes-vlm: auxiliary heads, their losses, an average of the weights."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from transformers import LlavaForConditionalGeneration

from research.training.shapes_batches import (
    IGNORE,
    PATCH_HEADS,
    QUESTION_HEADS,
    REFERENCE_HEADS,
    Batch,
)
from research.training.shapes_model import IMAGE_TOKENS

READ_AFTER = 2
"""The decoder layer behind which a noun phrase must know the thing it names; the layers left
compare and answer.
"""
COMPARE_AFTER = 3
"""The decoder layer behind which the sign to answer must know the things named, and how they
compare.
"""


class Heads(nn.Module):
    """Linear read-outs that only training uses: they tell the tower and the early layers what will
    be asked for.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.ModuleDict({k: nn.Linear(width, n) for k, n in PATCH_HEADS.items()})
        self.norm = nn.LayerNorm(width)
        self.references = nn.ModuleDict(
            {k: nn.Linear(width, n) for k, n in REFERENCE_HEADS.items()}
        )
        self.question_norm = nn.LayerNorm(width)
        self.questions = nn.ModuleDict({k: nn.Linear(width, n) for k, n in QUESTION_HEADS.items()})


@dataclass
class Losses:
    """Mean losses of a batch and, per question, whether the answer's word was right."""

    total: torch.Tensor
    answer: float
    patches: float
    references: float
    questions: float
    correct: torch.Tensor


def losses(model: LlavaForConditionalGeneration, heads: Heads, batch: Batch) -> Losses:
    """Forward pass over a packed batch. Runs under whatever autocast is active."""
    inner = model.model
    seen = inner.vision_tower(pixel_values=batch.pixels).last_hidden_state[:, 1:]
    seen = inner.multi_modal_projector(seen)
    embedded = inner.language_model.embed_tokens(batch.tokens[:, IMAGE_TOKENS:])
    out = inner.language_model(
        inputs_embeds=torch.cat([seen.to(embedded.dtype), embedded], 1),
        attention_mask=batch.mask,
        position_ids=batch.positions,
        use_cache=False,
        output_hidden_states=True,
    )
    asked = batch.targets != IGNORE
    logits = model.lm_head(out.last_hidden_state[asked]).float()
    answer = cross_entropy(logits, batch.targets[asked])

    patches = torch.stack(
        [
            cross_entropy(h(seen).float().flatten(0, 1), batch.patches[k].flatten())
            for k, h in heads.patches.items()
        ]
    ).sum()
    named = _at(out.hidden_states, READ_AFTER, batch.places)
    references = _read(heads.references, heads.norm(named), batch.references)
    asking = _at(out.hidden_states, COMPARE_AFTER, batch.answers)
    questions = _read(heads.questions, heads.question_norm(asking), batch.questions)

    rows, columns = batch.answers.unbind(1)
    # `asked` picks two places a question, in order: the answer, then its end.
    correct = logits[0::2].argmax(-1) == batch.targets[rows, columns]
    total = answer * 2 + patches * 0.5 + references * 0.3 + questions * 0.2
    return Losses(
        total, answer.item(), patches.item(), references.item(), questions.item(), correct
    )


def _at(hidden: tuple[torch.Tensor, ...], layer: int, places: torch.Tensor) -> torch.Tensor:
    """States behind a layer at (row, token) places, fp32."""
    return hidden[min(layer, len(hidden) - 1)][places[:, 0], places[:, 1]].float()


def _read(
    heads: nn.ModuleDict, states: torch.Tensor, labels: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Sum over read-outs of the mean loss where there is a label; 0 for one that has none in this
    batch.
    """
    total = states.new_zeros(())
    for name, head in heads.items():
        wanted = labels[name]
        known = (wanted != IGNORE).sum().clamp(min=1)
        total = (
            total
            + cross_entropy(head(states).float(), wanted, ignore_index=IGNORE, reduction="sum")
            / known
        )
    return total


class Average(AveragedModel):
    """Exponential moving average of the weights: a better checkpoint than the last step's at any
    learning rate; slower as the run gets longer, so that the start is forgotten.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(
            model,
            avg_fn=lambda held, new, steps: held.lerp(
                new, 1 - min(0.998, (steps + 1) / (steps + 10))
            ),
        )
        self.requires_grad_(False)
