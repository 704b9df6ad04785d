"""Spans of requests, as OpenTelemetry's own instrumentation makes them."""

from __future__ import annotations

import sys

import pytest

from specdec.errors import SpecdecError
from specdec.server.tracing import COLLECTOR, instrument, trace
from tests.server.served import app, asking


def test_spans() -> None:
    """One for every request, in the caller's trace, with nothing that was asked; a stream's events have none."""
    pytest.importorskip("opentelemetry.instrumentation.fastapi")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider, application = InMemorySpanExporter(), TracerProvider(), app()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrument(application, provider)
    caller = "0af7651916cd43dd8448eb211c80319c"
    with asking(application, traceparent=f"00-{caller}-b7ad6b7169203331-01") as c:
        c.post("/v1/completions", json={"prompt": "secret", "max_tokens": 9, "stream": True})
        c.get("/health")
    [span] = exporter.get_finished_spans()
    assert span.name == "POST /v1/completions"
    assert f"{span.context.trace_id:x}".zfill(32) == caller
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
