"""Samples per second, with a clock set by hand."""

from __future__ import annotations

from swarm.made import SteppedClock, record

from tt_cli.swarm.reporting.throughput import WINDOW_SECONDS, Throughput, bytes_per_hour


def test_it_is_the_mean_since_the_start_and_later_over_the_window() -> None:
    clock = SteppedClock(100.0)
    throughput = Throughput(clock)
    assert throughput.per_second() == 0.0
    for _ in range(int(WINDOW_SECONDS) // 2):
        clock.now += 1.0
        throughput.add(8)
        assert throughput.per_second() == 8.0
    for _ in range(int(WINDOW_SECONDS)):
        clock.now += 1.0
        throughput.add(4)
    assert abs(throughput.per_second() - 4.0) < 8.0 / WINDOW_SECONDS


def test_a_pause_lowers_it_until_nothing_is_left() -> None:
    clock = SteppedClock(100.0)
    throughput = Throughput(clock)
    clock.now += 10.0
    throughput.add(30)
    assert throughput.per_second() == 3.0
    clock.now += 10.0
    assert throughput.per_second() == 1.5
    clock.now += 19.0
    assert throughput.per_second() == 1.0
    clock.now += 2.0
    assert throughput.per_second() == 0.0


def test_the_clock_may_stand_still() -> None:
    throughput = Throughput(SteppedClock(100.0))
    throughput.add(5)
    assert throughput.per_second() == 0.0


def test_traffic_of_an_hour_is_that_of_whole_steps() -> None:
    marks = [(100.0, 5_000.0, 90_000.5), (160.0, 5_100.0, 90_200.5), (400.0, 6_000.0, 90_200.5)]
    assert bytes_per_hour(marks[:0]) == bytes_per_hour(marks[:1]) == [0, 0], "the first step tells no time"
    assert bytes_per_hour([marks[0], marks[0]]) == [0, 0], "nor does a clock that stands still"
    assert bytes_per_hour(marks[:2]) == [6_000, 12_000]
    assert bytes_per_hour(marks) == [12_000, 2_400]
    record(
        **dict(
            zip(("sent_per_hour", "received_per_hour"), bytes_per_hour([marks[0], (101.0, 1e12, 1e12)]), strict=True)
        )
    )
