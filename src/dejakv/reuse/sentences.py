"""Which tokens end a sentence, as a tokenizer spells them."""

from typing import Any

import numpy as np

from dejakv.reuse.token_map import Ids

_ENDS = (".", "?", "!", "\u3002", "\uff1f", "\uff01", "\n", "\u010a")
_KEPT = "_dejakv_sentence_ends"


def sentence_ends(tokenizer: Any) -> Ids | None:
    """Ids of the tokens whose piece ends with a full stop, a question or exclamation mark or a line break (byte-level
    tokenizers spell it as U+010A), ascending; None for a tokenizer without a vocabulary. Kept with the tokenizer."""
    held = getattr(tokenizer, _KEPT, None)
    if held is not None:
        return held
    if not hasattr(tokenizer, "get_vocab"):
        return None
    special = set(getattr(tokenizer, "all_special_ids", None) or ())
    found = (i for piece, i in tokenizer.get_vocab().items() if piece.endswith(_ENDS) and i not in special)
    made = np.array(sorted(found), dtype=np.int64)
    try:
        setattr(tokenizer, _KEPT, made)
    except AttributeError:
        return made
    return made
