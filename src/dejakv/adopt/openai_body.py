"""OpenAI request bodies: the varying text, a digest of the rest, and the partition's marks."""

import json
import secrets
from typing import Any

from dejakv.adopt.adopter import AdoptRequest
from dejakv.http.errors import RefusedError
from dejakv.identity import digest_of

ABOUT_THE_ANSWER = {
    "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "temperature",
    "top_p", "top_k", "min_p", "seed", "stop", "n", "logprobs", "top_logprobs", "user",
    "cache_salt", "kv_transfer_params", "request_id", "priority", "metadata", "store",
    "service_tier", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias",
}  # fmt: skip
"""Fields that do not shape the prompt. Everything else does, fields that are not known included."""

_MESSAGES = ("messages", "input", "system", "prompt", "content_parts", "items", "query")
_PARAMETERS = ("vllm_xargs", "extra_args", "extra_body", "sampling_params")


def adopt_request_of(body: dict[str, Any], partition: str) -> AdoptRequest | str:
    """Return the last user text and a digest of all else that shapes the prompt.

    `body` is left as it was.

    Returns
    -------
    AdoptRequest or str
        The two parts, or the reason why no other prompt may stand in for this one.
    """
    place = _varying(body)
    if isinstance(place, str):
        return place
    holder, key = place
    text = holder[key]
    if not text.strip():
        return "the varying text is empty"

    remote = remote_media(body)
    if remote:
        return f"media at {remote} are not known by content: send them as data URLs"
    # Left out of the digest, which is of all the rest; put back below.
    holder[key] = ""
    # Sorted, so that the order of fields does not make another context.
    context = json.dumps(
        {name: value for name, value in body.items() if name not in ABOUT_THE_ANSWER},
        sort_keys=True,
    )
    holder[key] = text
    return AdoptRequest(partition, text, digest_of("openai", context))


def replace_varying_text(body: dict[str, Any], text: str) -> None:
    """Replace the varying text of a body, in place."""
    place = _varying(body)
    assert not isinstance(place, str)
    holder, key = place
    holder[key] = text


def restrict_to_partition(body: dict[str, Any], partition: str) -> None:
    """Make the body the partition's, in place.

    Every choice of a partition, of a donor elsewhere, or of a name for media is replaced or
    removed. Media named by a client would share vLLM's own caches with others of that name. Media
    hashes, required by `/inference/v1/generate`, are hashed with the partition.

    Raises
    ------
    RefusedError
        For a `previous_response_id`, which may name another client's answer.
    """
    if body.get("previous_response_id") is not None:
        raise RefusedError(
            400,
            "previous_response_id names an answer that may be another client's: send the "
            "conversation itself",
        )

    _own_parameters(body, partition)
    _own_messages([body.get(name) for name in _MESSAGES], partition)
    # Last, as the calls before remove every salt of the client's.
    body["cache_salt"] = partition


def forbid_storing(body: dict[str, Any], partition: str) -> None:
    """Mark the request as not to be kept, in place.

    Its blocks get a random salt: vLLM's prefix cache holds them until it needs the room, and gives
    them to nobody.
    """
    set_connector_options(body, {**connector_options(body), "no_store": True})
    body["cache_salt"] = f"{partition}-{secrets.token_hex(16)}"


def connector_options(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body's choices for the connector (`kv_transfer_params.dejakv`), or nothing."""
    params = body.get("kv_transfer_params")
    options = params.get("dejakv") if isinstance(params, dict) else None
    return options if isinstance(options, dict) else {}


def asks_connector(body: dict[str, Any]) -> bool:
    """Tell whether the client asked for the connector's report, if only by an empty object."""
    params = body.get("kv_transfer_params")
    return isinstance(params, dict) and "dejakv" in params


def set_connector_options(body: dict[str, Any], options: dict[str, Any]) -> None:
    """Set a body's choices for the connector, in place of all `kv_transfer_params`."""
    body["kv_transfer_params"] = {"dejakv": options}


def _own_parameters(holder: dict[str, Any], partition: str) -> None:
    """Remove parameters for connectors except our own: the others name blocks and hosts."""
    for name in ("cache_salt", "multi_modal_uuids"):
        holder.pop(name, None)
    for name in ("kv_transfer_params", "ec_transfer_params"):
        params = holder.pop(name, None)
        if isinstance(params, dict) and "dejakv" in params:
            holder[name] = {"dejakv": params["dejakv"]}

    for name in _PARAMETERS:
        if isinstance(holder.get(name), dict):
            _own_parameters(holder[name], partition)
    features = holder.get("features")
    hashes = features.get("mm_hashes") if isinstance(features, dict) else None
    if isinstance(features, dict) and isinstance(hashes, dict):
        features["mm_hashes"] = {
            kind: [digest_of("media", partition, item) for item in items if isinstance(item, str)]
            for kind, items in hashes.items()
            if isinstance(items, list)
        }


def _own_messages(value: Any, partition: str) -> None:
    """Restrict messages and the parts of their contents, at any depth.

    The arguments of tool calls are not searched.
    """
    if isinstance(value, list):
        for item in value:
            # A prompt of token ids is a long list of numbers.
            if isinstance(item, list | dict):
                _own_messages(item, partition)
    elif isinstance(value, dict):
        value.pop("uuid", None)
        _own_parameters(value, partition)
        for name in ("content", "output"):
            _own_messages(value.get(name), partition)


def _varying(body: dict[str, Any]) -> tuple[dict[str, Any], str] | str:
    """Return the dictionary and key of the varying text, or why there is none.

    The text is the last user text of a chat, or the prompt of a completion.
    """
    if isinstance(body.get("prompt"), str):
        return body, "prompt"
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return "neither one text prompt nor messages"
    last = messages[-1]
    if not isinstance(last, dict) or last.get("role") != "user":
        return "the last message is not the user's"
    if isinstance(last.get("content"), str):
        return last, "content"
    texts = [part for part in _parts(last) if part.get("type") == "text"]
    if len(texts) != 1 or not isinstance(texts[0].get("text"), str):
        return "the last message does not hold exactly one text"

    return texts[0], "text"


def _parts(message: Any) -> list[dict[str, Any]]:
    content = message.get("content") if isinstance(message, dict) else None
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def remote_media(body: dict[str, Any]) -> str:
    """Return the kind of the first medium that is not in the body itself; empty if all are."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        for name, value in (item for part in _parts(message) for item in part.items()):
            url = (
                value.get("url")
                if isinstance(value, dict)
                else value
                if name.endswith("_url")
                else None
            )
            if isinstance(url, str) and not url.startswith("data:"):
                return url.split(":")[0] + " addresses"

    return ""
