"""A cache of answers for any model: guarded, bounded, expiring, divided by partition.

It needs no engine of ours. An equal question is answered at once, a similar one only where the
guards accept it, and such an answer is labelled.

    cache = AnswerCache("answers/", ttl=86_400)
    hit = cache.get("Where is the cat?")
    if hit is None:
        cache.put("Where is the cat?", ask_the_model("Where is the cat?"))

`dejakv.answers.langchain` and `dejakv.answers.litellm` have the classes for these frameworks.
"""

from dejakv.answers.cache import AnswerCache, AnswerHit, CachedText
from dejakv.answers.finished import finished_text
from dejakv.store.selection import PurgeResult, Selection

__all__ = ["AnswerCache", "AnswerHit", "CachedText", "PurgeResult", "Selection", "finished_text"]
