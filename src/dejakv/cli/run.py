"""`dejakv run`: ask many questions with and without the cache, and report what that saved and changed."""

from functools import partial
from typing import Annotated, Any

import typer

from dejakv.cli import keep_options as keep
from dejakv.cli import reuse_options as options
from dejakv.config import SemanticCacheConfig
from dejakv.experiments.settings import RunSettings, settings_from
from dejakv.presets import default_for, names

Text = str | None
Number = int | None

_model = partial(typer.Option, rich_help_panel="Model")
_data = partial(typer.Option, rich_help_panel="Data set")
_reuse = partial(typer.Option, rich_help_panel="Reuse")
_levels = partial(typer.Option, rich_help_panel="Finding a donor")
_cache = partial(typer.Option, rich_help_panel="Storage")
_run = partial(typer.Option, rich_help_panel="Run")
_output = partial(typer.Option, rich_help_panel="Output")


def run_command(
    preset: Annotated[
        Text,
        typer.Option(
            help=f"Named settings: they replace the defaults below, and the other options override them: {', '.join(names())}. "
            "Without --preset and --model: the preset named like --dataset, or shapes."
        ),
    ] = None,
    model: Annotated[
        Text,
        _model(help=f"Name from `dejakv models`, local folder, .gguf file or hub id (default: {RunSettings.model})."),
    ] = None,
    engine: Annotated[Text, _model(help=f"transformers or vllm (default: {RunSettings.engine}).")] = None,
    dtype: Annotated[Text, _model(help=f"auto, fp32, bf16 or fp16 (default: {RunSettings.dtype}).")] = None,
    device: Annotated[Text, _model(help=f"auto, cpu, cuda or cuda:N (default: {RunSettings.device}).")] = None,
    attn: Annotated[
        Text, _model(help=f"Attention implementation: sdpa or eager (default: {RunSettings.attn}).")
    ] = None,
    trust_remote_code: Annotated[
        bool | None, _model("--trust-remote-code", help="Run Python code from the model's repository.")
    ] = None,
    dataset: Annotated[
        Text,
        _data(
            help="shapes, docs, repo, rag, sessions, gqa, jsonl, folder or package.module:factory. The last four need "
            "--model or --cache-mode dry-run (default: the one of the model's preset, else shapes)."
        ),
    ] = None,
    dataset_path: Annotated[
        Text, _data(help="File or folder to read; for repo, the name of an installed package or a folder.")
    ] = None,
    dataset_config: Annotated[Text, _data(help="gqa: configuration on the hub.")] = None,
    split: Annotated[Text, _data(help="gqa: split on the hub (default: val).")] = None,
    image_root: Annotated[
        Text,
        _data(
            help="Folder of the pictures, for the model and the hook (default: SEMANTIC_CACHE_IMAGE_ROOT, GQA_IMAGE_ROOT or "
            "LLAVA_IMAGE_ROOT)."
        ),
    ] = None,
    passages: Annotated[Number, _data(help="rag: passages in a prompt (default: 8).")] = None,
    order: Annotated[
        Text,
        _data(
            help="rag: order of passages: score, document, shuffled, or free (by score, and the cache may arrange them) "
            "(default: score)."
        ),
    ] = None,
    window: Annotated[Number, _data(help="sessions: history messages kept; 0: all.")] = None,
    compact_tools: Annotated[
        Number, _data(help="sessions: tool results kept whole, older ones become one line (default: all).")
    ] = None,
    max_samples: Annotated[Number, _data(help=f"Samples to run (default: {RunSettings.max_samples}).")] = None,
    shuffle_seed: Annotated[Number, _data(help="Shuffle the samples with this seed (default: not shuffled).")] = None,
    prompt_template: Annotated[Text, _data(help="Prompt text with {question} and {context}.")] = None,
    raw_prompts: Annotated[
        bool,
        _data(
            "--raw-prompts",
            help="jsonl: send the field 'prompt' of a line as it stands, without a chat template.",
        ),
    ] = False,
    chunk_source: Annotated[
        Text,
        _data(
            help="Text that is compared to find a donor: question, semantic, group, combined, prompt or a field of the "
            f"sample (default: {RunSettings.chunk_source})."
        ),
    ] = None,
    reuse: Annotated[
        Text,
        _reuse(
            help="exact (same answer: docs/exactness.md), adopt (answer the donor's prompt), blend (mix donor state with recomputed rows) or top_layer (take "
            "the top layer's state, in a layer-condensed model such as docs-lckv) "
            f"(default: {SemanticCacheConfig.reuse}; adopt if a threshold, a latent layer or a chunk source asks for similar prompts)."
        ),
    ] = None,
    unsound: Annotated[
        bool,
        _reuse(
            "--unsound",
            help="top_layer with an ordinary model, for study: every answer that comes of it is labelled as unsound.",
        ),
    ] = False,
    media: Annotated[
        Text,
        _reuse(
            help="Donors with other pictures: exact (never), similar (the vision layer decides) or ignore (allowed) "
            f"(default: {SemanticCacheConfig.media})."
        ),
    ] = None,
    min_gain: Annotated[
        Number,
        _reuse(
            help=f"Fewest tokens an approximate plan must save beyond the exact prefix; adopt: of the whole prompt (default: {SemanticCacheConfig.min_gain})."
        ),
    ] = None,
    costs: options.Costs = None,
    disable_lexical_guard: Annotated[
        bool, _reuse("--disable-lexical-guard", help="Accept donors whose words, numbers or polarity differ.")
    ] = False,
    cross_encoder: options.CrossEncoder = None,
    paraphrase_threshold: options.ParaphraseThreshold = None,
    similarity_threshold: Annotated[
        float | None,
        _levels(
            help=f"Lowest cosine accepted by the semantic text level, from -1 to 1 (default: {SemanticCacheConfig.similarity_threshold})."
        ),
    ] = None,
    chunk_window: Annotated[
        Number, _levels(help=f"Characters of the chunk to embed; 0: all (default: {SemanticCacheConfig.chunk_window}).")
    ] = None,
    index_encoder: options.IndexEncoder = None,
    encoder_threads: options.EncoderThreads = None,
    image_encoder: options.ImageEncoder = None,
    index: Annotated[Text, _levels(help=f"flat, hnsw or lsh (default: {SemanticCacheConfig.index}).")] = None,
    embedding_layer: Annotated[list[str] | None, _levels(help="Latent layer NAME:DIM[:THRESH]; repeatable.")] = None,
    embedding_hook: Annotated[
        Text,
        _levels(help="Source of the layers' vectors: none, prompt, vision, prompt_vision or package.module:factory."),
    ] = None,
    embedding_match: Annotated[
        Text,
        _levels(help=f"How layers are combined: all, any or mean (default: {SemanticCacheConfig.embedding_match})."),
    ] = None,
    level: Annotated[list[str] | None, _levels(help="Additional level, package.module:factory; repeatable.")] = None,
    disable_prefix_cache: Annotated[
        bool, _levels("--disable-prefix-cache", help="Do not look for exact token prefixes.")
    ] = False,
    disable_exact_cache: Annotated[
        bool, _levels("--disable-exact-cache", help="Switch the exact text level off.")
    ] = False,
    disable_semantic_cache: Annotated[
        bool, _levels("--disable-semantic-cache", help="Switch the semantic text level off.")
    ] = False,
    disable_copied_text: Annotated[
        bool,
        _levels("--disable-copied-text", help="Blend without looking for copied runs of tokens in stored prompts."),
    ] = False,
    blend_quality: options.BlendQuality = None,
    blend_map: options.BlendMap = None,
    blend_selector: options.BlendSelector = None,
    max_generation: Annotated[
        Number,
        _reuse(
            help=f"Rows that a blend computed serve later blends: how often approximate state may have gone into them; 0: they are not kept (default: {SemanticCacheConfig.max_generation})."
        ),
    ] = None,
    blend_share: options.BlendShare = None,
    error_bound: options.ErrorBound = None,
    confidence: options.Confidence = None,
    explore_share: options.ExploreShare = None,
    audit_share: options.AuditShare = None,
    differs: options.Differs = None,
    trust_groups: options.TrustGroups = None,
    prune: options.Prune = None,
    cache_dir: Annotated[Text, _cache(help="Folder that keeps the cache; without it every run starts empty.")] = None,
    max_bytes: Annotated[
        Number, _cache(help=f"Largest size of the store, in bytes (default: {SemanticCacheConfig.max_bytes}).")
    ] = None,
    max_cached_blocks: Annotated[Number, _cache(help="Largest number of chunks in the store; 0: no limit.")] = None,
    policy: Annotated[
        Text, _cache(help=f"Eviction policy: lru or lfu (default: {SemanticCacheConfig.policy}).")
    ] = None,
    min_tokens: Annotated[
        Number, _cache(help=f"Do not store prompts shorter than this (default: {SemanticCacheConfig.min_tokens}).")
    ] = None,
    second_sight: Annotated[
        bool | None, _cache("--second-sight", help="Store a prompt only when it comes the second time.")
    ] = None,
    max_write_rate: Annotated[
        Number,
        _cache(
            help=f"Bytes a second the store may write; 0: no limit (default: {SemanticCacheConfig.max_write_rate})."
        ),
    ] = None,
    ttl: keep.Ttl = None,
    ttl_prompts: keep.TtlPrompts = None,
    ttl_rows: keep.TtlRows = None,
    ttl_encoder: keep.TtlEncoder = None,
    quotas: keep.Quotas = None,
    partitions: keep.Partitions = None,
    enable_fusion_cache: Annotated[
        bool, _cache("--enable-fusion-cache", help="Keep encoder outputs, by the pictures' content.")
    ] = False,
    fusion_provider: Annotated[
        Text,
        _cache(
            help="Reader and writer of the model's own fusion modules, package.module:factory; implies --enable-fusion-cache."
        ),
    ] = None,
    fusion_cache_dir: Annotated[
        Text, _cache(help="Folder that keeps encoder outputs; implies --enable-fusion-cache.")
    ] = None,
    cache_mode: Annotated[
        Text,
        _run(
            help=f"live, dry-run (no decoding), shares (only the tokenizer) or off (default: {RunSettings.cache_mode})."
        ),
    ] = None,
    arms: Annotated[
        Text, _run(help="Arms to compare, of none (nothing reused), prefix (prefix caching), cache (default: all).")
    ] = None,
    max_new_tokens: Annotated[
        Number, _run(help=f"Longest answer, in tokens (default: {RunSettings.max_new_tokens}).")
    ] = None,
    temperature: Annotated[
        float | None, _run(help=f"Sampling temperature; 0: greedy (default: {RunSettings.temperature}).")
    ] = None,
    seed: Annotated[Number, _run(help=f"Seed of the data set and of sampling (default: {RunSettings.seed}).")] = None,
    seeds: Annotated[
        Number, _run(help="Repeat the run with so many seeds, from --seed upwards, and report each and all of them.")
    ] = None,
    repeat: Annotated[
        Number,
        _data(min=1, help=f"How often the samples come, one round after another (default: {RunSettings.repeat})."),
    ] = None,
    promote: Annotated[
        bool,
        _reuse(
            "--promote",
            help="After each request, outside of its times, compute a prompt exactly that was answered approximately, as a server does in idle time.",
        ),
    ] = False,
    noise_floor: Annotated[
        Number,
        _run(
            help=f"Samples on which the model is also compared with itself in the other one of fp32 and bf16 (transformers engine) (default: {RunSettings.noise_floor})."
        ),
    ] = None,
    output: Annotated[
        Text, _output(help="Folder for samples.jsonl and summary.json; a run in it is never replaced.")
    ] = None,
    resume: Annotated[bool, _output("--resume", help="Continue the stopped run in the --output folder.")] = False,
    show_disagreements: Annotated[
        int, _output(min=0, help="Changed answers to print, each beside the answer of full computation.")
    ] = 3,
    log_samples: Annotated[
        bool, _output("--log-samples", help="Print a line for each sample when it is done.")
    ] = False,
) -> None:
    """Ask many questions with and without the cache: hits by level, tokens and encoder runs saved, time to first token (TTFT), answers changed."""
    from dejakv.cli.outcome import constants, run_and_show

    run_part: dict[str, Any] = {
        "model": model, "engine": engine, "dtype": dtype, "device": device, "attn": attn,
        "trust_remote_code": trust_remote_code, "dataset": dataset, "dataset_config": dataset_config,
        "dataset_path": dataset_path, "split": split, "passages": passages, "order": order, "window": window,
        "compact_tools": compact_tools, "max_samples": max_samples, "shuffle_seed": shuffle_seed,
        "chunk_source": chunk_source, "prompt_template": prompt_template, "raw_prompts": raw_prompts or None, "cache_mode": cache_mode,
        "arms": tuple(arms.split(",")) if arms else None, "max_new_tokens": max_new_tokens,
        "temperature": temperature, "seed": seed, "noise_floor": noise_floor, "output": output,
        "repeat": repeat, "promote": promote or None,
    }  # fmt: skip
    cache_part: dict[str, Any] = {
        "reuse": reuse, "unsound": unsound or None, "media": media, "similarity_threshold": similarity_threshold, "chunk_window": chunk_window,
        "index_encoder": index_encoder, "encoder_threads": encoder_threads, "image_encoder": image_encoder, "index": index, "embedding_layers": embedding_layer or None,
        "embedding_hook": embedding_hook, "embedding_match": embedding_match, "levels": level or None,
        "min_gain": min_gain, "costs": constants(costs), "enable_fusion_cache": enable_fusion_cache or None, "cache_dir": cache_dir,
        "fusion_provider": fusion_provider, "fusion_cache_dir": fusion_cache_dir, "max_bytes": max_bytes, "max_cached_blocks": max_cached_blocks,
        "policy": policy, "min_tokens": min_tokens, "second_sight": second_sight, "max_write_rate": max_write_rate,
        "blend_quality": blend_quality, "blend_map": blend_map, "blend_selector": blend_selector,
        "ttl": ttl, "ttl_prompts": ttl_prompts,
        "ttl_rows": ttl_rows, "ttl_encoder": ttl_encoder, "quotas": quotas or None, "partitions": partitions, "cross_encoder": cross_encoder, "paraphrase_threshold": paraphrase_threshold,
        "error_bound": error_bound, "confidence": confidence, "explore_share": explore_share, "audit_share": audit_share,
        "differs": differs, "trust_groups": trust_groups or None, "blend_share": blend_share, "max_generation": max_generation, "prune": prune, "image_root": image_root,
        "exact_prefix": False if disable_prefix_cache else None,
        "semantic_text": False if disable_semantic_cache else None,
        "copied_text": False if disable_copied_text else None,
        "exact_text": False if disable_exact_cache else None,
        "lexical_guard": False if disable_lexical_guard else None,
    }  # fmt: skip
    if preset is None and model is None:
        preset, chosen = default_for(dataset, cache_mode)
        run_part |= chosen
    settings = settings_from(preset, run_part, cache_part)
    run_and_show(settings, seeds, log_samples=log_samples, resume=resume, disagreements=show_disagreements)
