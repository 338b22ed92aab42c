"""A call of `generate` taken apart into single prompts, and its results put together again.

Each prompt is a request. Calls that single prompts' state cannot serve go to the model as they are.
So do calls with an argument that is not named here: one of a later release, or of a model's own,
may mean anything.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeGuard

import numpy as np
import torch
from transformers.generation.streamers import BaseStreamer, TextIteratorStreamer, TextStreamer

from dejakv.engines.transformers.model_settings import setting
from dejakv.engines.transformers.prompts import PicturePrompt, spans_of
from dejakv.identity import MediumSpan
from dejakv.request import Media, Request

PROMPT_KEYS = frozenset(
    {"input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids"}
)
SERVED = PROMPT_KEYS | {
    "generation_config", "logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria",
    "streamer", "tokenizer", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "disable_compile", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "eos_token_id", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "guidance_scale", "length_penalty", "max_length", "max_new_tokens", "max_time", "min_length",
    "min_new_tokens", "min_p", "no_repeat_ngram_size", "num_beams", "num_return_sequences",
    "output_logits", "output_scores", "pad_token_id", "remove_invalid_values", "renormalize_logits",
    "repetition_penalty", "return_dict_in_generate", "sequence_bias", "stop_strings",
    "suppress_tokens", "temperature", "top_h", "top_k", "top_p", "typical_p", "use_cache",
    "watermarking_config",
}  # fmt: skip
"""Arguments under which stored state changes no result."""
_CONFIGURED = (
    # rows or layers of the whole prompt are returned, and a hit computes one row
    "output_attentions", "output_hidden_states",
    # another way to decode, or another kind of cache
    "assistant_early_exit", "cache_config", "cache_implementation", "compile_config", "constraints",
    "dola_layers", "force_words_ids", "is_assistant", "low_memory", "max_cache_len",
    "penalty_alpha", "prefill_chunk_size", "prompt_lookup_num_tokens", "token_healing", "use_mtp",
)  # fmt: skip
"""Settings with which a call goes to the model as it is."""
_OF_THE_BATCH = (
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
    "return_dict_in_generate",
    # a row that these end is written on where no end token is set
    "stop_strings",
    "max_time",
)
"""Settings that act on all rows of a batch, which run one by one here."""
_PLAIN = frozenset(
    {"do_sample", "num_beams", "max_new_tokens", "bos_token_id", "eos_token_id", "pad_token_id"}
)
"""Arguments of a plain greedy call, beside those of the prompt."""
_SEE_PADDING = (
    "bad_words_ids", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "forced_bos_token_id", "logits_processor", "max_length", "min_length", "no_repeat_ngram_size",
    "prefix_allowed_tokens_fn", "repetition_penalty", "return_dict_in_generate", "sequence_bias",
    "stop_strings", "stopping_criteria", "streamer", "watermarking_config",
)  # fmt: skip
"""Settings that see the padding of a batch, which is left out here."""


class GenerateArguments:
    """Arguments of a call of `generate`, over its generation configuration, over the model's own.

    Attributes
    ----------
    explicit : Mapping[str, Any]
        The arguments of the call.
    mask : Tensor
        The call's attention mask, or the one that transformers infers from padding tokens.
    """

    def __init__(self, arguments: Mapping[str, Any], model: Any) -> None:
        self.explicit = arguments
        self._configs = (arguments.get("generation_config"), model.generation_config)
        self._context = setting(model.config, "max_position_embeddings")

        ids, self.mask = arguments.get("input_ids"), arguments.get("attention_mask")
        # As transformers infers it: both must see the same padding.
        if self.mask is None and _are_ids(ids):
            pad = self.setting("pad_token_id")
            pad_is_distinct = pad is not None and pad not in self.ends
            self.mask = (ids != pad).long() if pad_is_distinct else torch.ones_like(ids)

    @property
    def ends(self) -> list[int]:
        """The end tokens; empty if there are none."""
        eos_setting = self.setting("eos_token_id")
        return [] if eos_setting is None else torch.as_tensor(eos_setting).reshape(-1).tolist()

    @property
    def filler(self) -> int:
        """Token id that pads shorter answers.

        The first end token, if there is any, stands in for a missing padding token and, with beams,
        for a padding token 0, as transformers does.
        """
        pad, ends = self.setting("pad_token_id"), self.ends
        if ends and (pad is None or (pad == 0 and (self.setting("num_beams") or 1) > 1)):
            return ends[0]
        return int(pad or 0)

    def setting(self, name: str) -> Any:
        """Return the value that holds for this call.

        It is None if nothing sets it, or the call sets None.
        """
        if name in self.explicit:
            return self.explicit[name]
        return next(
            (
                value
                for config in self._configs
                if (value := getattr(config, name, None)) is not None
            ),
            None,
        )

    def why_unserved(self, images: bool) -> str:
        """Return why the call must go to the model as it is; empty if single prompts can serve it.

        Parameters
        ----------
        images : bool
            Whether pictures are supported for the model.
        """
        ids, mask = self.explicit.get("input_ids"), self.mask
        if not _are_ids(ids):
            return "no token ids"
        if ids.numel() == 0:
            return "no tokens"

        for name, value in self.explicit.items():
            if name not in SERVED and value is not None and value is not False:
                return f"{name} is given"
        for name in _CONFIGURED:
            if self.setting(name):
                return f"{name} is configured"

        if self.setting("use_cache") is False:
            return "use_cache is off"
        if self.setting("guidance_scale") not in (None, 1):
            return "guidance_scale runs a second prompt"
        if "pixel_values" in self.explicit and not images:
            return "pictures for a model whose pictures are not supported"

        if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape or not _left_padded(mask):
            return "an attention mask with holes or right padding"
        # The rows run one by one, and these act on all of them.
        if ids.shape[0] > 1 and (name := next(filter(self._in_use, _OF_THE_BATCH), "")):
            return f"{name} with a batch"

        if self.padded and (name := next(filter(self._in_use, _SEE_PADDING), "")):
            return f"{name} with padding"
        return ""

    @property
    def plain_greedy(self) -> bool:
        """Whether the call decodes greedily, without code or rules of the caller's own."""
        given = {name for name, value in self.explicit.items() if value is not None}
        return (
            given <= PROMPT_KEYS | _PLAIN
            and not self.setting("do_sample")
            and (self.setting("num_beams") or 1) == 1
        )

    @property
    def padded(self) -> bool:
        """Whether a prompt is shorter than the batch."""
        return not bool((self.mask == 1).all())

    def _in_use(self, name: str) -> bool:
        value = self.setting(name)
        if name == "max_length" and self.setting("max_new_tokens") is not None:
            return False
        # The default: 20 new tokens, as far as the context goes.
        if name == "max_length" and value is None:
            return (
                self._context is not None
                and self.explicit["input_ids"].shape[1] + 20 > self._context
            )
        return bool(value) and not (name.endswith("penalty") and value == 1)


def _are_ids(value: Any) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 2
        and value.dtype in (torch.int32, torch.int64)
    )


def _left_padded(mask: torch.Tensor) -> bool:
    plain = ((mask == 0) | (mask == 1)).all()
    return bool(plain and (mask[:, -1] == 1).all() and (mask[:, 1:] >= mask[:, :-1]).all())


Pictures = tuple[tuple[Media, PicturePrompt, Mapping[str, torch.Tensor]], ...]
"""A prompt's pictures: pixels as media, their description for the prompt, and the tower's inputs.
"""


@dataclass(frozen=True)
class GenerateCall(Request):
    """One prompt of a call of `generate`, as token ids, with the call's arguments and pixels.

    Attributes
    ----------
    token_ids : tuple[int, ...]
        Tokens without padding.
    spans : tuple[MediumSpan, ...]
        Places of the pictures.
    pictures : Pictures
        The pictures.
    arguments : Mapping[str, Any]
        Arguments of the call without those that carry the prompts.
    """

    token_ids: tuple[int, ...] = ()
    spans: tuple[MediumSpan, ...] = ()
    pictures: Pictures = ()
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """Check nothing: transformers made all of it."""

    @property
    def runs_code(self) -> bool:
        """Whether code of the caller's runs between two tokens; transformers' streamers do not."""
        codes = ("logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria")
        streams = (type(None), TextStreamer, TextIteratorStreamer)
        return any(map(self.arguments.get, codes)) or (
            type(self.arguments.get("streamer")) not in streams
        )

    def options_for(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the arguments for a run of these tokens.

        A caller's streamer sees its own prompt, also where a donor's runs in its place.
        """
        options = dict(self.arguments)
        if options.get("streamer") is not None and tuple(token_ids) != self.token_ids:
            options["streamer"] = _OwnPromptFirst(options["streamer"], self.token_ids)
        return options

    def output(self, output: Any, ran: int) -> Any:
        """Return the result of `generate` with this prompt's tokens in place of those that ran.

        Parameters
        ----------
        output : Tensor or ModelOutput
            Result of `generate`.
        ran : int
            Prompt tokens at the beginning of its sequences.
        """
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        prompt_ids = torch.tensor([self.token_ids], device=sequences.device).expand(
            sequences.shape[0], -1
        )
        sequences = torch.cat([prompt_ids, sequences[:, ran:]], dim=1)

        if isinstance(output, torch.Tensor):
            return sequences
        output.sequences = sequences
        return output


class _OwnPromptFirst(BaseStreamer):
    """Shows a caller's streamer its own prompt in place of the donor's that runs."""

    def __init__(self, streamer: BaseStreamer, prompt: tuple[int, ...]) -> None:
        self._streamer = streamer
        self._prompt: torch.Tensor | None = torch.tensor([prompt])

    def put(self, value: torch.Tensor) -> None:
        """Pass tokens on; the first ones are the prompt."""
        prompt, self._prompt = self._prompt, None
        self._streamer.put(value if prompt is None else prompt)

    def end(self) -> None:
        """Pass the end on."""
        self._streamer.end()


def prompts_of(
    call: GenerateArguments,
    tokenizer: Any,
    image_token: int | None,
    partition: str,
    numbers: Iterator[int],
) -> Iterator[GenerateCall]:
    """Yield each prompt of a call as a request; see `TransformersEngine.requests_of`."""
    options = {name: value for name, value in call.explicit.items() if name not in PROMPT_KEYS}
    prompts = split_prompts({**call.explicit, "attention_mask": call.mask}, image_token)
    # Not strict: `numbers` may go on for ever.
    for (ids, pictures), number in zip(prompts, numbers, strict=False):
        media = tuple(item for item, _, _ in pictures)
        digests = [item.digest for item in media]
        spans = spans_of(ids, image_token, [picture for _, picture, _ in pictures], digests)
        text, name = tokenizer.decode(ids, skip_special_tokens=True), f"generate-{number}"
        prompt = {"token_ids": ids, "spans": spans, "pictures": pictures}
        yield GenerateCall(name, text, text, media, partition, **prompt, arguments=options)


def split_prompts(
    arguments: Mapping[str, Any], image_token: int | None
) -> list[tuple[tuple[int, ...], Pictures]]:
    """Return the single prompts of a call: tokens without padding, and pictures.

    Raises
    ------
    ValueError
        Pixels and image tokens do not fit.
    """
    masked_rows = zip(arguments["input_ids"], arguments["attention_mask"], strict=True)
    prompts = [tuple(row[row_mask.bool()].tolist()) for row, row_mask in masked_rows]
    pixels = arguments.get("pixel_values")
    if pixels is None:
        return [(prompt, ()) for prompt in prompts]

    grids = arguments.get("image_grid_thw")
    runs = [_runs(prompt, image_token) for prompt in prompts]
    total = sum(sum(lengths) for lengths in runs)
    parts = (
        _by_grid(pixels, grids, total)
        if grids is not None
        else _by_tiles(pixels, [n for r in runs for n in r])
    )

    rows: list[tuple[tuple[int, ...], Pictures]] = []
    for prompt, lengths in zip(prompts, runs, strict=True):
        missing_rows, prompt_pictures = sum(lengths), list[Any]()
        while missing_rows > 0:
            if not parts or parts[0][0].rows > missing_rows:
                raise ValueError("pixel_values do not fit the image tokens")
            picture, pixels = parts.pop(0)
            missing_rows -= picture.rows
            # The caller may write into its batch.
            pixels_copy = {name: part.clone() for name, part in pixels.items()}
            prompt_pictures.append((Media(_bytes_of(pixels), name="pixels"), picture, pixels_copy))
        rows.append((prompt, tuple(prompt_pictures)))

    if parts:
        raise ValueError("pixel_values hold more pictures than the prompts")
    return rows


def joined(
    rows: Sequence[torch.Tensor], ids: torch.Tensor, lengths: Sequence[int], padding: int
) -> torch.Tensor:
    """Return results of single prompts as one batch.

    The padded prompts come first, as they were, then the new tokens, padded at the end.

    Parameters
    ----------
    rows : Sequence[Tensor], each of shape [sequences, prompt + new]
        Results, one for each prompt.
    ids : Tensor, shape [prompts, longest prompt]
        The padded prompts.
    lengths : Sequence[int]
        Tokens of each prompt without padding.
    padding : int
        Token behind a shorter answer.
    """
    longest = max(row.shape[1] - length for row, length in zip(rows, lengths, strict=True))

    out: list[torch.Tensor] = []
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        new = torch.nn.functional.pad(
            row[:, length:], (0, longest - (row.shape[1] - length)), value=padding
        )
        out.append(torch.cat([ids[index].to(new.device).expand(row.shape[0], -1), new], dim=1))
    return torch.cat(out)


def _runs(prompt: Sequence[int], image_token: int | None) -> list[int]:
    """Return the lengths of the unbroken runs of image tokens."""
    return [len(list(run)) for token, run in groupby(prompt) if token == image_token]


def _by_grid(
    pixels: torch.Tensor, grids: torch.Tensor, total: int
) -> list[tuple[PicturePrompt, dict[str, torch.Tensor]]]:
    """Divide one list of patches into pictures of many sizes, by their grids (Qwen-VL)."""
    sizes = grids.prod(-1).tolist()
    # The tower merges so many patches into one token.
    merged = sum(sizes) // total if total else 0
    if not merged or sum(sizes) != pixels.shape[0] or merged * total != sum(sizes):
        raise ValueError("pixel_values do not fit image_grid_thw and the image tokens")

    cut = torch.split(pixels, sizes)
    shapes = [(int(grid[0]), int(grid[1]), int(grid[2])) for grid in grids]
    return [
        (
            PicturePrompt(size // merged, grid=shape),
            {"pixel_values": part, "image_grid_thw": grids[index : index + 1]},
        )
        for index, (size, shape, part) in enumerate(zip(sizes, shapes, cut, strict=True))
    ]


def _by_tiles(
    pixels: torch.Tensor, runs: Sequence[int]
) -> list[tuple[PicturePrompt, dict[str, torch.Tensor]]]:
    """Divide equal tiles into pictures (LLaVA, InternVL).

    Tiles without text between them are one picture.
    """
    tiles, total = pixels.shape[0], sum(runs)
    rows = total // tiles if tiles else 0
    if not rows or rows * tiles != total or any(run % rows for run in runs):
        raise ValueError("pixel_values do not fit the image tokens")
    cut = torch.split(pixels, [run // rows for run in runs])
    return [
        (PicturePrompt(run), {"pixel_values": part}) for run, part in zip(runs, cut, strict=True)
    ]


def _bytes_of(inputs: Mapping[str, torch.Tensor]) -> bytes:
    """Identify a picture by its pixels as the processor made them, with shape and dtype."""
    parts: list[bytes] = []
    for name in sorted(inputs):
        tensor = inputs[name].detach().cpu().contiguous()
        parts.append(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        parts.append(np.asarray(tensor.view(torch.uint8)).tobytes())
    return b"".join(parts)
