"""Spans of requests for OpenTelemetry, by its own instrumentation, where a collector is named."""

from __future__ import annotations

import os
from typing import Any

from fastapi import FastAPI

from specdec.errors import SpecdecError

COLLECTOR = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Either of these names a collector, as in every program with OpenTelemetry."""
_SILENT = "/health$,/ready$,/metrics$"  # asked every few seconds


def trace(app: FastAPI) -> None:
    """Sends a span for every request to the collector that the environment names, if it names one; the last at its end.

    OpenTelemetry's own variables say the rest (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER). Raises SpecdecError where its
    packages are not installed.
    """
    if not any(os.environ.get(name) for name in COLLECTOR):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise SpecdecError(f"{COLLECTOR[0]} is set: pip install -e '.[tracing]', or unset it") from None
    named = Resource({SERVICE_NAME: "specdec"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=Resource.create().merge(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    app.state.server.at_close(provider.shutdown)
    instrument(app, provider)


def instrument(app: FastAPI, provider: Any) -> None:
    """Has every request make a span, without one for each event of a stream; what is asked and answered is in none."""
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor

    FastAPIInstrumentor.instrument_app(
        app, tracer_provider=provider, excluded_urls=_SILENT, exclude_spans=["receive", "send"]
    )
