"""The tape by itself: what lives, what is kept, what repetition costs."""

from __future__ import annotations

from tt_cli.memory.tape import WORKSPACE, Storage, Tape, Value


def kept(tape: Tape, x: Value) -> Value:
    """An operation that keeps its input."""
    out = tape.value(x.count, x.item, "layer")
    size = x.size
    return tape.record(out, [x], [x.storage], lambda g, kept: [tape.work(size)])


def test_a_storage_counts_until_nobody_refers_to_it() -> None:
    tape = Tape()
    first = Storage(tape, 10, "a")
    second = Storage(tape, 5, "b")
    assert (tape.now, tape.peak) == (15, 15)
    del first
    third = Storage(tape, 2, "a")
    assert (tape.now, tape.peak, tape.at_peak) == (7, 15, {"a": 10, "b": 5})
    del second, third
    assert tape.now == 0


def test_what_nodes_keep_lives_until_the_way_back() -> None:
    tape = Tape()
    x = tape.value(4, 4, "input")
    for _ in range(3):
        x = kept(tape, x)
    assert tape.now == 4 * 16
    del x
    tape.backward()
    # three kept, the incoming gradient, and the one that follows from it
    assert tape.peak == 3 * 16 + 2 * 16 and tape.at_peak[WORKSPACE] == 32


def test_without_recording_nothing_is_kept() -> None:
    tape = Tape(recording=False)
    x = tape.value(4, 4, "input")
    for _ in range(5):
        x = kept(tape, x)
    assert tape.now == 16 and tape.peak == 32


def twice(tape: Tape) -> int:
    """Peak of six layers of three operations each, checkpointed."""
    x = tape.value(1, 100, "input")
    for _ in range(6):
        x = tape.checkpoint(lambda x: kept(tape, kept(tape, kept(tape, x))), x)
    del x
    tape.backward()
    return tape.peak


def test_checkpoints_keep_inputs_and_one_layer() -> None:
    plain = Tape()
    x = plain.value(1, 100, "input")
    for _ in range(18):
        x = kept(plain, x)
    del x
    plain.backward()
    assert plain.peak == 2000
    # six inputs, the incoming gradient, two results of the repeated layer, and a gradient within
    assert twice(Tape()) == 6 * 100 + 100 + 2 * 100 + 100


def test_reversible_layers_do_not_grow_with_depth() -> None:
    peaks = []
    for depth in (4, 40):
        tape = Tape()
        x = tape.value(1, 100, "input")
        for _ in range(depth):
            x = tape.checkpoint(lambda x, tape=tape: kept(tape, kept(tape, x)), x, reversible=True)
        del x
        tape.backward()
        peaks.append(tape.peak)
    assert peaks[0] == peaks[1]


def test_all_is_freed_in_the_end() -> None:
    tape = Tape()
    twice(tape)
    assert tape.now <= 100  # the input's own gradient at most, which nobody took
