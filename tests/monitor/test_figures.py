"""A figure of a peer is declared once, in `PeerFigures` or `PeerView`; every screen has it by that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from monitor.made import TRAINER, snapshot, trainer
from swarm.made import record

from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import HistoryWriter, database_url
from tt_cli.monitor.peer_tables import PEER_COLUMNS, declared, peers_table, written
from tt_cli.monitor.snapshot_text import plain_text
from tt_cli.run import load_run
from tt_cli.swarm.records.peer_record import PeerFigures, PeerRecord
from tt_cli.swarm.records.snapshot import PEER_FIELDS, PeerView, take_snapshot
from tt_cli.web.live_updates import LiveUpdates
from tt_cli.web.metrics import Metrics
from tt_cli.web.queries import Answers
from tt_cli.web.web_app import make_app

RUN = load_run("emoji")
FULL = trainer(
    **{"inner_steps": 11, "sent_per_hour": 222_000, "received_per_hour": 223_000},
    **{"resynced_chunks": 2, "clipped_by": 3, "accused_by": 4, "slow_by": 5, "lag": 6, "figures": {"text": 1.5}},
)
FIGURES = sorted(PeerView.model_fields)
NUMBERS = [name for name in FIGURES if isinstance(getattr(FULL, name), int | float)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("history")
    store = HistoryWriter(database_url(folder), RUN.identity)
    store.put("snapshot", json.dumps(snapshot(peers=[FULL]).to_json()), 1_000_000.0)
    store.close()
    return Answers(HistoryReader(database_url(folder)), RUN, "emoji", lambda: 1_000_000.0)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_on_every_screen(name: str, answers: Answers, tmp_path: Path) -> None:
    shown = declared(name)
    assert snapshot(peers=[FULL]).to_json()["peers"][0][name] == getattr(FULL, name)
    assert PEER_FIELDS[name] and shown["label"]  # what `tt monitor --help` and the page's reader are told
    schema: dict[str, Any] = make_app(answers, tmp_path).openapi()["components"]["schemas"]["PeerView"]
    assert schema["properties"][name]["label"] == shown["label"]
    assert answers.snapshot()["peers"][0][name] == getattr(FULL, name)
    if name in ("peer_id", "user"):  # the peer's name
        return
    heading, line = (text.plain for text in peers_table(snapshot(peers=[FULL]), 1000, 9))
    assert shown["label"] in heading
    text = plain_text(snapshot(peers=[FULL]))
    if name not in ("lag", "accused_by", "client_mode"):  # in the table; in words where it is unusual
        assert written(FULL, name) in line and written(FULL, name) in text


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_is_measured(name: str, answers: Answers) -> None:
    told = Metrics(answers, LiveUpdates(answers)).text().decode()
    for of in ("least", "middle", "most"):
        assert f'tt_peer_{name}{{of="{of}"}} {float(getattr(FULL, name))}' in told


def test_what_a_peer_publishes_is_what_others_see_of_it() -> None:
    assert set(PeerFigures.model_fields) <= set(PeerRecord.model_fields)
    assert set(PeerFigures.model_fields) < set(PeerView.model_fields)
    told = record("a", figures={"text": 1.5}, loss=2.0, user="ada", round="made")
    (seen,) = take_snapshot(RUN, [told], None, 1000.0).peers
    assert {name: getattr(seen, name) for name in PeerFigures.model_fields} == {
        name: getattr(told, name) for name in PeerFigures.model_fields
    }


def test_no_column_is_made_by_hand_but_those_of_name_and_state() -> None:
    labels = {declared(name)["label"] for name in FIGURES}
    assert [column.title for column in PEER_COLUMNS if column.title not in labels] == ["peer", "state"]
    assert TRAINER.figures == {}
