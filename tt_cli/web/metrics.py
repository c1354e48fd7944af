"""What Prometheus reads: the swarm as it was last seen, and this process."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily

from tt_cli.errors import TTError
from tt_cli.web.live_updates import Live
from tt_cli.web.queries import Answers, NothingYet

CONTENT_TYPE = CONTENT_TYPE_LATEST
_OF_SNAPSHOT = {
    "epoch": ("tt_step", "Global steps done"),
    "total_steps": ("tt_total_steps", "Global steps of the whole run"),
    "samples": ("tt_samples_towards_step", "Samples accumulated by the swarm towards the next step"),
    "target_batch_size": ("tt_target_batch_size", "Samples that make one global step"),
    "samples_per_second": ("tt_samples_per_second", "Of all trainers together"),
    "loss": ("tt_loss", "Median training loss of the trainers' last steps"),
    "trainers": ("tt_trainers", "Training peers"),
    "holders": ("tt_state_holders", "Peers that have a state of this step"),
    "agreeing": ("tt_state_agreeing", "Those of them that hold the digest of the majority"),
    "resynced_chunks": ("tt_resynced_chunks", "Chunks of state that peers took again, as they differed"),
    "age_s": ("tt_snapshot_age_seconds", "Age of what is told here of the swarm"),
}


class Metrics:
    """All that is told, gathered when it is asked for."""

    def __init__(self, answers: Answers, live: Live):
        self._answers, self._live = answers, live
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield GaugeMetricFamily("tt_live_clients", "Pages that follow live updates", self._live.clients)
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
        for key, (name, words) in _OF_SNAPSHOT.items():
            if isinstance(value := snapshot.get(key), int | float):
                yield GaugeMetricFamily(name, words, value)
        peers = snapshot["peers"]
        yield GaugeMetricFamily("tt_aux_peers", "Auxiliary peers", sum(peer["role"] == "aux" for peer in peers))
        behind = sum(peer["client_mode"] for peer in peers)
        yield GaugeMetricFamily("tt_client_mode_peers", "Peers that others cannot dial", behind)
