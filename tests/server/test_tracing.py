"""Spans of requests, as OpenTelemetry's own instrumentation makes them and a collector gets them."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from specdec.errors import SpecdecError
from specdec.server.tracing import COLLECTOR, trace
from tests.server.served import app

CALLER = "0af7651916cd43dd8448eb211c80319c"


class Collector(HTTPServer):
    """Keeps what is sent to it in OTLP's protobuf."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Traces)
        self.paths, self.bodies = list[str](), list[bytes]()


class _Traces(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes of a span or resource as a dict."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


async def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for every request, in its caller's trace, with nothing that was asked; a stream's events have none.

    The last ones are sent when the server ends. (Those of its last seconds were lost.)
    """
    pytest.importorskip("opentelemetry.instrumentation.fastapi")
    traces = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    collector, application = Collector(), app()
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    monkeypatch.setenv(COLLECTOR[0], f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # milliseconds: until the end
    trace(application)
    asked = {"prompt": "secret words", "max_tokens": 4, "stream": True}
    parent = {"traceparent": f"00-{CALLER}-b7ad6b7169203331-01"}
    to = httpx.ASGITransport(application)
    async with (
        application.router.lifespan_context(application),
        httpx.AsyncClient(transport=to, base_url="http://localhost") as client,
    ):
        assert (await client.post("/v1/completions", json=asked, headers=parent)).status_code == 200
        assert (await client.get("/ready")).status_code == 200  # which makes none
        assert (await client.post("/v1/chat/completions", json={"messages": []})).status_code == 400
        assert collector.bodies == []
    collector.shutdown()
    thread.join()
    collector.server_close()
    assert collector.paths == ["/v1/traces"]
    [found] = traces.ExportTraceServiceRequest.FromString(collector.bodies[0]).resource_spans
    [span, last] = [span for scope in found.scope_spans for span in scope.spans]
    assert (span.name, span.kind, span.trace_id.hex()) == ("POST /v1/completions", span.SPAN_KIND_SERVER, CALLER)
    assert [plain(span.attributes).get(f"http.{name}") for name in ("route", "status_code")] == ["/v1/completions", 200]
    assert (last.name, plain(last.attributes)["http.status_code"]) == ("POST /v1/chat/completions", 400)
    sender = plain(found.resource.attributes)
    assert (sender["service.name"], sender["deployment.environment"]) == ("specdec", "test")
    assert b"secret" not in collector.bodies[0]


def test_no_collector_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded unless one is named; where its packages lack, the error says what to install."""
    application = app()
    for name in COLLECTOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    trace(application)
    monkeypatch.setenv(COLLECTOR[0], "http://127.0.0.1:1")
    with pytest.raises(SpecdecError, match=r"-e '\.\[tracing\]'"):
        trace(application)
