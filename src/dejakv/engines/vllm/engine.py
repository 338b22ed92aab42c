# pyright: reportMissingImports=false
"""The engine on vLLM's offline `LLM`, in this process: `dejakv run --engine vllm`.

Reuse is vLLM's and the connector's own affair: a request that is to start from stored state is simply asked, and vLLM's prefix
cache or `DejaKVConnector` has the state. So `adopt` runs the donor's own prompt, and nothing is injected; a `blend` names its donors to
the connector, as a client of a server may, and the connector says what came of it. Prefix caching is on
in the arms `prefix` and `cache`, the connectors in `cache` alone; each arm has a `cache_salt` of its own, so no arm profits from
another.
"""

import copy
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from dejakv.engines.base import Accept, Completion, Prepared, Start
from dejakv.engines.vllm import compat, named
from dejakv.engines.vllm.continued import continued, repeated, what_to_repeat
from dejakv.engines.vllm.keys import partition_of
from dejakv.engines.vllm.model_embeddings import ModelEmbeddings
from dejakv.engines.vllm.offline import Offline, OnToken, asked, start
from dejakv.engines.vllm.prompts import collapsed, spans_of
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.errors import InputError
from dejakv.pictures import decoded
from dejakv.request import Media, Request, Sampling
from dejakv.reuse.blend import BlendConfig, BlendReport
from dejakv.store.base import Chunk, Tensor


class VLLMEngine(ModelEmbeddings):
    """Serves one model with vLLM, one request at a time (a lock keeps others waiting).

    Made by `from_pretrained`; `close` ends it.
    """

    name = "vllm"
    tells_first_token = False

    def __init__(self, shared: Offline, arm: str = "cache") -> None:
        self._shared = shared
        self.arm = self._own = arm
        self._salts: set[str] = set()
        self.epoch = shared.epoch

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        settings: ConnectorSettings | None = None,
        **options: Any,
    ) -> "VLLMEngine":
        """Loads a bundled name, a folder or a hub id. `options` go to `vllm.LLM` (max_model_len, block_size, ...).

        The connector's store is a temporary folder unless `settings.store_dir` names one.
        Raises: MissingExtraError without vLLM; ConfigError for a vLLM or a setting that is not supported; ModelError.
        """
        return cls(start(model, dtype, trust_remote_code, settings or ConnectorSettings(), options))

    @property
    def most_donors(self) -> int:
        """Of how many prompts a blend takes state at most."""
        return self._shared.settings.blend_donors

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return int(self._shared.llm.llm_engine.vllm_config.model_config.max_model_len)

    def for_arm(self, arm: str, name: str = "") -> "VLLMEngine":
        """The same model for one arm of a comparison, with nothing shared between arms but the weights. `name` tells apart
        arms of one kind."""
        other = copy.copy(self)
        other.arm, other._own, other._salts = arm, name or arm, set()
        return other

    def apart(self, kept: int) -> "VLLMEngine":
        """See `engines.base.RunsApart`."""
        from dejakv.engines.vllm.apart import Apart

        return Apart(self, kept)

    def prepare(self, request: Request) -> Prepared:
        """Token ids with media expanded, and where the media stand.

        Raises: InputError for an empty or over-long prompt, an unreadable picture, or placeholders that do not match.
        """
        if not request.prompt.strip():
            raise InputError("the prompt is empty: give a question")
        for medium in request.media:
            self._shared.media[medium.digest] = medium
        with self._shared.lock:
            rendered = self._render({"prompt": request.prompt}, request.media)
        ids = tuple(rendered["prompt_token_ids"])
        self._check_length(len(ids))
        return Prepared(request, ids, spans_of(rendered, request.media), rendered)

    def run(
        self,
        prepared: Prepared,
        *,
        start: Start | None = None,
        sampling: Sampling | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        """Answers. `start` need not be put in: vLLM or the connector hold the state of what was asked before, and
        `computed_tokens` says what they did not. Raises: InputError."""
        cached = self.arm == "cache"
        wish = {"mode": "exact" if cached else "off", "no_store": not cached}
        with self._shared.lock:
            return self._run(prepared, wish, sampling, on_token)

    def blend(
        self,
        prepared: Prepared,
        donors: Sequence[Chunk],
        config: BlendConfig,
        *,
        sampling: Sampling | None = None,
        on_token: OnToken | None = None,
        accept: Accept | None = None,
    ) -> Completion | BlendReport:
        """Answers from the donors' state, which the connector blends as `config` says, whatever it was started with. `accept` is not
        asked: vLLM runs the whole request.

        `details["blend"]` is a `BlendReport`. What the connector finds that it cannot blend, it runs exactly, and says why.
        A report alone is of a prompt that was not run at all.

        Raises: InputError.
        """
        if self.arm != "cache":
            return BlendReport(len(prepared.token_ids), reason=f"the arm {self.arm} reuses nothing of the connector's")
        why = named.why_not(prepared, donors, self._shared.settings, self.epoch, config)
        if why:
            return BlendReport(len(prepared.token_ids), reason=why)
        metas = [donor.meta for donor in donors[: self.most_donors]]
        asked = named.FromDonors(prepared, metas, self._donors_salt(prepared), self.epoch, self._shared.kept)
        with self._shared.lock:
            return asked.completed(self._run(prepared, asked.wish, sampling, on_token, config))

    def _run(
        self,
        prepared: Prepared,
        wish: dict[str, Any],
        sampling: Sampling | None,
        on_token: OnToken | None,
        blending: BlendConfig | None = None,
    ) -> Completion:
        sampling = sampling or prepared.request.sampling
        if sampling.num_beams != 1:
            raise InputError("beam search is not part of vLLM's engine: use --engine transformers, or one beam")
        began = time.perf_counter()
        rendered = dict(prepared.inputs or self._donor(prepared))
        rendered["cache_salt"] = self._salt(prepared)
        count = len(prepared.token_ids)
        self._check_length(count)
        trace = self._trace()
        limit = max(1, min(sampling.max_new_tokens, self.context - count))
        choice = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
        if sampling.stop:
            choice |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        params = self._params(wish, trace, max_tokens=limit, **choice)
        encoded = self._encoder_runs()
        named.blend_as(blending)
        ran = asked(self._shared.llm.llm_engine, str(next(self._shared.numbers)), rendered, params, began, on_token)
        latency = time.perf_counter() - began
        answer, told = ran.output.outputs[0], (ran.output.kv_transfer_params or {}).get("dejakv") or {}
        if self.arm == "cache":
            compat.settle(self._shared.llm)  # the copy of its state, or of parts of it, may be the next steps'
        tokens = tuple(int(token) for token in answer.token_ids)
        return Completion(
            text=answer.text.strip(),
            token_ids=tokens,
            prompt_tokens=count,
            computed_tokens=count - int(ran.output.num_cached_tokens or 0) + int(told.get("tokens_recomputed", 0)),
            encoder_runs=self._encoder_runs() - encoded,
            ttft_s=ran.first if ran.first is not None else latency,
            latency_s=latency,
            inject_s=float(told.get("load_s", 0.0)),
            bytes_loaded=int(told.get("bytes_loaded", 0)),
            capture=lambda: self._capture(told),
            continued=continued(trace, tokens, partial(self._repeat, rendered, told, blending=blending)),
            details={"vllm": told},
        )

    def _repeat(
        self,
        rendered: dict[str, Any],
        told: dict[str, Any],
        tokens: tuple[int, ...],
        blending: BlendConfig | None = None,
    ) -> Any:
        """The trace of a request run again along given tokens, from the state that it had; None where it had another."""
        count = len(rendered["prompt_token_ids"])
        if count + len(tokens) > self.context:
            return None
        trace = self._trace(tokens)
        params = self._params({"mode": "off"}, trace, max_tokens=len(tokens), temperature=0.0, ignore_eos=True)
        side = compat.scheduler_of(self._shared.llm).connector.scheduler_side
        with self._shared.lock:
            named.blend_as(blending)  # other requests may have been blended in other ways since
            side.repeating = what_to_repeat(told, count)
            try:
                ran = asked(self._shared.llm.llm_engine, str(next(self._shared.numbers)), rendered, params)
            finally:
                side.repeating = None
        again = (ran.output.kv_transfer_params or {}).get("dejakv") or {}
        return trace if repeated(told, again) else None

    def _trace(self, tokens: tuple[int, ...] = ()) -> Any:
        """What takes in the logits of a request's answer, None where they cannot be seen."""
        if not self._shared.traced:
            return None
        from dejakv.engines.vllm.traces import Trace

        return Trace(tokens)

    def _params(self, wish: dict[str, Any], trace: Any, **choice: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            skip_reading_prefix_cache=True if self.arm == "none" else None,
            extra_args={
                "kv_transfer_params": {"dejakv": wish},
                "ec_transfer_params": {"dejakv": {"mode": "on" if self.arm == "cache" else "off"}},
                **(trace.extra_args if trace is not None else {}),
            },
            **choice,
        )

    def _salt(self, prepared: Prepared) -> str:
        """What keeps arms and partitions apart; in `none` each request is alone."""
        if self.arm == "none":
            return f"{self._own}-{next(self._shared.numbers)}:{prepared.request.partition}"
        salt = f"{self._own}:{prepared.request.partition}"
        self._salts.add(salt)
        return salt

    def _donors_salt(self, prepared: Prepared) -> str:
        """What donors were stored under."""
        return self._salt(prepared)

    def close(self) -> None:
        """Ends vLLM and removes the temporary store. Another engine may be made in this process then."""
        self._shared.close()

    def _render(self, prompt: dict[str, Any], media: tuple[Media, ...]) -> Any:
        if media:
            pictures = [decoded(item) for item in media]
            prompt = {**prompt, "multi_modal_data": {"image": pictures}}
            # By content, and apart for each arm; in `none` for each request, so that nothing is shared at all.
            mark = f"{self.arm}-{next(self._shared.numbers)}" if self.arm == "none" else self._own
            prompt["multi_modal_uuids"] = {"image": [f"{mark}-{item.digest}" for item in media]}
        try:
            return compat.render(self._shared.llm, prompt)
        except ValueError as error:
            raise InputError(f"vLLM cannot prepare this prompt: {error}") from error

    def _donor(self, prepared: Prepared) -> Any:
        """A donor's prompt from its token ids: its media are those that were seen under its spans' digests."""
        if not prepared.spans:
            return self._render({"prompt_token_ids": list(prepared.token_ids)}, ())
        media = tuple(self._shared.media.get(span.digest) for span in prepared.spans)
        known = tuple(item for item in media if item is not None)
        if len(known) < len(media):
            raise InputError("the donor's picture is not at hand any more: ask without reuse")
        return self._render({"prompt_token_ids": collapsed(prepared.token_ids, prepared.spans)}, known)

    def state_bytes(self) -> int:
        """Bytes of the state that the connector stored for this arm."""
        store = named.worker_side().store
        return sum(store.stats(partition_of(salt)).bytes for salt in self._salts)

    def _capture(self, told: dict[str, Any]) -> Tensor | None:
        """Says that the connector has stored this prompt's state, once it has. What is approximate is nobody's to keep."""
        key = "" if self.arm != "cache" or told.get("approximate") else told.get("prompt_key", "")
        return named.stored(key) if key else None

    def _encoder_runs(self) -> int:
        from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer

        return int(get_ec_transfer().encoded) if has_ec_transfer() else 0

    def _check_length(self, count: int) -> None:
        if count >= self.context:
            raise InputError(
                f"the prompt has {count} tokens, the model takes {self.context} with the answer: shorten it"
            )
