"""A sample as a request: the prompt the model reads, and the chunk the levels compare."""

from collections.abc import Mapping
from string import Formatter
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.errors import ConfigError, InputError
from dejakv.request import DEFAULT_PARTITION, Request, Sampling
from dejakv.vectors.image import image_id

PLAIN_TEMPLATE = "{context}Question: {question}\nAnswer:"


class Prompter:
    """Renders samples for one model.

    templates  processor or tokenizer with the chat template; None for plain text
    template   `--prompt-template` with `{question}` and `{context}`; inside a chat template it is the user's message
    raw        `--raw-prompts`: a record's field `prompt` is the prompt as it stands, without any template
    """

    def __init__(
        self,
        templates: Any = None,
        template: str | None = None,
        chunk_source: str = "question",
        *,
        raw: bool = False,
    ) -> None:
        self.templates = templates if getattr(templates, "chat_template", None) else None
        self.template = template
        self.chunk_source = chunk_source
        self.raw = raw
        if template is not None:
            _check_template(template)

    def request(self, sample: Sample, sampling: Sampling | None = None, partition: str | None = None) -> Request:
        """The sample as a request. Its partition is the given one, or the `partition` of its record.

        Raises: InputError for an empty question, ConfigError for a chunk source that it lacks.
        """
        if not sample.question.strip():
            raise InputError(f"sample {sample.id} has an empty question: remove it, or add a text")
        prompt = self.prompt(sample)
        chunk = chunk_of(sample, self.chunk_source, prompt)
        asked = self.chunk_source in ("question", "prompt") or chunk in prompt
        return Request(
            id=sample.id,
            prompt=prompt,
            chunk=chunk,
            question="" if asked else f"{sample.context} {sample.question}".strip(),
            media=sample.media,
            partition=partition or str(sample.fields.get("partition") or DEFAULT_PARTITION),
            sampling=sampling or Sampling(),
            parts=sample.parts,
            order="free" if sample.parts else "given",
            metadata={"question": sample.question, "imageId": image_id(sample) or None, "sample": sample.id},
        )

    def prompt(self, sample: Sample) -> str:
        """The prompt text for the model."""
        if self.raw and isinstance(whole := sample.fields.get("prompt"), str):
            return whole
        if sample.messages:
            return self._conversation(sample)
        if self.templates is None:
            context = f"{sample.context}\n" if sample.context else ""
            return (self.template or PLAIN_TEMPLATE).format(question=sample.question, context=context)
        if self.template is None:
            user, system = sample.question, sample.context
        else:
            user, system = self.template.format(question=sample.question, context=sample.context), ""
            system = "" if "{context}" in self.template else sample.context
        content: list[dict[str, str]] = [{"type": "image"} for _ in sample.media]
        content.append({"type": "text", "text": user})
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content if sample.media else user})
        return str(self.templates.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _conversation(self, sample: Sample) -> str:
        if self.templates is None:
            return "".join(f"{role}: {text}\n" for role, text in sample.messages) + "assistant:"
        from jinja2 import TemplateError

        messages = [{"role": role, "content": text} for role, text in sample.messages]
        try:
            return str(self.templates.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise InputError(
                f"sample {sample.id}: the model's chat template refuses the conversation ({error}): choose another model"
            ) from error


def _check_template(template: str) -> None:
    try:
        parts = [(name, form, how) for _, name, form, how in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"--prompt-template {template!r} is not valid ({error}): write {{{{ for a literal brace"
        ) from error
    for name, form, how in parts:
        if name not in ("question", "context") or form or how:
            raise ConfigError(
                f"--prompt-template {template!r} has the unknown field {name!r}: use {{question}} and {{context}}"
            )


def chunk_of(sample: Sample, source: str, prompt: str) -> str:
    """The text that the levels compare: `question`, `semantic` (GQA's program), `group`, `combined` (question and program),
    `prompt`, or any field of the record."""
    if source == "question":
        return sample.question
    if source == "prompt":
        return prompt if not sample.context else f"{sample.context} {sample.question}"
    if source == "combined":
        return f"{sample.question} {_field(sample, 'semanticStr')}"
    names = {"semantic": "semanticStr", "group": "groups"}
    return _field(sample, names.get(source, source))


def _field(sample: Sample, name: str) -> str:
    value: Any = sample.fields.get(name)
    if value is None:
        known = ", ".join(sorted(sample.fields)) or "none"
        raise ConfigError(
            f"--chunk-source needs the field {name!r}, but sample {sample.id} has only: {known}; give one of these, or question or prompt"
        )
    if isinstance(value, Mapping):
        parts = [str(item) for item in value.values() if item]
        return " ".join(parts) if parts else sample.question
    return str(value)
