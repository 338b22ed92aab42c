"""`/`: one page for a person with a browser: what is served, how it is called, and the caller's own figures."""

from html import escape
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse
from starlette.requests import Request as HttpRequest

from dejakv import __version__
from dejakv.http.keys import Caller
from dejakv.server.access import caller_of, service_of
from dejakv.server.service import Service

router = APIRouter(include_in_schema=False)

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>DejaKV: {model}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ background: #8882; padding: 1rem; overflow-x: auto }}
td, th {{ text-align: left; padding-right: 2rem }}
</style>
<h1>DejaKV {version}</h1>
<p>This server answers with the model <b>{model}</b> and reuses the state of earlier prompts. <code>/v1/generate</code> reuses
{reuse} where a request does not choose.</p>
<h2>Call it</h2>
<pre>curl -sS {url}v1/generate -H 'Content-Type: application/json' {key}\\
  -d '{{"prompt": "Hello", "max_new_tokens": 16, "temperature": 0}}'</pre>
<p>OpenAI's clients: <code>base_url="{url}v1"</code>. {note}</p>
<p><a href="{root}/docs">All endpoints</a>, <a href="{root}/openapi.json">OpenAPI</a>, <a href="{root}/ready">readiness</a>,
<a href="{root}/metrics">metrics</a>.</p>
<h2>Figures</h2>
{figures}
</html>
"""
_REUSE = {
    "exact": "equal prompts and prefixes only",
    "adopt": "similar prompts (adopt)",
    "blend": "similar prompts (blend)",
    "top_layer": "the top layer of similar prompts (top_layer)",
}
_HIDDEN = "<p>Send your API key to <code>/v1/cache/stats</code> for the figures of your own requests.</p>"


@router.get("/")
async def home(
    http: HttpRequest, service: Service = Depends(service_of), caller: Caller | None = Depends(caller_of)
) -> HTMLResponse:
    """The page. It shows no figures to a caller without a key where keys are required."""
    keyed = caller is None or caller.partition is None or not caller.operator
    values = {
        "model": service.model_name,
        "version": __version__,
        "reuse": _REUSE[service.settings.reuse],
        "url": str(http.base_url),
        "root": http.scope.get("root_path", ""),
        "key": "-H 'Authorization: Bearer KEY' " if keyed else "",
        "note": "Every request needs an API key." if keyed else "No API key is needed.",
    }
    shown = {name: escape(value) for name, value in values.items()}
    return HTMLResponse(_PAGE.format(**shown, figures=_HIDDEN if caller is None else _figures(service, caller)))


def _figures(service: Service, caller: Caller) -> str:
    cache = service.worker.pipeline.cache
    assert cache is not None
    counts = cache.stats(caller.partition)
    rows: list[tuple[str, Any]] = [("requests that looked for state", counts.lookups)]
    rows += [(f"reused, by {level}", count) for level, count in sorted(counts.hits.items())]
    rows += [("reused, an exact prefix", counts.prefix_hits), ("computed in full", counts.misses)]
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{value}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"
