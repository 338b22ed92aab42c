"""Traces of requests by OpenTelemetry, switched on by its standard environment variables alone.

`dejakv serve`, the middlewares for vLLM and vLLM's connector call `start`. Without it, or without
the variables, nothing of OpenTelemetry is imported and no span is made. Needs the extra `otel`.

Names are those of OpenTelemetry's semantic conventions (`gen_ai.*`, `http.*`) where there are any,
and `dejakv.*` otherwise. No attribute holds text of a prompt or the name of a partition.
"""

import logging
import os
import time
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from dejakv.errors import MissingExtraError

log = logging.getLogger("dejakv.tracing")

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables that switch traces on by themselves, the more special one first."""

_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_GRPC: Final = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
_HTTP: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_NO_SPAN: Final = nullcontext[Any](None)

_started = False
_tracer: Any = None
_own_provider: Any = None
"""The provider that this module made; None while the process has one of its own, as vLLM does."""


def wanted_exporters(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the exporters of traces that the environment asks for; empty for none.

    Examples
    --------
    >>> wanted_exporters({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
    ('otlp',)
    >>> wanted_exporters({"OTEL_SERVICE_NAME": "chat"})
    ()
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()

    listed = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if not listed:
        # OpenTelemetry's default is to send to a collector on this machine. A server that nobody
        # configured sends nothing.
        return ("otlp",) if any(environment.get(name) for name in ENDPOINTS) else ()
    names = [name.strip().lower() for name in listed.split(",")]
    return tuple(name for name in names if name and name != "none")


def start() -> bool:
    """Switch traces on if the environment asks for them. Further calls change nothing.

    What stands in the way is logged as a warning: a server without traces still answers.

    Returns
    -------
    bool
        Whether traces are on.
    """
    global _started
    exporters = wanted_exporters(os.environ)
    if _started or not exporters:
        return _started

    try:
        # Imported now, so that what is missing is said at the start.
        import_module("opentelemetry.sdk.trace")
        # It reads OTEL_PROPAGATORS, and raises for a name that it does not know.
        import_module("opentelemetry.propagate")
        for name in exporters:
            _exporter_class(name)
    except ImportError as error:
        missing = MissingExtraError(error.name or "opentelemetry-sdk", "otel", "sending traces")
        log.warning("no traces are sent: %s", missing)
    except ValueError as error:
        log.warning("no traces are sent: %s", error)
    else:
        _started = True
    return _started


def stop() -> None:
    """Send the spans that wait and switch traces off.

    It takes as long as the exporter's timeout, 10 seconds by default, if no collector answers.
    """
    global _started, _tracer, _own_provider
    provider, _started, _tracer, _own_provider = _own_provider, False, None, None
    if provider is not None:
        provider.shutdown()


def is_on() -> bool:
    """Return whether spans are made."""
    return _started


def _exporter_class(name: str) -> Any:
    """Return the class of an exporter.

    Raises ImportError if its package is missing, and ValueError for an unknown name or protocol.
    """
    if name == "console":
        return import_module("opentelemetry.sdk.trace.export").ConsoleSpanExporter
    if name != "otlp":
        raise ValueError(
            f"OTEL_TRACES_EXPORTER names {name!r}, which is not known here: choose otlp, console "
            "or none"
        )

    protocol = next((os.environ[each] for each in _PROTOCOLS if os.environ.get(each)), "")
    if protocol == "grpc":
        try:
            return import_module(_GRPC).OTLPSpanExporter
        except ImportError as error:
            raise ValueError(
                "the OTLP protocol grpc needs the package opentelemetry-exporter-otlp-proto-grpc: "
                "install it, or set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf and the endpoint's "
                "port for HTTP, 4318 by default"
            ) from error

    if protocol not in ("", "http/protobuf"):
        raise ValueError(
            f"the OTLP protocol {protocol!r} is not known here: set OTEL_EXPORTER_OTLP_PROTOCOL "
            "to http/protobuf or grpc"
        )
    return import_module(_HTTP).OTLPSpanExporter


def _provider() -> Any:
    """Return the process's tracer provider, as vLLM sets one, or make one from the variables."""
    global _own_provider
    from opentelemetry import trace
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    present = trace.get_tracer_provider()
    if isinstance(present, TracerProvider):
        return present

    resource = Resource.create()
    # The SDK's name for a service without OTEL_SERVICE_NAME says nothing.
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "dejakv"}))

    provider = TracerProvider(resource=resource)
    for name in wanted_exporters(os.environ):
        provider.add_span_processor(BatchSpanProcessor(_exporter_class(name)()))
    _own_provider = provider
    return provider


def _current_tracer() -> Any:
    """Return the tracer, made at the first span; None where traces are off.

    By the first span vLLM has set the provider of its own tracing.
    """
    global _tracer, _started
    if _started and _tracer is None:
        try:
            _tracer = _provider().get_tracer("dejakv")
        except Exception as error:
            # A variable of the SDK with a value that it refuses.
            log.warning("no traces are sent: %s", error)
            _started = False
    return _tracer


def span(
    name: str,
    attributes: Mapping[str, Any] | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    server: bool = False,
) -> AbstractContextManager[Any]:
    """Return a context manager for a span, which is the current one within it.

    An exception marks the span as failed by its class alone, since its text may quote a prompt.

    Parameters
    ----------
    name : str
        Name of the span.
    attributes : Mapping[str, Any] or None
        First attributes; empty ones are left out.
    headers : Mapping[str, str] or None
        HTTP headers, names in lower case, whose trace is continued; by default the current one.
    server : bool
        Whether the span is a server's view of a request.

    Returns
    -------
    AbstractContextManager[Any]
        It gives OpenTelemetry's span, or None where traces are off.
    """
    tracer = _current_tracer() if _started else None
    return _NO_SPAN if tracer is None else _span(tracer, name, attributes, headers, server)


@contextmanager
def _span(
    tracer: Any,
    name: str,
    attributes: Mapping[str, Any] | None,
    headers: Mapping[str, str] | None,
    server: bool,
) -> Generator[Any]:
    from opentelemetry.trace import SpanKind

    with tracer.start_as_current_span(
        name,
        context=_context_of(headers),
        kind=SpanKind.SERVER if server else SpanKind.INTERNAL,
        attributes=present(attributes or {}),
        record_exception=False,
        set_status_on_exception=False,
    ) as current:
        try:
            yield current
        except BaseException as error:
            mark_failed(current, type(error).__name__)
            raise


def _context_of(headers: Mapping[str, str] | None) -> Any:
    """Return the context of a trace that headers name; None without headers."""
    from opentelemetry import propagate

    return None if headers is None else propagate.extract(headers)


def mark_failed(current: Any, kind: str) -> None:
    """Mark a span as failed, by the class of an error or a status."""
    from opentelemetry.trace import Status, StatusCode

    current.set_status(Status(StatusCode.ERROR))
    current.set_attribute("error.type", kind)


def present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that have a value.

    Examples
    --------
    >>> present({"dejakv.level": "", "dejakv.score": None, "dejakv.reused_tokens": 0})
    {'dejakv.reused_tokens': 0}
    """
    return {name: value for name, value in attributes.items() if value not in (None, "")}


def annotate(attributes: Mapping[str, Any]) -> None:
    """Add attributes to the current span, if there is one."""
    if _started:
        from opentelemetry import trace

        trace.get_current_span().set_attributes(present(attributes))


def forward_headers() -> dict[str, str]:
    """Return the headers that continue the current trace behind this process.

    They are empty unless the process has traces besides ours: vLLM without its own tracing warns of
    headers that it has no use for.
    """
    carrier: dict[str, str] = {}
    if _started and _own_provider is None:
        from opentelemetry import propagate

        propagate.inject(carrier)
    return carrier


@dataclass(frozen=True)
class Handover:
    """The current trace on its way to another thread.

    Attributes
    ----------
    context : Any
        OpenTelemetry's context.
    begun_ns : int
        When it was handed over, in nanoseconds since 1970.
    """

    context: Any
    begun_ns: int


def hand_over() -> Handover | None:
    """Take the current trace along for another thread; None where traces are off."""
    if not _started:
        return None
    from opentelemetry import context

    return Handover(context.get_current(), time.time_ns())


def taken_over(handover: Handover | None, queue: str = "") -> AbstractContextManager[None]:
    """Return a context manager in which the trace of another thread is the current one.

    Parameters
    ----------
    handover : Handover or None
        The trace, or None where traces are off.
    queue : str
        Name of a span for the time since the handover; empty for none.
    """
    return _NO_SPAN if handover is None else _taken_over(handover, queue)


@contextmanager
def _taken_over(handover: Handover, queue: str) -> Generator[None]:
    from opentelemetry import context

    tracer = _current_tracer()
    if queue and tracer is not None:
        waited = tracer.start_span(queue, handover.context, start_time=handover.begun_ns)
        waited.end()

    token = context.attach(handover.context)
    try:
        yield
    finally:
        context.detach(token)


class OpenSpan:
    """A span that is begun and ended in different calls, as in an engine loop.

    Parameters
    ----------
    name : str
        Name of the span.
    attributes : Mapping[str, Any]
        First attributes.
    parent : OpenSpan or None
        The span that it is a part of.
    headers : Mapping[str, str] or None
        HTTP headers whose trace is continued, without a parent.
    """

    def __init__(
        self,
        name: str,
        attributes: Mapping[str, Any],
        parent: "OpenSpan | None" = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context

        # An empty context where there is neither: the engine loop has no current span.
        context = parent.handover.context if parent is not None else _context_of(headers)
        context = context if context is not None else Context()
        self._span = _current_tracer().start_span(name, context, attributes=present(attributes))
        self.handover = Handover(trace.set_span_in_context(self._span, context), 0)

    def end(self, attributes: Mapping[str, Any], problem: str = "") -> None:
        """End the span with these attributes, and mark it as failed if there is a problem."""
        self._span.set_attributes(present(attributes))
        if problem:
            mark_failed(self._span, problem)
        self._span.end()


def open_span(
    name: str,
    attributes: Mapping[str, Any],
    parent: OpenSpan | None = None,
    headers: Mapping[str, str] | None = None,
) -> OpenSpan | None:
    """Begin a span (see `OpenSpan`); None where traces are off."""
    if not _started or _current_tracer() is None:
        return None
    return OpenSpan(name, attributes, parent, headers)
