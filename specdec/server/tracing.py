"""Spans of requests for OpenTelemetry, by its own instrumentation of FastAPI."""

from __future__ import annotations

import os

from fastapi import FastAPI

from specdec.errors import SpecdecError

COLLECTOR = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Environment variables, either of which names the collector."""
_SILENT = "/health$,/ready$,/metrics$"  # asked every few seconds


def trace(app: FastAPI) -> None:
    """Sends one span per request, without its text, to the collector that the environment names, if it does.

    OpenTelemetry reads its other variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER). Raises SpecdecError without its
    packages.
    """
    if not any(os.environ.get(name) for name in COLLECTOR):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise SpecdecError(f"{COLLECTOR[0]} is set: pip install -e '.[tracing]', or unset it") from None
    named = Resource({SERVICE_NAME: "specdec"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=Resource.create().merge(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    app.state.server.at_close(provider.shutdown)
    FastAPIInstrumentor.instrument_app(
        app, tracer_provider=provider, excluded_urls=_SILENT, exclude_spans=["receive", "send"]
    )
