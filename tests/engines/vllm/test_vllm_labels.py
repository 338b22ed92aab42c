"""Labels: an approximate answer says so on every way that it takes, and where it could not, it is exact."""

import json
import time

import httpx
import pytest
from tests.otlp import Collector, attributes
from vllm_harness import BLENDING, running, server_flags, serving, tokens

MODES = {**BLENDING, "mode": "blend", "min_gain": 1, "min_gain_share": 0, "lookup_timeout_s": 30, "load_timeout_s": 60}
HEADS = [f"{name} lives in {place}. " * 40 for name, place in (("mara", "rome"), ("olga", "oslo"), ("nina", "kiel"))]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def requested(kind, prompt, **more):
    """Path and body of one call."""
    body = {"model": "docs", "max_tokens": 4, "temperature": 0, **more}
    if kind == "chat":
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
    if kind == "responses":
        limits = {"max_output_tokens": body.pop("max_tokens"), "store": False}
        return "/v1/responses", {**body, **limits, "input": prompt}
    return "/v1/completions", {**body, "prompt": prompt}


def events_of(text):
    """The events of a stream, as objects."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def said_of(event):
    """What the connector said, in an event or an answer, or in the response that an event holds."""
    params = event.get("kv_transfer_params") or (event.get("response") or {}).get("kv_transfer_params")
    return (params or {}).get("dejakv")


@pytest.fixture(scope="module")
def collector():
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(tmp_path_factory, collector):
    folder = tmp_path_factory.mktemp("labels")
    flags = [
        flag.replace("AdoptMiddleware", "ServerMiddleware")
        for flag in server_flags({**MODES, "store": str(folder / "kv")})
    ]
    flags += ["--chat-template", TEMPLATE, "--otlp-traces-endpoint", f"{collector.url}/v1/traces"]
    environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with serving(folder, flags, environment) as address:
        yield address


def post(server, kind, prompt, **more):
    path, body = requested(kind, prompt, **more)
    answer = httpx.post(f"{server}{path}", json=body, timeout=None)
    assert answer.status_code == 200, answer.text
    return answer


ASKS = {"kv_transfer_params": {"dejakv": {"mode": "blend"}}}


@pytest.fixture(scope="module")
def prompts(server):
    """Prompts that are blended, each once: a prompt that was blended before is computed in full."""
    halves = HEADS[:2]
    for half in halves:
        post(server, "completions", half)
    words = "mara olga nina rome oslo kiel lives where does in".split()
    fresh = (f"{halves[1]}{halves[0]}{one} {other} {third}" for one in words for other in words for third in words)
    while not said_of(post(server, "completions", next(fresh), **ASKS).json())["approximate"]:
        pass  # a prompt is stored behind its answer
    return fresh


@pytest.mark.parametrize("kind", ["completions", "chat", "responses"])
def test_an_unstreamed_blend_is_labelled_in_body_and_header(server, prompts, kind):
    for more in ({}, ASKS):
        answer = post(server, kind, next(prompts), **more)
        assert said_of(answer.json())["approximate"] is True
        assert answer.headers["x-dejakv-approximate"] == "true"


@pytest.mark.parametrize("kind", ["completions", "chat", "responses"])
def test_a_streamed_blend_is_labelled_before_its_end(server, prompts, kind):
    for more in ({}, ASKS):
        text = post(server, kind, next(prompts), stream=True, **more).text
        labels = [said["approximate"] for event in events_of(text) if (said := said_of(event))]
        assert labels, text[-2000:]
        assert labels[-1] is True
        if kind != "responses":
            assert text.rstrip().endswith("data: [DONE]")
            assert events_of(text)[-1]["choices"] == []
            assert events_of(text)[-1]["id"] == events_of(text)[0]["id"]


def test_samples_and_further_prompts_of_one_call_are_labelled(server, prompts):
    samples = post(server, "completions", next(prompts), n=3, temperature=0.8)
    assert samples.headers["x-dejakv-approximate"] == "true"
    assert said_of(samples.json())["approximate"] is True
    several = post(server, "completions", [HEADS[2], next(prompts)])
    assert several.headers["x-dejakv-approximate"] == "true"
    streamed = events_of(post(server, "completions", next(prompts), n=2, temperature=0.8, stream=True).text)
    assert said_of(streamed[-1])["approximate"] is True


def test_an_exact_answer_says_nothing_unless_it_is_asked(server):
    post(server, "completions", HEADS[2])
    quiet = post(server, "completions", HEADS[2])
    assert quiet.json()["kv_transfer_params"] is None
    assert "x-dejakv-approximate" not in quiet.headers
    assert all(said_of(event) is None for event in events_of(post(server, "completions", HEADS[2], stream=True).text))
    asks = {"kv_transfer_params": {"dejakv": {}}}
    asked = post(server, "completions", HEADS[2], **asks)
    assert asked.headers["x-dejakv-approximate"] == "false"
    assert (
        said_of(events_of(post(server, "completions", HEADS[2], stream=True, **asks).text)[-1])["approximate"] is False
    )


def test_the_connectors_spans_stand_beside_vllms_in_the_clients_trace(server, collector, prompts):
    path, body = requested("completions", next(prompts), **ASKS)
    header = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    assert httpx.post(f"{server}{path}", json=body, headers=header, timeout=None).status_code == 200

    names = ("dejakv.load", "dejakv.request", "llm_request", f"POST {path}")
    while True:
        traced = collector.of_trace("4bf92f3577b34da6a3ce929d0e0e4736")
        if {each.name for each in traced.spans} >= set(names):
            break
        time.sleep(0.02)
    tree = {each.name: traced.parent_name(each) for each in traced.spans}
    assert [tree[name] for name in names] == ["dejakv.request", f"POST {path}", f"POST {path}", ""]
    assert (tree["dejakv.lookup"], tree["dejakv.decision"]) == ("dejakv.request", "dejakv.request")

    request, load = attributes(traced.named("dejakv.request")), attributes(traced.named("dejakv.load"))
    assert (request["dejakv.method"], request["dejakv.approximate"]) == ("blend", True)
    assert (load["dejakv.method"], load["dejakv.loaded_bytes"]) == ("blend", request["dejakv.loaded_bytes"])


def counted(server, name):
    """Sum of a metric of vLLM's."""
    lines = httpx.get(f"{server}/metrics", timeout=None).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def test_a_client_that_leaves_a_stream_ends_its_request(server):
    """vLLM ends a request in one of two ways: its tokens are all made, and it counts as a success, or it is aborted."""
    limit = 400
    before = {name: counted(server, f"vllm:{name}_total") for name in ("generation_tokens", "request_success")}
    path, body = requested("completions", HEADS[2], max_tokens=limit, ignore_eos=True, stream=True)
    with httpx.stream("POST", f"{server}{path}", json=body, timeout=None) as answer:
        next(answer.iter_lines())
    while counted(server, "vllm:num_requests_running"):
        pass
    after = {name: counted(server, f"vllm:{name}_total") for name in before}
    assert 0 < after["generation_tokens"] - before["generation_tokens"] < limit
    assert after["request_success"] == before["request_success"]


@pytest.mark.parametrize("unlabelled", [False, True])
def test_an_answer_whose_label_nobody_sees_is_exact_unless_the_server_allows_it(unlabelled, monkeypatch):
    """Without the middleware, in vLLM's own engine: a stream, a further prompt of one call, and what is neither."""
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams, RequestOutputKind

    halves = [tokens(160, seed) for seed in (1, 2)]
    prompt = [*halves[1], *halves[0], *tokens(20, 3)]
    kinds = RequestOutputKind
    with running(extra={**MODES, "unlabelled_answers": unlabelled}) as engine:
        engine.ask(halves)
        engine.settle()

        def said(request_id, kind, **choices):
            params = {"kv_transfer_params": {"dejakv": {"no_store": True, **choices}}}
            sampling = SamplingParams(max_tokens=2, temperature=0, output_kind=kind, extra_args=params)
            engine.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
            outputs = []
            while engine.llm.llm_engine.has_unfinished_requests():
                outputs += engine.llm.llm_engine.step()
            engine.llm.reset_prefix_cache()
            return outputs[-1].kv_transfer_params["dejakv"]

        assert said("whole", kinds.FINAL_ONLY)["approximate"] is True
        assert said("stepped", kinds.CUMULATIVE)["approximate"] is True
        assert said("cmpl-1-0", kinds.FINAL_ONLY)["approximate"] is True
        for request_id, kind in (
            ("stream", kinds.DELTA),
            ("cmpl-1-beam-0", kinds.CUMULATIVE),
            ("cmpl-1-1", kinds.FINAL_ONLY),
        ):
            label = said(request_id, kind)
            assert label["approximate"] is unlabelled, label
            assert unlabelled or "ServerMiddleware" in label["reason"]
        assert said("shown", kinds.DELTA, labelled=True)["approximate"] is True
        assert said("wrong", kinds.FINAL_ONLY, labelled="yes")["reason"].startswith("labelled 'yes' is neither")

        step, labels = engine.llm.llm_engine.step, []

        def noting():
            outputs = step()
            labels.extend((output.kv_transfer_params or {}).get("dejakv") or {} for output in outputs)
            return outputs

        monkeypatch.setattr(engine.llm.llm_engine, "step", noting)
        engine.llm.beam_search([{"prompt_token_ids": prompt}], BeamSearchParams(beam_width=2, max_tokens=2))
        assert labels[0].get("approximate", False) is unlabelled
