"""`dejakv run`: ask many questions with and without the cache, and report what that saved and changed."""

from typing import Annotated, Any

import typer

Text = str | None


def run_command(
    preset: Annotated[Text, typer.Option(help="Bundle of settings; default: shapes, unless a model is given.")] = None,
    model: Annotated[Text, typer.Option(help="Bundled name, local folder or hub id.")] = None,
    engine: Annotated[Text, typer.Option(help="transformers or vllm.")] = None,
    dtype: Annotated[Text, typer.Option(help="auto, fp32, bf16 or fp16.")] = None,
    device: Annotated[Text, typer.Option(help="auto, cpu or cuda.")] = None,
    attn: Annotated[Text, typer.Option(help="sdpa or eager.")] = None,
    trust_remote_code: Annotated[
        bool | None, typer.Option("--trust-remote-code", help="Run code of the model's repository.")
    ] = None,
    dataset: Annotated[
        Text, typer.Option(help="shapes, docs, repo, rag, sessions, gqa, jsonl, folder or package.module:factory.")
    ] = None,
    dataset_config: Annotated[Text, typer.Option(help="GQA's config on the hub.")] = None,
    dataset_path: Annotated[
        Text, typer.Option(help="Local file or folder of the data set; of repo an installed package.")
    ] = None,
    image_root: Annotated[Text, typer.Option(help="Folder of the pictures.")] = None,
    split: Annotated[Text, typer.Option()] = None,
    passages: Annotated[int | None, typer.Option(help="rag: passages in a prompt.")] = None,
    order: Annotated[Text, typer.Option(help="rag: passages by score, document or shuffled.")] = None,
    window: Annotated[int | None, typer.Option(help="sessions: messages kept of a history; 0: all.")] = None,
    compact_tools: Annotated[
        int | None, typer.Option(help="sessions: tool results kept whole; all if not given.")
    ] = None,
    max_samples: Annotated[int | None, typer.Option()] = None,
    shuffle_seed: Annotated[int | None, typer.Option()] = None,
    chunk_source: Annotated[Text, typer.Option(help="question, semantic, group, combined, prompt or a field.")] = None,
    prompt_template: Annotated[Text, typer.Option(help="Text with {question} and {context}.")] = None,
    reuse: Annotated[Text, typer.Option(help="exact, adopt or blend.")] = None,
    media: Annotated[Text, typer.Option(help="exact, similar or ignore.")] = None,
    similarity_threshold: Annotated[float | None, typer.Option(help="Least cosine of the semantic text level.")] = None,
    chunk_window: Annotated[int | None, typer.Option(help="Characters of the chunk that are embedded; 0: all.")] = None,
    index_encoder: Annotated[Text, typer.Option(help="sentence-transformers name, or model.")] = None,
    index: Annotated[Text, typer.Option(help="flat, hnsw or lsh.")] = None,
    embedding_layer: Annotated[list[str] | None, typer.Option(help="NAME:DIM[:THRESH], repeatable.")] = None,
    embedding_hook: Annotated[
        Text, typer.Option(help="none, prompt, vision, prompt_vision or package.module:factory.")
    ] = None,
    embedding_match: Annotated[Text, typer.Option(help="all, any or mean.")] = None,
    level: Annotated[
        list[str] | None, typer.Option(help="A further level, package.module:factory, repeatable.")
    ] = None,
    min_gain: Annotated[
        int | None, typer.Option(help="Tokens an approximate plan must save beyond the exact prefix.")
    ] = None,
    disable_prefix_cache: Annotated[bool, typer.Option("--disable-prefix-cache")] = False,
    disable_semantic_cache: Annotated[bool, typer.Option("--disable-semantic-cache")] = False,
    disable_exact_cache: Annotated[bool, typer.Option("--disable-exact-cache")] = False,
    disable_lexical_guard: Annotated[bool, typer.Option("--disable-lexical-guard")] = False,
    enable_fusion_cache: Annotated[bool, typer.Option("--enable-fusion-cache")] = False,
    cache_dir: Annotated[Text, typer.Option(help="Keep the cache here; without it every run starts fresh.")] = None,
    fusion_cache_dir: Annotated[
        Text, typer.Option(help="Keep encoder outputs here; implies --enable-fusion-cache.")
    ] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Budget of the store in bytes.")] = None,
    max_cached_blocks: Annotated[int | None, typer.Option(help="Budget of the store in chunks; 0: none.")] = None,
    policy: Annotated[Text, typer.Option(help="lru or lfu.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Shorter prompts are not stored.")] = None,
    second_sight: Annotated[
        bool | None, typer.Option("--second-sight", help="Store a prompt when it comes again.")
    ] = None,
    max_write_rate: Annotated[int | None, typer.Option(help="Bytes a second the store may take; 0: no limit.")] = None,
    blend_quality: Annotated[
        Text, typer.Option(help="strict (more rows, nearer to full computation), default or loose (fewer, faster).")
    ] = None,
    blend_map: Annotated[Text, typer.Option(help="Token map of blend.")] = None,
    blend_selector: Annotated[
        Text, typer.Option(help="What ranks the rows of blend, if not as its quality says.")
    ] = None,
    blend_share: Annotated[
        float | None, typer.Option(help="Share of rows that blend recomputes, if not its quality's.")
    ] = None,
    cache_mode: Annotated[
        Text, typer.Option(help="live, dry-run (decoder not run), shares (tokenizer alone) or off.")
    ] = None,
    arms: Annotated[Text, typer.Option(help="Some of none,prefix,cache.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option()] = None,
    temperature: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    noise_floor: Annotated[
        int | None,
        typer.Option(help="Samples on which the model in fp32 and in bf16 are compared as well (transformers engine)."),
    ] = None,
    output: Annotated[Text, typer.Option(help="Folder for samples.jsonl and summary.json.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the stopped run in the --output folder.")
    ] = False,
    show_disagreements: Annotated[
        int, typer.Option(min=0, help="How many changed answers to print beside those of full computation.")
    ] = 3,
    log_samples: Annotated[bool, typer.Option("--log-samples", help="One line a sample, as it is served.")] = False,
) -> None:
    """Ask many questions with and without the cache: hits by level, tokens and encoder runs saved, TTFT, answers changed."""
    from dejakv.cli.progress import run_with_progress
    from dejakv.experiments.settings import settings_from
    from dejakv.experiments.table import show
    from dejakv.presets import default_for

    run_part: dict[str, Any] = {
        "model": model, "engine": engine, "dtype": dtype, "device": device, "attn": attn,
        "trust_remote_code": trust_remote_code, "dataset": dataset, "dataset_config": dataset_config,
        "dataset_path": dataset_path, "split": split, "passages": passages, "order": order, "window": window, "compact_tools": compact_tools, "max_samples": max_samples, "shuffle_seed": shuffle_seed,
        "chunk_source": chunk_source, "prompt_template": prompt_template, "cache_mode": cache_mode,
        "arms": tuple(arms.split(",")) if arms else None, "max_new_tokens": max_new_tokens,
        "temperature": temperature, "seed": seed, "noise_floor": noise_floor, "output": output,
    }  # fmt: skip
    cache_part: dict[str, Any] = {
        "reuse": reuse, "media": media, "similarity_threshold": similarity_threshold, "chunk_window": chunk_window,
        "index_encoder": index_encoder, "index": index, "embedding_layers": embedding_layer or None,
        "embedding_hook": embedding_hook, "embedding_match": embedding_match, "levels": level or None,
        "min_gain": min_gain, "enable_fusion_cache": enable_fusion_cache or None, "cache_dir": cache_dir,
        "fusion_cache_dir": fusion_cache_dir, "max_bytes": max_bytes, "max_cached_blocks": max_cached_blocks,
        "policy": policy, "min_tokens": min_tokens, "second_sight": second_sight, "max_write_rate": max_write_rate,
        "blend_quality": blend_quality, "blend_map": blend_map, "blend_selector": blend_selector, "blend_share": blend_share, "image_root": image_root,
        "exact_prefix": False if disable_prefix_cache else None,
        "semantic_text": False if disable_semantic_cache else None,
        "exact_text": False if disable_exact_cache else None,
        "lexical_guard": False if disable_lexical_guard else None,
    }  # fmt: skip
    if preset is None and model is None:
        preset, chosen = default_for(dataset, cache_mode)
        run_part |= chosen
    result = run_with_progress(settings_from(preset, run_part, cache_part), log_samples, resume)
    show(result.summary, result.rows, disagreements=show_disagreements)
    if result.output is not None:
        typer.echo(f"written to {result.output}: {', '.join(sorted(path.name for path in result.output.iterdir()))}")
    if result.stopped:
        again = "add --resume to the same command to go on" if result.output is not None else "nothing was kept"
        typer.echo(f"dejakv: stopped after {result.summary['samples']} of {result.summary['stopped_before']}"
                   f" samples: {again}", err=True)  # fmt: skip
        raise typer.Exit(130)
