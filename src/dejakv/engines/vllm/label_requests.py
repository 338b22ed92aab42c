"""The two requests of a label, made of a client's: one is answered in full, the other from reuse; both greedily and in one piece."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from dejakv.engines.vllm.limits import Would
from dejakv.engines.vllm.openai_body import with_text, with_wish
from dejakv.trust.differs import Seen

LOWEST = 2**63 - 1
"""vLLM's lowest priority."""

_LEFT_OUT = frozenset(
    {
        "stream", "stream_options", "n", "best_of", "use_beam_search", "length_penalty", "temperature", "top_p", "top_k",
        "min_p", "seed", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "min_tokens", "request_id", "user",
        "metadata", "store", "service_tier", "priority", "kv_transfer_params", "ec_transfer_params",
    }
)  # fmt: skip
"""What says how an answer is drawn, told or filed, and not what the prompt or the likeliest answer is."""


@dataclass(frozen=True)
class Both:
    """scope   of the client's request: the route, and the headers with its key
    full    the body that is answered in full
    reused  the body that is answered from reuse; `approximate`: the response must say that it was, or there is no label
    """

    scope: Mapping[str, Any]
    full: dict[str, Any]
    reused: dict[str, Any]
    approximate: bool


def of_adopted(scope: Mapping[str, Any], body: dict[str, Any], donor: str, tokens: int | None, lowest: bool) -> Both:
    """Of a request that another prompt may stand in for; `body` has its own."""
    full = _greedy(body, tokens, lowest)
    with_wish(full, {"mode": "off"})
    reused = _greedy(body, tokens, lowest)
    with_wish(reused, {"mode": "off"})
    with_text(reused, donor)
    return Both(scope, full, reused, approximate=False)


def of_blended(scope: Mapping[str, Any], body: dict[str, Any], would: Would, tokens: int | None, lowest: bool) -> Both:
    """Of a request that may be blended. The blend runs under a salt of its own: vLLM's prefix cache has the prompt by then."""
    full, reused = _greedy(body, tokens, lowest), _greedy(body, tokens, lowest)
    with_wish(full, {"mode": "off"})
    salt = body["cache_salt"]
    with_wish(reused, {"mode": "blend", "donors": list(would.donors), "apart": salt})
    reused["cache_salt"] = f"{salt}-{secrets.token_hex(16)}"
    return Both(scope, full, reused, approximate=True)


def _greedy(body: dict[str, Any], tokens: int | None, lowest: bool) -> dict[str, Any]:
    """A body of its own; `tokens`: of how many the answer is, None: of as many as the client asked for."""
    made: dict[str, Any] = json.loads(json.dumps({name: body[name] for name in body if name not in _LEFT_OUT}))
    made |= {"temperature": 0.0, "return_token_ids": True}
    if tokens is not None:
        made.pop("max_completion_tokens", None)
        made["max_tokens"] = tokens
    if lowest:
        made["priority"] = LOWEST
    return made


def seen_of(answer: Mapping[str, Any]) -> Seen:
    """The answer in a response's body. Raises: KeyError, IndexError or TypeError for a body that is no answer."""
    choice = cast(dict[str, Any], answer["choices"][0])
    message = cast(dict[str, Any], choice.get("message") or {})
    text = cast(str, choice.get("text") or message.get("content") or "")
    calls = message.get("tool_calls")
    if calls:  # as the tool parser read them
        text += json.dumps(calls_in(calls))
    return Seen(text, tuple(cast(list[int], choice["token_ids"])))


def calls_in(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Tool calls without their ids, which are random."""
    return {"tool_calls": [call.get("function") for call in calls]}


def told_in(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What the connector says in a response's body; empty if it says nothing."""
    params = answer.get("kv_transfer_params")
    told = params.get("dejakv") if isinstance(params, dict) else None
    return cast(dict[str, Any], told) if isinstance(told, dict) else {}
