"""Adopting: a similar earlier prompt runs in a request's place, and its prefix is cached.

Nothing is injected, so nothing can be poisoned. The answer is the answer to the donor's prompt,
and the provenance says so. `PromptAdopter` finds and judges donors; `middleware` rewrites prompts
for an OpenAI server.
"""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.decide.plan import Decision, ReuseRequest
from dejakv.engines.base import NO_STATE, Completion, Prepared
from dejakv.errors import ConfigError, ModelError
from dejakv.records import shorten_reason
from dejakv.request import Request, Retention, retention_scope
from dejakv.store.open import open_store
from dejakv.vectors.base import normalized

log = logging.getLogger("dejakv.adopt")


@dataclass(frozen=True)
class AdoptRequest:
    """Varying and fixed parts of a request.

    Attributes
    ----------
    partition : str
        The client's partition.
    text : str
        The part that varies (the last user message, or the prompt).
    context : str
        Digest of everything else that shapes the prompt: earlier messages, media by content, model,
        tools.
    threshold : float, optional
        Least similarity of a donor; None: that of the settings.
    donor : str, optional
        The only donor that may be taken.
    no_store : bool
        Whether the prompt must not be remembered.
    """

    partition: str
    text: str
    context: str
    threshold: float | None = None
    donor: str | None = None
    no_store: bool = False


@dataclass(frozen=True)
class AdoptRecord:
    """Origin of an answer, for the client.

    Attributes
    ----------
    method : {"adopt", "none"}
        How the answer came about.
    level : str
        Level that found the donor.
    donor : str, optional
        Id of the donor.
    score : float, optional
        Cosine of the donor's text, 1 for equal text.
    reason : str
        Why nothing was adopted.
    decision : Decision, optional
        Decision of the cache, for `PromptAdopter.learn`.
    """

    method: str = "none"
    level: str = ""
    donor: str | None = None
    score: float | None = None
    reason: str = ""
    decision: Decision | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", shorten_reason(self.reason))


class PromptAdopter:
    """Earlier prompts, found by meaning, without state. Thread-safe.

    Prompts of another context, media or partition never meet.

    Parameters
    ----------
    config : SemanticCacheConfig, optional
        similarity_threshold, index_encoder, lexical_guard, chunk_window... as for the other
        engines.
    max_donors : int
        Prompts remembered; the least recently used goes first.
    embeddings : Any
        Object with `embed_text` (`InputEmbeddings`), if `index_encoder` is `model`.

    Raises
    ------
    ConfigError
        For `max_donors` below 1, and for an error bound without a certificate, since an adopter
        makes no audits.
    MissingExtraError, ModelError
        If the encoder is not installed or cannot be loaded.
    """

    def __init__(
        self,
        config: SemanticCacheConfig | None = None,
        max_donors: int = 10_000,
        embeddings: Any = None,
    ) -> None:
        if max_donors < 1:
            raise ConfigError(f"max_donors={max_donors}: give 1 or more")

        self.config = config or SemanticCacheConfig(reuse="adopt")
        if self.config.labels_online:
            raise ConfigError(
                f"error_bound={self.config.error_bound} needs audits, and an adopter sends none: "
                "use `dejakv serve` or `dejakv run`, or "
                "leave error_bound out"
            )

        # No state is stored, so that there is no prefix to find and no gain to weigh.
        prompts_alone = replace(
            self.config, reuse="adopt", exact_prefix=False, copied_text=False, min_gain=0
        )
        self._store = open_store(max_entries=max_donors)
        self._cache = build_cache(prompts_alone, embeddings, store=self._store, background=False)

    def find(self, adopt_request: AdoptRequest) -> tuple[str, AdoptRecord]:
        """Return the text to run, and why. An error is not raised: it is a miss with its reason."""
        try:
            with retention_scope(Retention(adopt_request.no_store)):
                return self._find(adopt_request)
        except Exception as error:
            log.debug("a lookup failed", exc_info=True)
            return adopt_request.text, AdoptRecord(
                reason=f"the lookup failed: {type(error).__name__}"
            )

    def learn(self, adopt_request: AdoptRequest, provenance: AdoptRecord) -> None:
        """Make the prompt a donor after its answer, unless another prompt ran in its place."""
        decision = provenance.decision
        if decision is None or not adopt_request.text.strip():
            return
        # The engine's server has the answer and the state; the cache needs the prompt alone.
        ran = Completion("", (), decision.tokens, 0, capture=lambda: NO_STATE)
        self._cache.keep(_prepared(adopt_request), decision, decision.plan, ran)

    def __len__(self) -> int:
        return self._store.stats().entries

    def _find(self, adopt_request: AdoptRequest) -> tuple[str, AdoptRecord]:
        ask = ReuseRequest(
            "adopt",
            adopt_request.threshold,
            (adopt_request.donor,) if adopt_request.donor is not None else (),
            adopt_request.no_store,
        )
        decision = self._cache.find(_prepared(adopt_request), ask)
        chosen = decision.plan
        if chosen.method == "adopt" and chosen.match is not None:
            donor = chosen.donors[0]
            # No state is read, which is what counts as a use otherwise.
            self._store.touch(donor.id)
            return donor.prompt, AdoptRecord(
                "adopt", chosen.match.level, donor.id, chosen.match.score, "", decision
            )

        same = (
            "this very prompt ran before: vLLM's prefix cache has it"
            if chosen.method == "exact"
            else ""
        )
        return adopt_request.text, AdoptRecord(reason=same or chosen.reason, decision=decision)


def _prepared(adopt_request: AdoptRequest) -> Prepared:
    request = Request(
        "",
        adopt_request.text,
        adopt_request.text,
        partition=adopt_request.partition,
        no_store=adopt_request.no_store,
    )
    # Characters as tokens: there is no tokenizer here, and equal texts have equal ones.
    return Prepared(request, tuple(map(ord, adopt_request.text)), epoch=adopt_request.context)


class InputEmbeddings:
    """Mean of the served model's input embeddings, for a process without the model.

    The table (vocabulary x hidden, float32) is read from the weight files when the object is made,
    because a first request that waits for it would miss.

    Parameters
    ----------
    folder : Path
        Folder of the model's safetensors files.
    tokenizer : Any
        The model's tokenizer.
    epoch : str
        Name of the table, for vectors that are kept.

    Raises
    ------
    ModelError
        If the folder's weight files hold no input embeddings.
    """

    def __init__(self, folder: Path, tokenizer: Any, epoch: str) -> None:
        self.folder = folder
        self.epoch = epoch
        self._tokenizer = tokenizer
        self._table = self._read()

    def embed_text(self, text: str) -> NDArray[np.float32]:
        """Return the mean of a text's token embeddings, `[hidden]` float32 of length 1.

        A text without tokens gives zeros.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            return np.zeros(self._table.shape[1], dtype=np.float32)
        return normalized(self._table[ids].mean(axis=0))

    def _read(self) -> NDArray[np.float32]:
        from safetensors import safe_open

        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name.endswith("embed_tokens.weight"):
                        return file.get_tensor(name).float().numpy()

        raise ModelError(
            f"no input embeddings (*embed_tokens.weight) in {self.folder}: set index_encoder to a "
            "sentence-transformers model"
        )
