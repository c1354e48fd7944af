"""One peer's status as lines for a terminal, from what is known of it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from tt_cli.supervisor.household.limits import until_words
from tt_cli.supervisor.peer_state import PeerState
from tt_cli.supervisor.slot import SeenSlot
from tt_cli.terminal.format import PHASE_STYLES, byte_count, clean, duration, fit, loss_value, percent, plural, rate
from tt_cli.terminal.live_view import clock
from tt_cli.terminal.swarm_lines import hourly, inner_steps

UNITS = {"max_gpu_temp": " °C", "max_upload": " Mbit/s", "max_download": " Mbit/s"}


def status_lines(seen: SeenSlot, now: float, width: int) -> list[Text]:
    """Lines of `tt status` about one peer, at most `width` wide but for what is said in words. now: Unix time."""
    status = seen.status
    title = Text(clean(status.run) + (" (aux peer)" if status.role == "aux" else ""), style="bold")
    if status.state == "ended":
        title.append(f" · ended {duration(now - status.since)} ago", style="dim")
        return [title.append(f" · {clean(status.reason)}" if status.reason else "")]
    if not seen.running:
        return [title.append(" · gone", style="bold red"), *_gone(status, now)]
    lines = [title.append(" · ").append_text(Text.assemble(*phase_words(status, now)))]
    if not seen.answers:
        words = f"it does not answer (suspended?); this was known {duration(now - status.updated)} ago"
        lines.append(Text(words, style="yellow"))
    again = f" · started again {plural(status.restarts, 'time')}" if status.restarts else ""
    up = f"{duration(now - status.started)} · process {status.pid}{again}"
    rows = [*_work(status), *_wishes(status, now), ("up", up)]
    return [*lines, *(fit(Text.assemble((f"  {label:<10}", "dim"), clean(words)), width) for label, words in rows)]


def phase_words(status: PeerState, now: float) -> list[str | tuple[str, str]]:
    """The phase in its colour, how long it has lasted, and why."""
    phase = (clean(status.state), PHASE_STYLES.get(status.state, "bold"))
    reason = f" · {clean(status.reason)}" if status.reason else ""
    return [phase, (f" for {duration(now - status.since)}", "dim"), reason]


def trouble_counts(status: PeerState) -> str:
    """Which troubles there were, and how often."""
    return ", ".join(f"{what} {trouble.count:,}" for what, trouble in sorted(status.troubles.items()))


def _work(status: PeerState) -> Iterator[tuple[str, str]]:
    if status.step is not None:
        step = f"{status.step:,} of {status.total_steps:,}"
        if status.loss is not None:
            step += f" · loss {loss_value(status.loss)}"
        if status.samples is not None and status.target_samples is not None:
            step += f" · {status.samples:,} of {status.target_samples:,} samples to the next"
        if status.inner_steps is not None:
            step += f" · {inner_steps(status.inner_steps, status.inner_steps_due)} here"
        yield "step", step
    if status.download_received is not None and status.download_total:
        received, total = status.download_received, status.download_total
        what = "weights" if status.state == "starting" else "state"
        yield what, f"{byte_count(received)} of {byte_count(total)} have come, {percent(received / total)}"
    if status.samples_per_second is not None and status.share is not None:
        own = f"{rate(status.samples_per_second)} samples/s, {percent(status.share)} of the swarm's"
        yield "speed", f"{own} {rate(status.swarm_samples_per_second or 0.0)}"
    if status.peers is not None:
        yield "swarm", plural(status.peers, "trainer")
    if status.state not in ("paused", "starting") and (batch := status.choices.get("micro-batch")) is not None:
        yield "batch", f"{batch.value}: {batch.reason}"
    if status.last_round:
        yield "round", status.last_round
    if status.saved_step is not None:
        yield "backup", f"of step {status.saved_step:,}"
    if status.bytes_sent or status.bytes_received:
        moved = f"sent {byte_count(status.bytes_sent)} · received {byte_count(status.bytes_received)}"
        yield "traffic", moved + hourly(status.sent_per_hour, status.received_per_hour)


def _wishes(status: PeerState, now: float) -> Iterator[tuple[str, str]]:
    """What was asked of it, within which limits, and what stood in the way."""
    if status.finish:
        yield "asked", "to end after this step: `tt finish`"
    elif status.paused and status.state != "paused":
        yield "asked", f"to pause {until_words(status.paused_until, now)}".strip()
    limits = []
    for limit in status.limits:
        value = f"{limit.value}{UNITS.get(limit.name, '')}"
        by_flag = limit.source.startswith("--")
        limits.append(f"{limit.source} {value}" if by_flag else f"{limit.name} {value} ({limit.source})")
    if limits:
        yield "limits", " · ".join(limits)
    if status.troubles:
        name, newest = max(status.troubles.items(), key=lambda item: item[1].at)
        remedy = f": {newest.remedy}" if newest.remedy else ""
        yield "troubles", trouble_counts(status)
        yield "", f"{duration(now - newest.at)} ago: {newest.words}{remedy}"
        yield "", f"more: `tt explain {name}`"


def _gone(status: PeerState, now: float) -> list[Text]:
    """Lines about a peer whose processes are not there any more, though it never said that it ended."""
    step = f" at step {status.step:,}," if status.step is not None else ""
    was = f"{status.state}{step} {duration(now - status.updated)} ago"
    lines = [Text(f"  its processes ended without a word: it was {was}")]
    if status.words:
        lines.append(Text("  its last words:"))
        lines += [Text(f"    {clock(said.at)}  {clean(said.text)}") for said in status.words[-3:]]
    backup = f" from the backup of step {status.saved_step:,}" if status.saved_step is not None else ""
    command = "aux-peer" if status.role == "aux" else "join"
    lines.append(Text(f"  `tt {command} {clean(status.run)}` goes on{backup}; its log is {clean(status.log)}"))
    return lines
