"""A model whose `generate` is served through the pipeline: the engine's face that takes prompts as token ids."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from dejakv.engines.base import Accept, Completion, OnToken, Prepared, Start
from dejakv.engines.transformers.arguments import PROMPT_KEYS, Arguments
from dejakv.engines.transformers.batches import Row, joined, rows_of
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.engines.transformers.first_logits import asking
from dejakv.engines.transformers.planned import Planned
from dejakv.engines.transformers.prompts import check_length, spans_of
from dejakv.errors import InputError
from dejakv.records import Record
from dejakv.request import Request, Sampling


class AttachedModel(TransformersEngine):
    """Serves calls of `generate` one at a time. What `generate` was called with travels in the request's metadata."""

    def __init__(
        self,
        model: Any,
        processor_or_tokenizer: Any,
        registry: Any,
        partition: str,
        on_record: Callable[[Record], None] | None = None,
        trusted: Iterable[str] = (),
    ) -> None:
        model = getattr(model, "_orig_mod", model)  # what `torch.compile` wraps is what generates
        self._called = model.generate
        processor = processor_or_tokenizer if hasattr(processor_or_tokenizer, "image_processor") else None
        tokenizer = processor.tokenizer if processor is not None else processor_or_tokenizer
        super().__init__(model, tokenizer, processor, encoder_cache=registry, trusted=trusted)
        self._partition = partition
        self._on_record = on_record or (lambda _record: None)
        self._answer: Callable[[Request], Record] | None = None
        self._calls = threading.RLock()
        self._output: Any = None
        self._count = 0

    def serve_by(self, answer: Callable[[Request], Record]) -> None:
        """Prompts are handed to `answer`, which has this engine run them."""
        self._answer = answer

    def generate_call(self, inputs: Any = None, *args: Any, **arguments: Any) -> Any:
        """What `model.generate` is while attached; returns what it returns."""
        with self._calls, torch.no_grad():
            if args:
                return self._untouched("positional arguments", inputs, *args, **arguments)
            if inputs is not None and "input_ids" in arguments:
                return self._untouched("token ids are given twice", inputs, **arguments)
            if inputs is not None:
                arguments["input_ids"] = inputs
            call = Arguments(arguments, self.model)
            images = self.vision is not None and self.capabilities.images
            reason = call.why_untouched(images) or self._watch.momentary()
            if not reason and not self.capabilities.reuse:
                reason = self.capabilities.reasons.get("reuse", "reuse is not possible")
            if not reason and call.padded and self._watch.by_length:
                reason = "the rows of a padded batch share one rotary table"
            if reason:
                return self._untouched(reason, **arguments)
            try:
                given = {**arguments, "attention_mask": call.mask}
                rows = rows_of(given, self.vision.book.image_token_id if self.vision is not None else None)
                prepared = [self._prepare_row(row) for row in rows]
            except (ValueError, InputError) as error:
                return self._untouched(str(error), **arguments)
            options = {name: value for name, value in arguments.items() if name not in PROMPT_KEYS}
            outputs = [self._serve(item, options) for item in prepared]
            if len(outputs) == 1 and not call.padded:
                return outputs[0]
            lengths = [len(row.token_ids) for row in rows]
            return joined(outputs, arguments["input_ids"], lengths, call.filler)

    def prepare(self, request: Request) -> Prepared:
        """The prompt is prepared already: it came as token ids."""
        prepared: Prepared | None = request.metadata.get("prepared")
        if prepared is None:
            return super().prepare(request)
        return replace(prepared, request=request, epoch=self._own_epoch(len(prepared.token_ids)))

    def _run(
        self,
        prepared: Prepared,
        source: Start | Planned | None,
        sampling: Sampling | None,
        on_token: OnToken | None,
        accept: Accept | None = None,
    ) -> Completion:
        """Runs with the arguments of the call that is being served."""
        options: dict[str, Any] = dict(prepared.request.metadata["options"])
        asked: Prepared = prepared.request.metadata["prepared"]
        if options.get("streamer") is not None and asked.token_ids != prepared.token_ids:
            options["streamer"] = _AskedFirst(options["streamer"], asked.token_ids)
        completion = self.generate(prepared, asking(options, accept), source, on_token)
        self._output = (completion.details["output"], len(prepared.token_ids))
        return completion

    def _prepare_row(self, row: Row) -> Prepared:
        check_length(self.context, len(row.token_ids))
        spans = ()
        if row.media and self.vision is not None:
            book = self.vision.book_of(self._partition)
            book.held = max(book.held, len(row.media))
            for item, picture, pixels in zip(row.media, row.pictures, row.pixels, strict=True):
                book.add(item.digest, picture, {name: part.clone() for name, part in pixels.items()})
            digests = [item.digest for item in row.media]
            spans = spans_of(row.token_ids, book.image_token_id, row.pictures, digests)
        text = self.tokenizer.decode(row.token_ids, skip_special_tokens=True)
        self._count += 1
        request = Request(f"generate-{self._count}", text, text, row.media, self._partition)
        return Prepared(request, row.token_ids, spans, piece=self.piece)

    def _serve(self, prepared: Prepared, options: Mapping[str, Any]) -> Any:
        """One prompt through the pipeline; the output with this prompt's tokens in front, whoever's state served it."""
        assert self._answer is not None
        request = replace(prepared.request, metadata={"prepared": prepared, "options": options})
        record = self._answer(request)
        (output, ran), self._output = self._output, None
        self._on_record(record)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        own = torch.tensor([prepared.token_ids], device=sequences.device).expand(sequences.shape[0], -1)
        sequences = torch.cat([own, sequences[:, ran:]], dim=1)
        if isinstance(output, torch.Tensor):
            return sequences
        output.sequences = sequences
        return output

    def _untouched(self, reason: str, *args: Any, **arguments: Any) -> Any:
        self._on_record(Record("untouched", reason=reason))
        return self._called(*args, **arguments)


class _AskedFirst(BaseStreamer):
    """A caller's streamer that sees the caller's own prompt first, also where a donor's was run in its place."""

    def __init__(self, streamer: BaseStreamer, prompt: tuple[int, ...]) -> None:
        self._streamer = streamer
        self._prompt: torch.Tensor | None = torch.tensor([prompt])

    def put(self, value: torch.Tensor) -> None:
        prompt, self._prompt = self._prompt, None
        self._streamer.put(value if prompt is None else prompt)

    def end(self) -> None:
        self._streamer.end()
