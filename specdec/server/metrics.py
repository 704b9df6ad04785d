"""Metrics for Prometheus, and spans of requests for OpenTelemetry, by OpenTelemetry's instrumentation of FastAPI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from specdec.core.stats import Stats
from specdec.errors import SpecdecError

COLLECTOR = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Environment variables that name the collector."""
_SILENT = "/health$,/ready$,/metrics$"  # asked every few seconds
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_POSITIONS = 16  # in a draft, counted separately
_LOADS = {  # entries of a host's load
    "running": ("num_requests_running", "Requests that run."),
    "waiting": ("num_requests_waiting", "Requests that wait for their turn."),
    "kv_tokens_held": ("kv_tokens_held", "Tokens of running requests whose keys and values are held."),
    "kv_tokens_free": ("kv_tokens_free", "Tokens that still fit into the model's kv_budget."),
}


class Metrics:
    """All metrics of one server, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, timer = partial(self._metric, Counter), partial(self._metric, Histogram, buckets=_SECONDS)
        self.requests = counter("requests", "Answers, by endpoint and status.", "endpoint", "status")
        text = "Requests whose client left, or whose connection the server closed."
        self.aborted = counter("requests_aborted", text, "endpoint")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.", "model")
        self.cached_tokens = counter("prompt_tokens_cached", "Tokens of prompts that the prefix cache had.", "model")
        self.new_tokens = counter("generation_tokens", "New tokens.", "model")
        self.drafts = counter("spec_decode_num_drafts", "Passes that verified drafted tokens.", "model")
        self.drafted = counter("spec_decode_num_draft_tokens", "Drafted tokens.", "model")
        accepted = "Drafted tokens that were accepted"
        self.accepted = counter("spec_decode_num_accepted_tokens", f"{accepted}.", "model")
        by_position = f"{accepted}, by position in the draft."
        self.per_position = counter("spec_decode_num_accepted_tokens_per_pos", by_position, "model", "position")
        self.audio_seconds = counter("audio_seconds", "Seconds of sound that were transcribed.", "model")
        since = "Seconds from a request's arrival to its"
        self.first_token = timer("time_to_first_token_seconds", f"{since} first text, of a stream.", "model")
        between = "Seconds between tokens of a stream; the tokens of a pass share its time."
        self.between = timer("inter_token_latency_seconds", between, "model")
        self.whole = timer("e2e_request_latency_seconds", f"{since} last text.", "model")
        self.queued = timer("request_queue_time_seconds", f"{since} turn.", "model")

    def watch(self, hosts: Mapping[str, Any], uploads: Any) -> None:
        """Adds gauges of the models' loads and of uploads, which are read at every scrape."""
        for entry, name_and_help in _LOADS.items():
            gauge = self._metric(Gauge, *name_and_help, "model")
            for name, host in hosts.items():
                if host.load[entry] is not None:
                    gauge.labels(name).set_function(lambda host=host, entry=entry: host.load[entry])
        running = self._metric(Gauge, "num_uploads_running", "Recordings that arrive or are heard.")
        running.set_function(lambda: uploads.running)
        waiting = self._metric(Gauge, "num_uploads_waiting", "Recordings that wait unread.")
        waiting.set_function(lambda: uploads.waiting)

    def count(self, model: str, stats: Stats) -> None:
        """Counts a finished prompt or recording."""
        self.drafts.labels(model).inc(stats.num_draft_rounds)
        self.drafted.labels(model).inc(stats.num_draft_tokens)
        self.accepted.labels(model).inc(stats.num_accepted_draft_tokens)
        for position in range(min(max(stats.per_round_accepted, default=0), _POSITIONS)):
            reached = sum(accepted > position for accepted in stats.per_round_accepted)
            self.per_position.labels(model, str(position)).inc(reached)

    def _metric(self, kind: Any, name: str, help: str, *labels: str, **options: Any) -> Any:
        return kind(f"specdec_{name}", help, labels, registry=self.registry, **options)


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
        raise SpecdecError(
            f"{COLLECTOR[0]} is set: pip install -c constraints.txt -e '.[tracing]', or unset it"
        ) from None
    resource = Resource({SERVICE_NAME: "specdec"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=Resource.create().merge(resource))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    app.state.server.ends.callback(provider.shutdown)
    FastAPIInstrumentor.instrument_app(
        app, tracer_provider=provider, excluded_urls=_SILENT, exclude_spans=["receive", "send"]
    )
