"""Spans of requests, as OpenTelemetry's own instrumentation makes them."""

import sys

import httpx
import pytest

from specdec.errors import SpecdecError
from specdec.server.metrics import COLLECTOR, trace
from tests.server.served import app

CALLER = "0af7651916cd43dd8448eb211c80319c"


async def test_spans_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for every request, in its caller's trace, with nothing that was asked; a stream's events have none.

    The last ones are sent when the server ends. (Those of its last seconds were lost.)
    """
    pytest.importorskip("opentelemetry.instrumentation.fastapi")
    exporting = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    exporter = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    monkeypatch.setattr(exporting, "OTLPSpanExporter", lambda: exporter)
    monkeypatch.setenv(COLLECTOR[0], "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # milliseconds: until the end
    application = app()
    trace(application)
    body = {"prompt": "secret words", "max_tokens": 4, "stream": True}
    parent = {"traceparent": f"00-{CALLER}-b7ad6b7169203331-01"}
    to = httpx.ASGITransport(application)
    async with (
        application.router.lifespan_context(application),
        httpx.AsyncClient(transport=to, base_url="http://localhost") as client,
    ):
        assert (await client.post("/v1/completions", json=body, headers=parent)).status_code == 200
        assert (await client.get("/ready")).status_code == 200  # which makes none
        assert (await client.post("/v1/chat/completions", json={"messages": []})).status_code == 400
        assert exporter.get_finished_spans() == ()
    [span, last] = exporter.get_finished_spans()
    assert (span.name, span.kind.name) == ("POST /v1/completions", "SERVER")
    assert f"{span.context.trace_id:032x}" == CALLER
    assert [span.attributes[f"http.{name}"] for name in ("route", "status_code")] == ["/v1/completions", 200]
    assert (last.name, last.attributes["http.status_code"]) == ("POST /v1/chat/completions", 400)
    sender = span.resource.attributes
    assert (sender["service.name"], sender["deployment.environment"]) == ("specdec", "test")
    assert "secret" not in span.to_json()


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
