"""A collector of OpenTelemetry's traces in this process: OTLP over HTTP, as its real exporters send it."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Spans:
    def __init__(self, spans: list[Any]) -> None:
        self.spans = spans

    def named(self, name: str) -> Any:
        return next(span for span in self.spans if span.name == name)

    def parent_name(self, span: Any) -> str:
        return next((each.name for each in self.spans if each.span_id == span.parent_span_id), "")


class Collector(Spans):
    """Receives OTLP, and holds the spans by name with their attributes as plain values."""

    def __init__(self) -> None:
        super().__init__([])
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                assert self.path == "/v1/traces"
                sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in sent.resource_spans:
                    collector.services |= {
                        each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
                    }
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
        self._thread.join()

    def of_trace(self, trace: str) -> "Spans":
        return Spans([span for span in self.spans if span.trace_id.hex() == trace])


def attributes(span: Any) -> dict[str, Any]:
    values = {each.key: each.value for each in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}
