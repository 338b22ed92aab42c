"""vLLM's own routes beside the lists of the middleware: a route of a new vLLM is noticed here, and closed until then."""

import asyncio
import warnings
from argparse import Namespace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.routing import Match
from vllm_harness import DOCS

from dejakv.adopt.middleware import AdoptMiddleware
from dejakv.adopt.routes import CLIENT, EVERYBODY

OPERATOR = {
    # The engine's own business, or everybody's requests
    "/abort_requests", "/inference/v1/abort_requests", "/collective_rpc", "/pause", "/resume", "/is_paused", "/sleep",
    "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/release_kv_cache_memory",
    "/scale_elastic_ep", "/is_scaling_elastic_ep", "/server_info", "/get_world_size", "/kv_event_sources", "/metrics",
    # Weights and adapters
    "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
    "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version", "/weight_checker",
    "/weight_info", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/adapters/{adapter_name}",
    # Bodies in which no partition can be put: forms, sockets, a body that chooses its route
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime", "/invocations",
    # Answers of whoever knows their id, and halves of a request
    "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/v1/chat/completions/render",
    "/v1/chat/completions/derender", "/v1/completions/render", "/v1/completions/derender", "/v1/responses/render",
    "/v1/messages/render",
}  # fmt: skip


@pytest.fixture(scope="module")
def vllm_app():
    """vLLM's application with everything that it can be asked for, without an engine."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.entrypoints.openai.api_server import build_app
        from vllm.tasks import GenerationTask
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", str(DOCS)])
        return build_app(args, get_args(GenerationTask))


def _routes(app):
    return [(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ["-"]]


def test_each_route_was_looked_at(vllm_app):
    routes = set(_routes(vllm_app))
    others = {path for method, path in routes if (method, path) not in EVERYBODY and path not in CLIENT}
    assert others - OPERATOR == set(), "a new route: for whom is it?"
    assert {path for method, path in routes if method == "POST"} >= CLIENT
    assert {path for _, path in EVERYBODY} <= {path for _, path in routes}


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_route_that_runs_the_model_is_reached_without_a_key(vllm_app, data):
    """Real routes, spelled in other ways, as vLLM's own router resolves them."""
    method, path = data.draw(st.sampled_from(_routes(vllm_app)))
    root = data.draw(st.sampled_from(["", "/api", "/v1"]))
    path = data.draw(st.sampled_from([path, path + "/", "/" + path, root + path, root + root + path, path.title()]))
    method = data.draw(st.sampled_from([method, "POST", "GET", "OPTIONS"]))
    kind = data.draw(st.sampled_from(["http", "websocket"]))
    scope = {"type": kind, "method": method, "path": path, "root_path": root, "headers": []}
    reached, sent = [], []

    async def inner(scope, receive, send):
        for route in vllm_app.router.routes:
            match, child = route.matches(scope)
            if match == Match.FULL:
                reached.append(getattr(child.get("endpoint"), "__name__", route.path))
                assert (scope["method"], route.path) in EVERYBODY
                return

    async def receive():
        raise AssertionError("the body is read before the key is known")

    async def send(message):
        sent.append(message)

    asyncio.run(AdoptMiddleware(inner, object(), ("alpha",))(scope, receive, send))
    if sent:
        assert not reached
        assert sent[0].get("status", 403) in (401, 403)
