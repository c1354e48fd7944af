"""Figures for Prometheus: the swarm as it was last seen, and this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily

from tt_cli.errors import TTError
from tt_cli.swarm.records.snapshot import PeerView
from tt_cli.web.live_updates import LiveUpdates
from tt_cli.web.queries import Answers, NothingYet
from tt_cli.web.schemas import Snapshot

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """All figures, gathered when they are asked for."""

    def __init__(self, answers: Answers, live: LiveUpdates):
        self._answers, self._live = answers, live
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield GaugeMetricFamily("tt_live_clients", "Pages that follow live updates", self._live.clients.total())
        try:
            self._answers.history.look()
            newest = self._answers.history.newest
            recorded = self._answers.history.mark[1]
            yield GaugeMetricFamily("tt_recorded_steps", "Steps in the recorded history", recorded)
            if newest is not None:
                yield GaugeMetricFamily("tt_last_recorded_step", "The newest of them", newest[0])
            snapshot = self._answers.snapshot()
        except (TTError, NothingYet) as error:
            yield GaugeMetricFamily("tt_database_up", "Whether the history answers", isinstance(error, NothingYet))
            return
        yield GaugeMetricFamily("tt_database_up", "Whether the history answers", 1)
        for name, field in Snapshot.model_fields.items():
            if isinstance(value := snapshot.get(name), int | float) and name != "time":
                declared = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
                yield GaugeMetricFamily(str(declared.get("metric", f"tt_{name}")), field.description or "", value)
        peers = snapshot["peers"]
        yield GaugeMetricFamily("tt_aux_peers", "Auxiliary peers", sum(peer["role"] == "aux" for peer in peers))
        behind = sum(peer["client_mode"] for peer in peers)
        yield GaugeMetricFamily("tt_client_mode_peers", "Peers that others cannot dial", behind)
        yield from _of_trainers([peer for peer in peers if peer["role"] == "trainer"])


def _of_trainers(peers: list[dict[str, Any]]) -> Iterator[Metric]:
    """Least, middle and most of each figure of the trainers: as many lines for ten of them as for ten thousand."""
    for name, field in PeerView.model_fields.items():
        values = sorted(float(peer[name]) for peer in peers if isinstance(peer.get(name), int | float))
        if not values:
            continue
        family = GaugeMetricFamily(f"tt_peer_{name}", field.description or "", labels=["of"])
        for of, place in (("least", 0), ("middle", len(values) // 2), ("most", -1)):
            family.add_metric([of], values[place])
        yield family
