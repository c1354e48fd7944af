"""The views of the screen, as lines of a given width. Pure: a scene in, lines out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from tt_cli.monitor.peer_tables import peers_table
from tt_cli.monitor.scene import Active, Scene, flops_words
from tt_cli.monitor.snapshot_text import one_truth
from tt_cli.swarm.records.snapshot import SwarmNow
from tt_cli.terminal.chart import area_chart, line_chart
from tt_cli.terminal.format import bar, clean, duration, fit, labelled, left_right, loss_value, percent, plural, rate
from tt_cli.terminal.live_view import clock
from tt_cli.terminal.status_lines import status_lines
from tt_cli.terminal.swarm_lines import Curve, hourly, inner_steps

WIDE = 120  # cells from which charts stand beside each other
NARROW = 64  # cells below which bars give way to words
HELP = """\
1 to 5         go to a view; Tab and Shift+Tab go on and back
q, Ctrl-C      end
?              this help

Overview
l              loss on a logarithmic or a linear axis
n              loss of all steps, or of the last 1,000, 100

Peers and leaderboard
arrows         move, as do PgUp, PgDn, Home and End
s, S           sort by the next or the column before
r              turn the order round
d              leaderboard: today or ever
click          on a column's title: sort by it; once more: turn the order round

What the words mean
share          of the swarm's samples per second
link           direct: others can dial this peer; client: it dials others, and nobody dials it
slow           computes less than a quarter of the samples per second of the trainer in the middle
differs        holds another state than most peers at the same step
clipped        other peers saw its gradients clipped again and again; they may be wrong or unlike the others'
left out       for some steps: it holds the others up for longer than its samples are worth, say most of them
accused        other peers say that they have a proof that it made a wrong average
TFLOP/s        of the forward and the backward pass, from the model's size; recomputation is not counted
leaderboard    samples and time as the auxiliary peers recorded them; without one, as peers here now say\
"""


def overview(scene: Scene, width: int, height: int, *, last: int | None, log: bool) -> list[Text]:
    """Step, speed, agreement, the loss and the swarm over time. last: draw the loss of so many steps, None for all."""
    snapshot = scene.snapshot
    if snapshot is None:
        return [Text(""), fit(Text("looking for the swarm …", style="dim"), width)]
    lines = figures(snapshot, flops_words(scene.flops), width)
    room = height - len(lines) - 1
    if room < 4:
        return lines[:height]
    beside = width >= WIDE
    below = 0 if room < 11 or len(scene.activity) < 2 else max(5, min(12, room * (2 if beside else 1) // 5))
    lines += [Text(""), *_loss(scene, width, room - below, last=last, log=log)]
    if below:
        half = width // 2 - 2 if beside else width
        trainers = _over_time(scene.activity, half, below - 1, "trainers")
        if beside:
            speed = _over_time(scene.activity, half, below - 1, "samples/s")
            trainers = [
                Text.assemble(left, " " * (half + 4 - left.cell_len), right)
                for left, right in zip(trainers, speed, strict=False)
            ]
        lines += [Text(""), *trainers]
    return lines[:height]


def swarm_view(fields: Mapping[str, Any], curve: Curve, width: int, height: int) -> list[Text]:
    """The swarm on an aux peer's screen, from the JSON form of a snapshot: figures, loss curve, peers.

    At most `height` lines. The curve gives way to peers.
    """
    swarm = SwarmNow.model_validate(fields)
    lines = figures(swarm, "", width)
    rows = min(13, height - len(lines) - min(len(swarm.peers) + 1, 8) - 2)
    if rows >= 4 and len(curve) > 1:
        lines += [Text(""), *line_chart(curve, width, rows)]
    if len(lines) + 2 < height:
        lines += [Text(""), *peers_table(swarm, width, height - len(lines) - 1)]
    return lines[:height]


def mine(scene: Scene, width: int) -> list[Text]:
    """The peers of this run on this machine, as `tt status` tells of them."""
    if not scene.mine:
        run = clean(scene.run)
        return [
            Text(""),
            fit(Text("No peer of this run has run on this machine.", style="yellow"), width),
            fit(Text(f"`tt join {run}` starts one that trains,"), width),
            fit(Text(f"`tt aux-peer {run}` one that keeps the run alive."), width),
        ]
    lines: list[Text] = []
    by_id = {peer.peer_id: peer for peer in scene.snapshot.peers} if scene.snapshot is not None else {}
    for seen in scene.mine:
        lines += [Text(""), *status_lines(seen, scene.now, width)]
        if seen.running and (peer := by_id.get(seen.status.peer_id)) is not None:
            words = "same state as most" if peer.in_agreement else "another state than most" if peer.digest else "–"
            ago = f"published {duration(peer.age_s)} ago"
            lines.append(labelled("  seen as", f"  step {peer.epoch:,}, {words}, {ago}", width=width))
    return lines


def log_lines(scene: Scene, width: int) -> list[Text]:
    """The log, newest first, wrapped to `width`."""
    if not scene.log:
        return [Text(""), fit(Text("Nothing has happened since this screen began to watch.", style="dim"), width)]
    lines: list[Text] = []
    for at, line in reversed(scene.log):
        when = clock(at) if scene.now - at < 43200 else time.strftime("%d %b %H:%M", time.localtime(at))
        lines += hanging(Text(f"{when}  ", style="dim"), Text(clean(line), style=_log_style(line)), width)
    return lines


def help_lines(width: int) -> list[Text]:
    """The keys and the words, wrapped to `width`."""
    lines = [Text("tt monitor: keys and words", style="bold")]
    for line in HELP.splitlines():
        key, gap, words = line.partition("  ")
        if gap:
            lines += hanging(Text(f"{key:<15}", style="bold"), Text(words.strip()), width)
        else:
            lines.append(Text(line, style="dim"))
    return lines


def hanging(label: Text, text: Text, width: int) -> list[Text]:
    """`text` beside `label`, its further lines below its first. On a very narrow screen it is cut."""
    room = max(1, width - label.cell_len)
    wrapped = text.wrap(Console(width=room), room) or [Text("")]
    margins = [label, *[Text(" " * label.cell_len)] * (len(wrapped) - 1)]
    return [fit(Text.assemble(margin, line), width) for margin, line in zip(margins, wrapped, strict=True)]


def _log_style(words: str) -> str:
    signs = ("repeated", "behind", "another state", "wrong average", "clipped", "no peer", "paused")
    if any(sign in words for sign in signs):
        return "yellow"
    return "bold" if words.startswith(("step ", "steps ")) else ""


def figures(snapshot: SwarmNow, flops: str, width: int) -> list[Text]:
    """Step, speed, loss and agreement. flops: of the whole swarm in words, "" for unknown."""
    helpers = sum(peer.role == "aux" for peer in snapshot.peers)
    total, target = max(1, snapshot.total_steps), max(1, snapshot.target_batch_size)
    left, done = snapshot.seconds_left, percent(snapshot.epoch / total)
    ends = "done" if snapshot.epoch >= total else f"ends in {duration(left)}" if left is not None else "end unknown"
    eta = "nobody computes" if snapshot.eta_s is None else f"in {duration(snapshot.eta_s)}"
    eta = "all steps made" if snapshot.epoch >= total else "paused" if snapshot.paused else eta
    who = plural(snapshot.trainers, "trainer") + (f", {plural(helpers, 'aux peer')}" if helpers else "")
    speed = f"{rate(snapshot.samples_per_second)} samples/s" + (f" · {flops}" if flops else "")
    steps = f"{snapshot.epoch:,} of {snapshot.total_steps:,} · {done}"
    samples = f"{snapshot.samples:,} of {snapshot.target_batch_size:,} samples"
    made = snapshot.inner_steps
    inner = "" if made is None else f" · {inner_steps(made, snapshot.inner_steps_due)}"
    busy = [peer for peer in snapshot.peers if peer.sent_per_hour or peer.received_per_hour]
    up, down = (
        sum(getattr(peer, f"{way}_per_hour") for peer in busy) / max(1, len(busy)) for way in ("sent", "received")
    )
    traffic = [labelled("traffic", f"{hourly(up, down, '')} by each peer", width=width)] if busy else []
    truth = [fit(one_truth(snapshot), width)] if snapshot.holders else []
    loss = ("loss ", ""), (loss_value(snapshot.loss), "bold")
    if width < NARROW:
        rows: dict[str, str | tuple[str, str]] = {"step": steps + inner, "run": ends, "next": f"{samples} · {eta}"}
        rows |= {"swarm": who, "speed": speed, "loss": loss[1]}
        return [*(labelled(label, words, width=width) for label, words in rows.items()), *traffic, *truth]
    samples += inner
    words = max(len(f"{steps} · {ends}"), len(f"{samples} · {eta}"))
    room = max(4, min(80, width - 12 - words))
    return [
        labelled("step", bar(snapshot.epoch / total, room), f"  {steps} · {ends}", width=width),
        labelled("next step", bar(snapshot.samples / target, room, "green"), f"  {samples} · {eta}", width=width),
        labelled("swarm", (who, "bold" if snapshot.trainers else "yellow"), f" · {speed} · ", *loss, width=width),
        *traffic,
        *truth,
    ]


def _loss(scene: Scene, width: int, height: int, *, last: int | None, log: bool) -> list[Text]:
    curve = list(scene.curve)
    if not curve:
        return [fit(Text("loss: no step has been made yet", style="dim"), width)]
    if last is not None:
        curve = [point for point in curve if point[0] > curve[-1][0] - last]
    which = f"last {plural(last, 'step')}" if last is not None else f"all steps, {curve[0][0]:,} to {curve[-1][0]:,}"
    values = [value for _, value in curve]
    title = Text.assemble(("loss", "bold"), (f", {which}{', log scale' if log else ''}", ""))
    facts = Text(f"lowest {loss_value(min(values))} · now {loss_value(values[-1])}", style="dim")
    return [left_right(title, facts, width), *line_chart(curve, width, height - 1, log=log)]


def _over_time(activity: Sequence[Active], width: int, height: int, what: str) -> list[Text]:
    trainers = what == "trainers"
    points = [(seen.time, float(seen.trainers if trainers else seen.samples_per_second)) for seen in activity]
    now, most = points[-1][1], max(value for _, value in points)
    facts = f"most {most:,.0f} · now {now:,.0f}" if trainers else f"most {rate(most)} · now {rate(now)}"
    span = f", last {duration(points[-1][0] - points[0][0])}"
    title = left_right(Text.assemble((what, "bold"), span), Text(facts, style="dim"), width)
    return [title, *area_chart(points, width, height - 1, style="green" if trainers else "magenta")]
