"""The samples of a run, the requests that are made of them, and a tokenizer without its model.

Pictures are `<imageId>.jpg` or `.png` below `--image-root` and the folders of
SEMANTIC_CACHE_IMAGE_ROOT, GQA_IMAGE_ROOT and LLAVA_IMAGE_ROOT, for the model and the embedding hook
alike. A request has the prompt that the model reads, and the text that levels compare.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Dataset, Sample
from dejakv.datasets.registry import OPTIONS, DatasetOptions, open_dataset, samples
from dejakv.engines.open import takes_pictures
from dejakv.errors import ConfigError, DatasetError, InputError
from dejakv.experiments.settings import RunSettings
from dejakv.models import fetched
from dejakv.models.loading import load_tokenizer
from dejakv.request import DEFAULT_PARTITION, Request, Sampling
from dejakv.vectors.image import image_id, image_roots, pictures_of

PLAIN_TEMPLATE = "{context}Question: {question}\nAnswer:"


class SamplePrompter:
    """Renderer of samples for one model.

    Parameters
    ----------
    templates : optional
        Processor or tokenizer with the chat template; None for plain text.
    template : str, optional
        `--prompt-template` with `{question}` and `{context}`; inside a chat template it is the
        user's message.
    chunk_source : str
        Text that levels compare (`chunk_of`).
    raw : bool
        `--raw-prompts`: a record's field `prompt` is the prompt as it stands, without any template.

    Raises
    ------
    ConfigError
        For a template that cannot be filled.
    """

    def __init__(
        self,
        templates: Any = None,
        template: str | None = None,
        chunk_source: str = "question",
        *,
        raw: bool = False,
    ) -> None:
        self.templates: Any = templates if getattr(templates, "chat_template", None) else None
        self.template = template
        self.chunk_source = chunk_source
        self.raw = raw

        if template is not None:
            # Filled once now, so that a wrong template fails before the run and not within it.
            try:
                template.format(question="", context="")
            except (ValueError, LookupError, AttributeError) as error:
                raise ConfigError(
                    f"--prompt-template {template!r} is not valid ({error}): use {{question}} and"
                    " {context}, and write {{ for a literal brace"
                ) from error

    @classmethod
    def for_run(cls, settings: RunSettings, templates: Any) -> "SamplePrompter":
        """Return the prompter for a run's settings, with the chat template of `templates`."""
        return cls(
            templates, settings.prompt_template, settings.chunk_source, raw=settings.raw_prompts
        )

    def request(self, sample: Sample, sampling: Sampling | None = None) -> Request:
        """Return the sample as a request, in the `partition` of its record.

        Raises
        ------
        InputError
            For an empty question, and for a conversation that the chat template refuses.
        ConfigError
            For a chunk source that the sample lacks.
        """
        if not sample.question.strip():
            raise InputError(f"sample {sample.id} has an empty question: remove it, or add a text")

        prompt = self.prompt(sample)
        chunk = chunk_of(sample, self.chunk_source, prompt)

        # Where a program or a group is compared, guards of words read the question instead.
        chunk_in_prompt = self.chunk_source in ("question", "prompt") or chunk in prompt
        return Request(
            id=sample.id,
            prompt=prompt,
            chunk=chunk,
            question="" if chunk_in_prompt else f"{sample.context} {sample.question}".strip(),
            media=sample.media,
            partition=str(sample.fields.get("partition") or DEFAULT_PARTITION),
            sampling=sampling or Sampling(),
            parts=sample.parts,
            order="free" if sample.parts else "given",
            metadata={
                "question": sample.question,
                "imageId": image_id(sample) or None,
                "sample": sample.id,
            },
        )

    def prompt(self, sample: Sample) -> str:
        """Return the prompt text for the model.

        A raw prompt stays as it is, and a conversation keeps its messages. Any other sample is the
        user's message in the chat template, if there is one, with its context as system message.

        Raises
        ------
        InputError
            For a conversation that the chat template refuses.
        """
        if (self.raw or sample.fields.get("raw")) and isinstance(
            whole := sample.fields.get("prompt"), str
        ):
            return whole

        # A conversation has its own roles, so that no template of a single question fits it.
        if sample.messages:
            return self._conversation(sample)
        if self.templates is None:
            context = f"{sample.context}\n" if sample.context else ""
            return (self.template or PLAIN_TEMPLATE).format(
                question=sample.question, context=context
            )
        if self.template is None:
            user, system = sample.question, sample.context
        else:
            user, system = (
                self.template.format(question=sample.question, context=sample.context),
                "",
            )
            # A template that places the context itself must not get it twice.
            system = "" if "{context}" in self.template else sample.context

        content: list[dict[str, str]] = [{"type": "image"} for _ in sample.media]
        content.append({"type": "text", "text": user})
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content if sample.media else user})
        return self._rendered(messages)

    def _conversation(self, sample: Sample) -> str:
        if self.templates is None:
            return "".join(f"{role}: {text}\n" for role, text in sample.messages) + "assistant:"
        from jinja2 import TemplateError

        try:
            return self._rendered(
                [{"role": role, "content": text} for role, text in sample.messages]
            )
        except TemplateError as error:
            raise InputError(
                f"sample {sample.id}: the model's chat template refuses the conversation ({error}):"
                " choose another model"
            ) from error

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return str(
            self.templates.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )


def chunk_of(sample: Sample, source: str, prompt: str) -> str:
    """Return the text that the levels compare.

    Parameters
    ----------
    sample : Sample
        The sample.
    source : str
        `question`, `semantic` (GQA's program), `group`, `combined` (question and program),
        `prompt` (context and question), or any field of the record. Of a field with an object, the
        values are joined; an empty one gives the question.
    prompt : str
        The rendered prompt, which the source `prompt` gives for a sample without context.

    Raises
    ------
    ConfigError
        For a field that the sample lacks.
    """
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
        field_names = ", ".join(sorted(sample.fields)) or "none"
        raise ConfigError(
            f"--chunk-source needs the field {name!r}, but sample {sample.id} has only:"
            f" {field_names}; give one of these, or question or prompt"
        )
    if isinstance(value, Mapping):
        parts = [str(item) for item in value.values() if item]
        return " ".join(parts) if parts else sample.question

    return str(value)


def opened_dataset(settings: RunSettings) -> Dataset:
    """Open the data set of a run.

    Raises
    ------
    DatasetError
        For an unknown data set, missing files, and an image root that is no folder.
    ConfigError
        For a wrong option, and a factory that does not import or fails.
    MissingExtraError
        For a data set that needs a package which is not installed.
    """
    root = settings.cache.image_root
    if root is not None and not Path(root).expanduser().is_dir():
        raise DatasetError(f"--image-root {root!r} is no folder: give the folder of the pictures")

    options = DatasetOptions(
        path=settings.dataset_path, config=settings.dataset_config, split=settings.split,
        image_root=root, max_samples=settings.max_samples,
        seed=settings.seed, shuffle_seed=settings.shuffle_seed,
    )  # fmt: skip
    specific_options = {name: getattr(settings, name) for name in OPTIONS}
    return open_dataset(
        settings.dataset, options, specific_options, pictures=wants_pictures(settings)
    )


def read_samples(
    settings: RunSettings, beyond: int = 0, dataset: Dataset | None = None
) -> Iterator[Sample]:
    """Yield the samples of a run in its order, and up to `beyond` that come behind them.

    The errors are those of `opened_dataset`.

    Parameters
    ----------
    settings : RunSettings
        Settings of the run.
    beyond : int
        Samples beyond `max_samples`.
    dataset : Dataset, optional
        The data set of the run, if it is open.
    """
    dataset = opened_dataset(settings) if dataset is None else dataset
    selection = samples(dataset, settings.max_samples + beyond, settings.shuffle_seed)
    return (
        with_pictures(selection, image_roots(settings.cache.image_root))
        if wants_pictures(settings)
        else selection
    )


def wants_pictures(settings: RunSettings) -> bool:
    """Tell whether to load pictures: the model reads pictures, or a folder of them is given.

    Without the model itself, as for a dry run over its tokenizer, none are loaded.
    """
    if model_is_missing(settings):
        return False
    return bool(settings.cache.image_root) or takes_pictures(settings)


def repeated(samples: Sequence[Sample], times: int) -> tuple[Sample, ...]:
    """Return the samples `times` times; from the second round on with other ids."""
    return tuple(
        replace(sample, id=f"{sample.id}#{number}") if number > 1 else sample
        for number in range(1, times + 1)
        for sample in samples
    )


def with_pictures(samples: Iterable[Sample], roots: Sequence[Path]) -> Iterator[Sample]:
    """Yield each sample with its record's picture, if it is readable (see `missing`)."""
    for sample in samples:
        try:
            yield replace(sample, media=sample.media or pictures_of(sample, roots))
        except InputError:
            yield sample


def missing(samples: Iterable[Sample]) -> int:
    """Return the number of samples that name a picture and have none."""
    return sum(not sample.media and bool(image_id(sample)) for sample in samples)


def model_is_missing(settings: RunSettings) -> bool:
    """Tell whether the model can be fetched and is not: its tokenizer ships with the package."""
    return any(model.name == settings.model and model.reason for model in fetched())


def tokenizer_of(settings: RunSettings) -> Any:
    """Return the tokenizer of a run's model, without its weights.

    Raises
    ------
    ModelError
        For a model without a tokenizer that can be loaded.
    """
    return load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)
