"""What a record may hold: it comes from anyone."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError
from swarm.made import USUAL, record

from tt_cli.swarm.records.peer_record import HistoryRecord, PeerRecord

COUNTS = ["epoch", "samples", "total_samples", "micro_batch", "resynced_chunks", "sent_per_hour", "received_per_hour"]
MOVED = ["bytes_sent", "bytes_received"]
NUMBERS = ["samples_per_second", "time"]
TEXTS = ["peer_id", "user", "version", "device", "round"]


def test_a_record_comes_back_from_its_plain_form() -> None:
    full = record(
        user="ß", device="CPU", micro_batch=4, loss=2.5, figures={"text_loss": 1.0, "image_loss": 3.0}, round="made"
    )
    assert PeerRecord.model_validate(full.model_dump()) == full


@pytest.mark.parametrize("name", COUNTS + NUMBERS)
@pytest.mark.parametrize("value", [-1, 10**13, math.nan, math.inf, -math.inf, "many", None])
def test_numbers_have_bounds(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        record(**{name: value})


@pytest.mark.parametrize("name", MOVED)
def test_a_peer_may_run_for_weeks_on_a_fast_line(name: str) -> None:
    assert getattr(record(**{name: 6 * 7 * 86_400 * 125_000_000}), name) > 4 * 10**14  # 1 Gbit/s
    for value in (-1, 2**53, math.inf, None):
        with pytest.raises(ValidationError, match=name):
            record(**{name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, -1e300])
def test_losses_are_such_that_their_weighted_mean_is_finite(value: float) -> None:
    with pytest.raises(ValidationError, match="loss"):
        record(loss=value)
    with pytest.raises(ValidationError, match="figures"):
        record(figures={"text_loss": value})
    largest = 3.4028235e38  # of fp32: a peer that diverges can still say so
    full = record(loss=largest, figures={"text_loss": largest})
    assert math.isfinite(full.loss * 1e12) and math.isfinite(full.figures["text_loss"] * 1e12)


@pytest.mark.parametrize(
    "figures",
    [
        {"": 1.0},
        {"x" * 25: 1.0},
        {"Text": 1.0},
        {"a\n": 1.0},
        {"a": "x"},
        {"a": None},
        {f"f{i}": 0.0 for i in range(5)},
    ],
)
def test_figures_are_at_most_four_numbers_of_short_names(figures: dict[str, float]) -> None:
    record(figures={f"f{i}": 0.0 for i in range(4)})
    with pytest.raises(ValidationError, match="figures"):
        record(figures=figures)


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_short(name: str) -> None:
    record(**{name: "x" * 80})
    with pytest.raises(ValidationError, match=name):
        record(**{name: "x" * 81})


@pytest.mark.parametrize("digest", ["AB", "xyz", "a" * 65, "ab\n", None])
def test_a_digest_is_hexadecimal(digest: object) -> None:
    with pytest.raises(ValidationError, match="digest"):
        record(digest=digest)


@pytest.mark.parametrize("role", ["observer", "", "trainer\n", "aux trainer"])
def test_there_are_two_roles(role: str) -> None:
    with pytest.raises(ValidationError, match="role"):
        record(role=role)


@pytest.mark.parametrize("missing", sorted(USUAL))
def test_what_every_peer_knows_of_itself_is_required(missing: str) -> None:
    with pytest.raises(ValidationError, match=missing):
        PeerRecord.model_validate({key: value for key, value in USUAL.items() if key != missing})


def test_nothing_may_be_added() -> None:
    with pytest.raises(ValidationError, match="blob"):
        record(blob="x" * 10**6)


def test_a_history_is_short_and_finite() -> None:
    assert HistoryRecord(steps=[(1, 2.5, 1000.0)] * 256)
    for steps in ([(1, 2.5, 1000.0)] * 257, [(1, math.nan, 1000.0)], [(-1, 2.5, 1000.0)], [(1, 2.5)]):
        with pytest.raises(ValidationError):
            HistoryRecord.model_validate({"steps": steps})
