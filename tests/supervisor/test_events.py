"""Events as lines of JSON: what is written can be read, and nothing else passes for an event."""

from __future__ import annotations

import json

import pytest

from tt_cli.supervisor import events
from tt_cli.supervisor.events import EVENTS, Event, from_json

ONE_OF_EACH: list[Event] = [
    events.Log("two\nlines, ß, \u2028", "warning"),
    events.Choice("micro-batch", "16", "fastest of 4, 8, 16"),
    events.Card("GPU-4f1c"),
    events.Phase("training", "towards step 8"),
    events.Listening("Qm", ["/ip4/127.0.0.1/tcp/1/p2p/Qm"], False),
    events.Progress(7, 1, 2, 3, 4, 5.5, 6.5, 0.25, 7.5, None, 8, 9, 10),
    events.Contribution(7, 16),
    events.Round(7, "committed", "made", ["a", "b"], 0.5, 9, {"whole": 1.5}, {"b": "sent NaN"}),
    events.Step(7, 4.25, 1e-3, 2.5, "ab12"),
    events.Download(2**20, 2**30, 3, bytes_per_second=1e6, eta=2.5),
    events.Synchronised(7, "Qm", "ab12", 1.5, 2**40, chunks=1, names=["b.weight[3]"]),
    events.Saved(7, "/tmp/x"),
    events.Snapshot({"peers": [{"user": "ß"}], "loss": None}),
    events.Trouble("state download", "peer …2r1C went away at 40 %", "goes on with another"),
    events.Failure("the disk is full", 1),
    events.Finished("left"),
]


def test_there_is_an_example_of_every_event() -> None:
    assert {type(event) for event in ONE_OF_EACH} == set(EVENTS.values()) == set(Event.__subclasses__())
    assert all(cls.kind == kind for kind, cls in EVENTS.items())


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda event: event.kind)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    line = event.to_json()
    assert "\n" not in line
    assert json.loads(line)["kind"] == event.kind
    later = json.dumps({**json.loads(line), "invented_later": [1]})  # fields of a later version are ignored
    assert from_json(line) == from_json(later) == event


@pytest.mark.parametrize(
    "line",
    [
        "",
        "hello",
        "[]",
        "null",
        '"log"',
        "{}",
        '{"kind": "event"}',
        '{"kind": ""}',
        '{"kind": null}',
        '{"kind": ["log"]}',
        '{"kind": {}}',
        '{"kind": "log"}',
        '{"kind": "step", "epoch": 3}',
        '{"kind": "log", "message": "torn',
    ],
)
def test_anything_else_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        from_json(line)


def test_the_time_is_that_of_the_event_and_is_kept() -> None:
    event = events.Finished("left", at=12.5)
    assert from_json(event.to_json()).at == 12.5
    assert events.Finished("left").at > 1.7e9
