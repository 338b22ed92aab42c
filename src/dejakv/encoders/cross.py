"""Cross-encoders: models that read two texts at once and say whether they mean the same."""

import threading
from collections.abc import Mapping
from typing import Any

from dejakv.encoders.fingerprint import module_fingerprint
from dejakv.encoders.threads import torch_threads
from dejakv.errors import ModelError

_SAME = ("entail", "duplicate", "paraphrase", "equivalent", "similar", "same")
_NOT = ("not", "non", "no_", "un", "dis")


class CrossEncoder:
    """A model for the classification of pairs by hub name or local folder: one that was trained on paraphrases, on likeness, or on
    natural language inference, where two texts mean the same if each entails the other.

    Raises: ModelError if it cannot be loaded, or if its labels do not tell which one means the same.
    """

    def __init__(self, name_or_path: str, *, device: str = "cpu") -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.name = name_or_path
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name_or_path)
            self._model: Any = AutoModelForSequenceClassification.from_pretrained(name_or_path).to(device).eval()
        except Exception as error:
            reason = str(error).partition("\n")[0][:200]
            raise ModelError(
                f"the cross-encoder {name_or_path!r} cannot be loaded ({type(error).__name__}: {reason}): give a folder or the hub name of "
                "a model for sequence classification, or leave cross_encoder (--cross-encoder) out"
            ) from None
        self._device = device
        self._same = label_of_the_same(self._model.config.id2label, name_or_path)
        self._lock = threading.Lock()
        self.fingerprint = module_fingerprint(self._model)

    def score(self, one: str, other: str) -> float:
        """Probability that the second text says what the first one does, in [0, 1]. What is too long is cut, the longer text first."""
        import torch

        with self._lock, torch_threads(), torch.inference_mode():
            inputs = self._tokenizer(one, other, truncation=True, return_tensors="pt").to(self._device)
            logits = self._model(**inputs).logits[0].float()
            found = torch.sigmoid(logits[0]) if self._same is None else torch.softmax(logits, -1)[self._same]
            return float(found)


def label_of_the_same(labels: Mapping[int, str], name: str) -> int | None:
    """Which class means that two texts say the same; None where there is one alone. Raises: ModelError where that is not told."""
    if len(labels) == 1:
        return None
    named = [
        number
        for number, label in labels.items()
        if any(word in label.lower() for word in _SAME) and not label.lower().startswith(_NOT)
    ]
    if len(named) == 1:
        return int(named[0])
    if len(labels) == 2 and not named:  # of two classes without names the second, as is usual for paraphrases
        return 1
    raise ModelError(
        f"the cross-encoder {name!r} has the labels {', '.join(labels.values())}, none of which says that two texts mean the same: give "
        "one for paraphrases, duplicates or entailment"
    )
