"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.core.stats import Stats
from specdec.server.admission import Admission

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_POSITIONS = 16  # in a draft, counted separately


@dataclass(frozen=True)
class Load:
    """How full a model is: requests that run and wait, tokens that are held, and that still fit (None: no limit)."""

    running: int
    waiting: int
    kv_tokens_held: int
    kv_tokens_free: int | None


class Metrics:
    """All metrics of one server, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Answers, by endpoint and status.", "endpoint", "status")
        self.aborted = self._counter(
            "requests_aborted", "Requests whose client left, or whose connection the server closed.", "endpoint"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.", "model")
        self.cached_tokens = self._counter(
            "prompt_tokens_cached", "Tokens of prompts that the prefix cache had.", "model"
        )
        self.new_tokens = self._counter("generation_tokens", "New tokens.", "model")
        self.drafts = self._counter("spec_decode_num_drafts", "Passes that verified drafted tokens.", "model")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens.", "model")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", "model")
        self.per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by position in the draft.",
            "model",
            "position",
        )
        self.audio_seconds = self._counter("audio_seconds", "Seconds of sound that were transcribed.", "model")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first text."
        )
        self.between = self._histogram(
            "inter_token_latency_seconds", "Seconds between tokens; those of a pass share its time."
        )
        self.whole = self._histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its last text."
        )
        self.queued = self._histogram("request_queue_time_seconds", "Seconds from a request's arrival to its turn.")

    def watch(self, loads: Callable[[], Sequence[tuple[str, Load]]], uploads: Admission) -> None:
        """Adds gauges of the models' loads and of uploads, which are read at every scrape."""
        self.registry.register(_Loads(loads))
        self._gauge("num_uploads_running", "Recordings that arrive or are heard.", lambda: uploads.running)
        self._gauge("num_uploads_waiting", "Recordings that wait unread.", lambda: uploads.waiting)

    def count(self, model: str, stats: Stats) -> None:
        """Counts a finished prompt or recording."""
        self.drafts.labels(model).inc(stats.num_spec_steps)
        self.drafted.labels(model).inc(stats.num_draft_tokens)
        self.accepted.labels(model).inc(stats.num_accepted_draft_tokens)
        for position in range(min(max(stats.per_step_accepted, default=0), _POSITIONS)):
            reached = sum(accepted > position for accepted in stats.per_step_accepted)
            self.per_position.labels(model, str(position)).inc(reached)

    @property
    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Any:
        return Counter(f"specdec_{name}", help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str, value: Callable[[], int]) -> None:
        Gauge(f"specdec_{name}", help, registry=self.registry).set_function(value)

    def _histogram(self, name: str, help: str) -> Any:
        return Histogram(f"specdec_{name}", help, ("model",), registry=self.registry, buckets=_SECONDS)


class _Loads(Collector):
    """Gauges of the models' loads."""

    def __init__(self, loads: Callable[[], Sequence[tuple[str, Load]]]) -> None:
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        gauges = {
            "running": ("num_requests_running", "Requests that run."),
            "waiting": ("num_requests_waiting", "Requests that wait for their turn."),
            "kv_tokens_held": ("kv_tokens_held", "Tokens of running requests whose keys and values are held."),
            "kv_tokens_free": ("kv_tokens_free", "Tokens that still fit into the model's kv_budget."),
        }
        loads = self._loads()
        for field, (name, help) in gauges.items():
            gauge = GaugeMetricFamily(f"specdec_{name}", help, labels=["model"])
            for model, load in loads:
                if (value := getattr(load, field)) is not None:
                    gauge.add_metric([model], value)
            yield gauge
