"""Spans of a running server, as they come in at a collector."""

from __future__ import annotations

import gzip
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import serving

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `tracing` is not installed")
pytest.importorskip("opentelemetry.instrumentation.fastapi", reason="the extra `tracing` is not installed")
collected = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

pytestmark = pytest.mark.slow
CALLER = "0af7651916cd43dd8448eb211c80319c"
SOON = 30.0  # seconds


class Collector(ThreadingHTTPServer):
    """Takes what is sent to /v1/traces in OTLP's protobuf, and answers as a collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Traces)
        self.requests: list[Any] = []
        self.paths: list[str] = []
        self.raw = b""

    @property
    def spans(self) -> list[Any]:
        """All of them, in the order in which they came in."""
        scopes = [scope for request in self.requests for one in request.resource_spans for scope in one.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    @property
    def resource(self) -> dict[str, Any]:
        """Who sent them."""
        return plain(self.requests[0].resource_spans[0].resource.attributes)


class _Traces(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        self.server.paths.append(self.path)
        self.server.raw += body
        self.server.requests.append(collected.ExportTraceServiceRequest.FromString(body))
        answer = collected.ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes of a span or resource as a dict."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a port of this machine."""
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield collector
        collector.shutdown()


def test_spans_reach_a_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is one there, in its caller's trace, with its attributes.

    The last ones are sent when the server is told to end. (Those of its last seconds were lost.)
    """
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # milliseconds: until the end
        with serving(tmp_path) as server, server.client() as client:
            asked = {"model": "tiny", "prompt": "secret words", "max_tokens": 4}
            parent = {"traceparent": f"00-{CALLER}-b7ad6b7169203331-01"}
            assert client.post("/v1/completions", json=asked, headers=parent).status_code == 200
            assert client.get("/ready").status_code == 200  # which makes none
            assert client.post("/v1/chat/completions", json={"model": "nobody", "messages": []}).status_code == 400
            assert collector.requests == []
            server.popen.send_signal(signal.SIGTERM)
            server.popen.wait(SOON)
        assert "Traceback" not in server.log.read_text()
        [span, last] = collector.spans
    assert set(collector.paths) == {"/v1/traces"}
    assert (span.name, span.kind, span.trace_id.hex()) == ("POST /v1/completions", span.SPAN_KIND_SERVER, CALLER)
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < SOON * 1e9
    attributes = plain(span.attributes)
    assert attributes["http.route"] == "/v1/completions"
    assert [attributes.get(f"http.{name}") for name in ("method", "status_code")] == ["POST", 200]
    assert (last.name, plain(last.attributes)["http.status_code"]) == ("POST /v1/chat/completions", 400)
    found = collector.resource
    assert (found["service.name"], found["deployment.environment"]) == ("specdec", "test")
    assert found["telemetry.sdk.language"] == "python"
    assert b"secret" not in collector.raw
