"""Write the pages of docs/reference that are made from the code.

The command is `python -m scripts.reference_pages`. A test says which page is out of date.
"""

import ast
import json
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from fastapi import FastAPI
from pydantic import BaseModel

from dejakv import metrics as figures
from dejakv.adopt import routes as middleware
from dejakv.cli.main import COMMANDS, typer_app
from dejakv.config import FindSettings, KeepSettings, ReuseSettings, SemanticCacheConfig
from dejakv.engines.vllm.settings import ConnectorSettings, EncoderSettings, TierSettings
from dejakv.experiments.settings import SINGULARS, RunSettings
from dejakv.server import routes_cache, routes_generate, routes_operator, schemas
from dejakv.server.settings import DECIDED, ServerSettings
from dejakv.settings import NumberRange, RegisteredMethod, description, kinds_of
from dejakv.stabilize.settings import StabilizeSettings
from dejakv.trust.settings import TrustSettings

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
MADE = "*Made from the code by `python -m scripts.reference_pages`.*"

SETTINGS = f"""# Settings

{MADE}

Every setting has one name. `SemanticCacheConfig(blend_share=0.2)` in Python is `--blend-share \
.2` or `--set blend.share=.2` of `dejakv run`,
`blend_share: 0.2` in a `--config` file and in a sweep, `DEJAKV_BLEND_SHARE=0.2` or \
`--blend-share .2` of the server, and
`"blend_share": 0.2` in `kv_connector_extra_config` of vLLM, where the table says so. In `--set`, \
the name of the part may stand before it (`find.`, `blend.`, `keep.`,
`trust.`, `run.`); lists have commas or are JSON, and `none` is None. A wrong value is refused \
with its name and the remedy.
`DEJAKV_OFF=1` turns all reuse off, in every program.
"""

PARTS = (
    ("Find", FindSettings, "What donors are looked for."),
    ("Blend", ReuseSettings, "What may be done with a donor, and what it must be worth."),
    ("Keep", KeepSettings, "Where state is kept, how much and for how long."),
    (
        "Trust",
        TrustSettings,
        (
            "How often an approximate answer that is served may be wrong ([the"
            " bound](../explanation/bound.md))."
        ),
    ),
)


def settings() -> str:
    """Every setting, by its part."""
    connector, server = kinds_of(ConnectorSettings), kinds_of(ServerSettings)
    text = [SETTINGS]
    for title, part, about in PARTS:
        text.append(
            f"\n## {title}\n\n{about} `server`, `vLLM`: the setting is there too, with the default"
            " that is named if it is another.\n"
        )
        rows: list[tuple[str, ...]] = []
        for item in fields(part):
            others = (
                [_other(ServerSettings, item)]
                if item.name in server and item.name not in DECIDED
                else [""]
            )
            others.append(_other(ConnectorSettings, item) if item.name in connector else "")
            rows.append((*_row(part, item), *others))
        text.append(_table(("name", "value", "default", "what it is", "server", "vLLM"), rows))
    known = set(kinds_of(SemanticCacheConfig))
    for title, part, about, skip in (
        (
            "Run",
            RunSettings,
            "Options of `dejakv run` and keys of a sweep, beside those above.",
            {"cache", "implied"},
        ),
        (
            "Server",
            ServerSettings,
            "Options of `dejakv serve`, each also `DEJAKV_NAME` in the environment or in `.env`;"
            " keys and secrets there alone.",
            {*DECIDED, *known},
        ),
        (
            "vLLM",
            ConnectorSettings,
            "Keys of `kv_connector_extra_config`, beside those above ([in vLLM](vllm.md)).",
            known,
        ),
        (
            "vLLM's offloading",
            TierSettings,
            "Keys of a tier of type `DejaKVTier` ([how](../how-to/offloading.md)), beside vLLM's"
            " `type`, `module_path`, `locality` and `backpressure`.",
            {"min_tokens", "second_sight"},
        ),
        (
            "vLLM's encoder connector",
            EncoderSettings,
            "All keys of `ec_connector_extra_config`.",
            set(),
        ),
        (
            "Stabilizing",
            StabilizeSettings,
            "Keys of `DEJAKV_STABILIZE`, and options of `dejakv stabilize`"
            " ([how](../how-to/stabilize.md)).",
            set(),
        ),
    ):
        text.append(f"\n## {title}\n\n{about}\n")
        own = [item for item in fields(part) if item.name not in skip]
        text.append(
            _table(("name", "value", "default", "what it is"), [_row(part, item) for item in own])
        )
    return "\n".join(text)


def commands() -> str:
    """Every command with its own options; of options that are settings the names."""
    known = {
        name
        for part in (SemanticCacheConfig, RunSettings, ServerSettings)
        for name in kinds_of(part)
    } | set(SINGULARS)
    text = [
        f"""# Commands

{MADE}

`dejakv COMMAND --help` prints the options that are used most, `--help-all` all. An error is one \
line with the remedy and exit status 2, or 1 for files that cannot be
written; Ctrl-C ends with 130.
"""
    ]
    group: Any = typer.main.get_command(typer_app)
    for name in COMMANDS:
        command = group.get_command(None, name)
        subs = getattr(command, "commands", {})
        for title, each in (
            ((f"{name} {sub}", one) for sub, one in subs.items() if not one.hidden)
            if subs
            else ((name, command),)
        ):
            text.append(f"\n## dejakv {title}\n\n{_flat(each.help)}\n")
            options = [
                one for one in each.params if one.name not in ("help", "help_all", "settings")
            ]
            set_by = [
                one for one in options if one.name in known and name in ("run", "serve", "certify")
            ]
            rows = [
                (_names(one), _flat(one.help), _given(one)) for one in options if one not in set_by
            ]
            if rows:
                text.append(_table(("option", "what it is", "default"), rows))
            if set_by:
                text.append(
                    "Every [setting](settings.md) is an option too, `--help-all` lists them.\n"
                )
    return "\n".join(text)


def metrics() -> str:
    """Every metric of `CacheCollector` and of vLLM's connector."""
    encoder = [
        (
            f"`{name.replace('ratio', 'rate')}`",
            f"`dejakv_{name}{'' if gauge else '_total'}{label}`",
            about,
        )
        for name, about, label, gauge in (
            *((name, about, "", False) for name, about in figures.ENCODER.values()),
            *(
                (name, about, f"{{{label}}}", False)
                for name, about, label, _ in figures.ENCODER_BY.values()
            ),
            *((name, about, "", True) for name, about in figures.ENCODER_NOW.values()),
        )
    ]
    text = [
        f"""# Metrics

{MADE} [Monitor](../how-to/monitor.md) says how to scrape them and which to watch.

Counters end in `_total`, exist from the start and restart at zero with the process or when a \
cache is cleared. Times are in seconds, sizes in bytes. No metric has a partition's name.

## Encoder cache

The first column is the key of `VisualKVCache.get_cache_stats()`. A caller that waits for another \
one's run counts as a hit if it gets the output, and as neither if it gets
the error or is cancelled.
"""
    ]
    text.append(_table(("key", "metric", "what it is"), encoder))
    for title, about, counters, gauges, labelled in (
        (
            "Stores",
            "The label `store` is the name given to the collector.",
            figures.STORE,
            figures.STORE_NOW,
            figures.STORE_BY,
        ),
        ("Levels, guards, prefixes", "", figures.LEVELS, {}, figures.LEVELS_BY),
        ("Idle time", "", figures.WAITING, figures.WAITING_NOW, {}),
        (
            "Error bound",
            "Only with `--error-bound`; all partitions together.",
            figures.TRUST,
            figures.TRUST_NOW,
            {},
        ),
        ("Server", "", {}, figures.SERVER_NOW, figures.SERVER_BY),
        (
            "Stabilizing",
            "On `/stabilize/metrics` of `dejakv stabilize` and of `StabilizeMiddleware`. Lengths"
            " are in tokens with a model's tokenizer, in characters without.",
            {},
            {},
            figures.STABILIZE_BY,
        ),
        (
            "Requests",
            "`method`, `level`: reuse method, and level that found the donor.",
            {"": ("requests{method,level}", "Requests by what was reused."), **figures.TOKENS},
            figures.TIMES,
            {},
        ),
    ):
        rows = [
            (f"dejakv_{name.replace('{', '_total{') if '{' in name else name + '_total'}", what)
            for name, what in counters.values()
        ]
        rows += [
            (f"dejakv_{name}_total{{{label}}}", what) for name, what, label, _ in labelled.values()
        ]
        rows += [
            (f"dejakv_{name}", what + (" A histogram." if gauges is figures.TIMES else ""))
            for name, what in gauges.values()
        ]
        table = _table(("metric", "what it is"), [(f"`{name}`", what) for name, what in rows])
        text.append(f"\n## {title}\n\n{about + chr(10) * 2 if about else ''}{table}")
    source = ast.parse(
        (ROOT / "src/dejakv/engines/vllm/stats.py").read_text(encoding="utf-8")
    )  # vLLM need not be there
    found = next(
        one.value
        for one in source.body
        if isinstance(one, ast.AnnAssign) and getattr(one.target, "id", "") == "METRICS"
    )
    assert found is not None
    rows = [
        (f"`vllm:dejakv_{name}_total{f'{{{label}}}' if label else ''}`", about)
        for name, (about, label) in ast.literal_eval(found).items()
    ]
    text.append(
        "\n## vLLM's connector\n\nOn vLLM's own `/metrics`, by"
        f" engine.\n\n{_table(('metric', 'what it is'), rows)}"
    )
    return "\n".join(text)


def http() -> str:
    """Endpoints of `dejakv serve` with the fields of their bodies, and who may use which route of
    vLLM's server.
    """
    app = FastAPI()
    for router in (
        routes_generate.generate_router,
        routes_generate.openai_router,
        routes_cache.router,
        routes_operator.router,
    ):
        app.include_router(router)
    found = app.openapi()["paths"].items()
    text = [
        f"""# HTTP

{MADE}

## Endpoints of dejakv serve

A body is JSON with `Content-Type: application/json`. Errors are OpenAI's error object; the \
message names the limit and the remedy. [Limits, keys](../how-to/server.md).
"""
    ]
    text.append(
        _table(
            ("endpoint", "what it does"),
            [
                (f"`{method.upper()} {path}`", _flat(route.get("description")))
                for path, routes in found
                for method, route in routes.items()
            ],
        )
    )
    for title, part in (
        ("POST /v1/generate", schemas.GenerateRequest), ("its answer", schemas.GenerateResponse),
        ("POST /v1/completions", schemas.CompletionRequest),
        ("POST /v1/chat/completions", schemas.ChatRequest),
        ("dejakv in a request to OpenAI's endpoints", schemas.ReuseOptions),
        ("dejakv in its answer", schemas.AnswerProvenance),
        ("POST /v1/cache/purge", schemas.PurgeRequest),
    ):  # fmt: skip
        about = (
            _flat(part.__doc__)
            if part.__doc__ and part not in (schemas.CompletionRequest, schemas.ChatRequest)
            else ""
        )
        text.append(f"\n### {title}\n\n{about + chr(10) * 2 if about else ''}{_fields(part)}\n")
    ignored = ", ".join(f"`{name}`" for name in sorted(schemas.WITHOUT_EFFECT))
    refused = ", ".join(f"`{name}`" for name in sorted(schemas.NEUTRAL))
    text.append(
        f"\n### OpenAI's other fields\n\nTaken and without effect: {ignored}. Refused with a 400"
        " that names the field, unless the value asks for nothing (null, an empty list, `n=1`):"
        f" {refused}, and names that nobody knows.\n"
    )
    every = ", ".join(
        sorted(f"`{method} {path}`" for method, path in middleware.EVERYBODY if method != "HEAD")
    )
    client = ", ".join(f"`{path}`" for path in sorted(middleware.CLIENT))
    rest = "everything else, a route of a new vLLM included; without the variable it is closed"
    routes = [
        ("everybody", every),
        ("a client's key", f"`POST` to {client}"),
        ("`DEJAKV_OPERATOR_KEY`", rest),
    ]
    text.append(
        f"""
## Routes of vLLM's server behind AdoptMiddleware

Where `DEJAKV_API_KEYS` or `DEJAKV_API_KEYS_FILE` is set ([isolate tenants](../how-to/tenants.md)):

{_table(("who", "what"), routes)}"""
    )
    return "\n".join(text)


def models() -> str:
    """What the tests marked `shows` have shown, from models.json."""
    told = json.loads((FOLDER / "models.json").read_text(encoding="utf-8"))
    ways = [
        (engine, way)
        for engine in ("transformers", "vllm")
        for way in ("exact", "blend", "encoder")
    ]
    cells: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for engine, run in told.items():
        for model, dtypes in run["shown"].items():
            for dtype, shown in dtypes.items():
                cell = cells.setdefault((NAMED.get(model, model), dtype), {})
                cell |= {(engine, way): result for way, result in shown.items()}
    order = sorted(cells, key=lambda one: (one[0] not in TRAINED, one[0].lower(), one[1]))
    rows = [
        (model, dtype, *(cells[model, dtype].get(way, "") for way in ways))
        for model, dtype in order
    ]
    runs = "\n".join(
        f"- {engine}: {run['date']}, {run['versions']}" for engine, run in sorted(told.items())
    )
    names = [f"{engine.replace('vllm', 'vLLM')}: {way}" for engine, way in ways]
    modes = [
        (model, dtype, *(cells[model, dtype].get(("vllm", way), "") for way in VLLM_MODES))
        for model, dtype in order
        if any(("vllm", way) in cells[model, dtype] for way in VLLM_MODES)
    ]
    return f"""# Models

*Made from the results of tests by `make models-page`.*

What was really run, on a CPU backend; no GPU was available. `{"`, `".join(TRAINED)}` have their \
trained weights, the others random weights of their architecture. *exact*: a hit answers as full \
computation. *blend*: with all tokens recomputed it is
full computation, with fewer it runs; SmolLM2 and docs-lm with real text. *encoder*: a known \
picture does not run the tower again. An empty cell was not run; a model that is not here may \
work: it is checked at load, and refused or computed in full where it cannot be.

{runs}

{_table(("model", "dtype", *names), rows)}
## vLLM, by mode

*generated text*: the next turn of a chat loads its answer, too. *speculative decoding*: misses, \
hits and next turns beside drafts of the text alone (docs-lm) or of the named kind of model. \
*LoRA*: each adapter's state is its own. *tensor parallel*: two ranks. Blends are refused beside \
speculative decoding, and never made for a request with an adapter or a picture. What an empty \
cell means stands above; more is [refused or not shown](vllm.md#supported-and-refused).

{_table(("model", "dtype", *VLLM_MODES.values()), modes)}"""


VLLM_MODES = {
    "exact": "exact",
    "blend": "blend",
    "generated": "generated text",
    "drafts": "speculative decoding",
    "lora": "LoRA",
    "pictures": "pictures",
    "ranks": "tensor parallel",
}
"""Columns of the table of vLLM's modes, by the way in `shows`."""

TRAINED = ("SmolLM2-135M-Instruct", "docs-lm", "shapes-vlm")
NAMED = {
    "fp8": "docs-lm, fp8 cache",
    "gpt-oss": "gpt_oss",
    "draft_model": "docs-lm, draft model",
    "eagle": "docs-lm, EAGLE",
    "mtp": "mimo, MTP",
    "mistral_window": "mistral+window",
    "gemma3": "gemma3_text",
}
"""Names of one model in several tests."""

PAGES = {
    "models.md": models,
    "settings.md": settings,
    "commands.md": commands,
    "metrics.md": metrics,
    "http.md": http,
}


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())


def _fields(part: type[BaseModel]) -> str:
    """Names, types and defaults of a body's fields, in a sentence."""
    found: list[str] = []
    for name, one in part.model_fields.items():
        default = one.get_default(call_default_factory=True)
        told = (
            ""
            if one.is_required() or default in (None, []) or isinstance(default, BaseModel)
            else f"; `{default}`"
        )
        found.append(f"`{name}` ({_type(one.annotation)}{told})")
    return f"{', '.join(found)}."


def _type(kind: Any) -> str:
    if get_origin(kind) is Annotated and not isinstance(get_args(kind)[1], RegisteredMethod):
        return _type(get_args(kind)[0])
    if get_origin(kind) is list:
        return f"list of {_type(get_args(kind)[0])}"
    return (
        "object"
        if isinstance(kind, type) and issubclass(kind, BaseModel)
        else _kind(kind).removesuffix(", or none")
    )


def _names(option: Any) -> str:
    """The options' names, or an argument's."""
    return (
        ", ".join(f"`{name}`" for name in option.opts)
        if option.param_type_name == "option"
        else f"`{option.name.upper()}`"
    )


def _given(option: Any) -> str:
    value = option.default
    return (
        ""
        if value is None or value is False or callable(value) or value in ((), [])
        else f"`{value}`"
    )


def _row(part: type, item: Field[Any]) -> tuple[str, ...]:
    return (
        f"`{item.name}`",
        _kind(kinds_of(part)[item.name]),
        _default(item),
        description(part, item.name),
    )


def _other(part: type, item: Field[Any]) -> str:
    """`yes`, or the default of another class where it is another."""
    theirs = next(one for one in fields(part) if one.name == item.name)
    return "yes" if theirs.default == item.default else _default(theirs)


def _default(item: Field[Any]) -> str:
    if item.default is MISSING:
        return ""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2)):
        if type(item.default) is int and item.default >= size and item.default % size == 0:
            return f"{item.default // size} {unit}"
    value = item.default
    return (
        "none"
        if value in ((), None)
        else f"`{','.join(value) if isinstance(value, tuple) else str(value)}`"
    )


def _kind(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        if isinstance(more[0], RegisteredMethod):
            return ", ".join(f"`{value}`" for value in more[0].choices)
        return (
            f"{_kind(inner)}, {str(more[0]).removeprefix('a number ')}"
            if isinstance(more[0], NumberRange)
            else (
                (_kind(inner) if inner is int else "address")
                if not hasattr(more[0], "store")
                else (
                    "folder or address" if more[0].store else "folder" if more[0].folder else "path"
                )
            )
        )
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {_kind(get_args(kind)[0])}"
    members = [each for each in get_args(kind) if each is not NoneType]
    if members and NoneType in get_args(kind):
        return " or ".join(map(_kind, members)) + ", or none"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(
        getattr(kind, "__name__", ""), "object"
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return (
        "\n".join(
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
        )
        + "\n"
    )


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
