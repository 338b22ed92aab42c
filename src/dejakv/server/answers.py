"""An answer in OpenAI's format: finish reason, usage, and the origin of its state."""

from typing import Any

from dejakv.pipeline import Answer


def finish_reason(answer: Answer, stopped: bool, ends: frozenset[int]) -> str:
    """`stop` for a stop sequence or an end token, `length` for any other end (the limit, the context)."""
    ended = bool(answer.token_ids) and answer.token_ids[-1] in ends
    return "stop" if stopped or ended else "length"


def usage_of(answer: Answer) -> dict[str, Any]:
    """OpenAI's usage; `cached_tokens` are the prompt tokens that were not computed."""
    record = answer.record
    return {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.output_tokens,
        "total_tokens": record.prompt_tokens + record.output_tokens,
        "prompt_tokens_details": {"cached_tokens": record.reused_tokens},
    }


def provenance(answer: Answer) -> dict[str, Any]:
    """The origin of the answer's state; `reason`: why state that was found was not used."""
    record = answer.record
    return {
        "provenance": record.provenance,
        "level": record.level,
        "reuse": record.method,
        "score": record.score,
        "approximate": record.approximate,
        "arithmetic": record.arithmetic,
        "bitwise": record.bitwise,
        "reason": record.reason,
        "order": list(record.order),
        "tokens_reused": record.reused_tokens,
        "tokens_computed": record.computed_tokens,
    }
