"""`tt check`: a run can be trained as its file says. All that the file names is opened, nothing is changed.

The machine is `tt doctor`'s matter; its `Check` and its look at the peers are used here too.
"""

from __future__ import annotations

import math
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tt_cli.auth.authority_client import AuthorityConnection, AuthorityUnreachable
from tt_cli.auth.eligibility import UNGUARDED
from tt_cli.doctor.checks import Check, of_error, reachable
from tt_cli.errors import TTError
from tt_cli.identity import peer_key
from tt_cli.identity.passes import InvalidPass, read_notice
from tt_cli.organise import averaging
from tt_cli.organise.averaging import Members
from tt_cli.organise.model_sizes import takes
from tt_cli.organise.recipe import HOME
from tt_cli.run import DalleRun, RunConfig, load_run
from tt_cli.task import task_of
from tt_cli.task.dalle_task import DalleTask
from tt_cli.task.task import Task, narrow, trained

if TYPE_CHECKING:
    from tt_cli.data.examples import Batch

DATA_SECONDS = 120.0  # until the first example: a shuffle buffer is filled before
ANSWER_SECONDS = 5.0
PROMPT = "a red apple"

Result = TypeVar("Result")


def look_over(name: str, *, peers: Sequence[str], device: str | None, step: bool, members: Members) -> Iterator[Check]:
    """All checks of the run called `name`, as they come. peers: to try instead of those in the run file."""
    try:
        run = load_run(name)
    except TTError as error:
        yield Check("run file", "fail", str(error), "correct it, or name another")
        return
    yield Check("run file", "pass", f"every field is as it must be; its identity is {run.identity}")
    if ours := (home := Path(name).parent / HOME / "runs").is_dir():
        yield keys(run, home)
    task, batch = task_of(run), None
    readable: bool | None = True
    if isinstance(task, DalleTask):
        readable, check = _tried("tokenizer", lambda: _tokenizer(task), "check [tokenizer]")
        yield check
    check = Check("data", "fail", "not opened: there is no tokenizer for the captions", "correct that first")
    if readable:
        batch, check = _tried("data", lambda: within(DATA_SECONDS, lambda: _first(task)), "check [data]")
    yield check
    if isinstance(task, DalleTask):
        fix = "check [vqgan]; training goes without it, drawing does not"
        yield _tried("VQGAN", lambda: _vqgan(task.run, batch), fix)[1]
    fits, check = _tried("model", lambda: (True, takes(run).in_words()), "check [model]")
    yield check
    if fits:
        yield lines(run, members)
    if run.peers.initial or peers:
        check = reachable(list(peers) or run.peers.initial, name)
        yield _not_yet(check) if ours and not peers and check.verdict == "fail" else check
    if run.membership.authority is not None:
        yield authority(run, ours)
    elif run.membership.kind == "organisation":
        yield Check("authority", "warning", UNGUARDED, "`tt init` with --authority makes one with its keys")
    if step and batch is not None and fits is not None:
        yield _tried("step", lambda: _step(run, batch, device), "see `tt doctor`, or give --no-step")[1]
    elif step:
        yield Check("step", "fail", "not tried: it needs the model and an example", "correct what is wrong above")


def _tried(name: str, attempt: Callable[[], tuple[Result, str]], fix: str) -> tuple[Result, Check] | tuple[None, Check]:
    """The result of `attempt`, with its words as a check."""
    try:
        result, details = attempt()
    except TTError as error:
        return None, of_error(name, error, fix)
    return result, Check(name, "pass", details)


def keys(run: RunConfig, home: Path) -> Check:
    """Compare the keys of a folder that `tt init` made with the run file's. home: the folder of its runs."""
    own = home / run.identity
    if not own.is_dir():
        others = sorted(path.name for path in home.iterdir())
        problem = f"they are in {home} for {', '.join(others) or 'no run'}, and this run is {run.identity} now"
        move = shlex.join(["mv", str(home / (others[0] if others else "OLD")), str(own)])
        fix = f"before anybody joined: {move}"
        return Check("keys", "fail", problem, fix)
    try:
        peer_id = peer_key.id_of(peer_key.private_key((own / "aux.key").read_bytes()))
    except (OSError, ValueError) as error:
        return Check("keys", "fail", f"{own / 'aux.key'} is no key ({error})", "put your copy of it back")
    secret = [*own.glob("*.key"), *own.glob("authority/authority.*")]
    open_to_others = [path for path in secret if path.stat().st_mode & 0o077]
    if open_to_others:
        return Check("keys", "fail", f"others may read {open_to_others[0]}", f"chmod -R go= {shlex.quote(str(home))}")
    if run.peers.initial and not any(address.endswith(f"/p2p/{peer_id}") for address in run.peers.initial):
        problem = f"the aux peer here is {peer_id}, and peers.initial names another"
        return Check("keys", "fail", problem, f"end its address in /p2p/{peer_id}, or put your copy of the key back")
    return Check("keys", "pass", f"the aux peer is {peer_id}")


def lines(run: RunConfig, members: Members) -> Check:
    """Compare what the run averages with what its members' lines carry."""
    (peers, mbits), words, longest = members, averaging.reason(run, members), run.swarm.averaging_timeout
    number, kept, delayed = averaging.chosen(run, members)
    what = f"{number} local steps{f', sparse = {kept}' if kept else ''}{', delayed = true' if delayed else ''}"
    fix = f"`tt init --line {mbits:g} --peers {peers}` writes a run with {what} in its place"
    if number and run.optimizer.name != "local":
        return Check("lines", "warning", words, fix)
    if averaging.run_pace(run, *members).line > longest:
        return Check("lines", "warning", f"{words} Rounds end after {longest:g} s", "raise swarm.averaging_timeout")
    if (kept and not run.sparse) or (delayed and not run.optimizer.delayed):
        return Check("lines", "warning", words, fix)
    return Check("lines", "pass", words)


def _not_yet(silent: Check) -> Check:
    """A warning: the keys of who is silent are in this folder, which is looked over before it goes to the server."""
    fix = f"nothing, if it is not started yet, for its keys are in this folder; else {silent.fix}"
    return replace(silent, verdict="warning", fix=fix)


def authority(run: RunConfig, ours: bool = False) -> Check:
    """Ask it for a notice, which the key in the run file must have signed. ours: its keys are in this folder."""
    try:
        with closing(AuthorityConnection(run)) as connection:
            signed = connection.notice(-1, ANSWER_SECONDS) or ""
        notice = read_notice(signed, run.membership.authority_key or "", run.identity, time.time())
    except AuthorityUnreachable as error:
        fix = "start it (`tt aux-peer RUN --authority`), and look at the proxy before it"
        silent = Check("authority", "fail", str(error), fix)
        return _not_yet(silent) if ours else silent
    except (TTError, InvalidPass) as error:
        fix = "check the address; its key is that of the folder from which it is served"
        return Check("authority", "fail", f"{run.membership.authority} does not say what it should: {error}", fix)
    pause = f"; it has paused the run: {notice.paused}" if notice.paused else ""
    return Check("authority", "pass", f"{run.membership.authority} signs with the key in the run file{pause}")


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """Return or raise what `work` does; TTError when it takes longer (it goes on, for nobody)."""
    outcome: Future[Result] = Future()

    def attempt() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=attempt, daemon=True).start()
    if not wait([outcome], seconds).done:
        raise TTError(f"nothing came within {seconds:.0f} s: check the network, or data.shuffle_buffer")
    return outcome.result()


def _tokenizer(task: DalleTask) -> tuple[bool, str]:
    tokenizer = task.tokenizer
    ids = tokenizer.encode([PROMPT])[0]
    used = int((ids != tokenizer.pad_id).sum())
    return True, f'{task.run.tokenizer.name}, {tokenizer.vocab_size:,} ids; "{PROMPT}" is {used} of them'


def _first(task: Task[Any]) -> tuple[Batch, str]:
    task.prepare()
    started = time.monotonic()
    with closing(task.examples(seed=0)) as stream:
        batch = next(stream.batches(1))
    caption = "".join(letter if letter.isprintable() else " " for letter in next(iter(batch.captions), "…"))[:60]
    details = f'{task.run.data.name} gave "{caption}" in {time.monotonic() - started:.1f} s'
    return batch, f"{details} ({stream.counts.in_words()})" if stream.counts.problems() else details


def _vqgan(run: DalleRun, batch: Batch | None) -> tuple[object, str]:
    from tt_cli.task.picture_codec import decode_pictures, load_vqgan

    vqgan = load_vqgan(run)
    details = f"{run.vqgan.name}, {run.vqgan.codebook_size:,} codes"
    if batch is not None:
        height, width = decode_pictures(vqgan, batch.tensors["image"])[0].shape[:2]
        details += f"; it drew that example, {width} x {height} pixels"
    return vqgan, details


def _step(run: RunConfig, batch: Batch, wanted: str | None) -> tuple[object, str]:
    """Forward, backward and the optimizer's step of one example, as a peer does them."""
    import torch

    from tt_cli.optim.lamb import Lamb8bit
    from tt_cli.optim.schedule import learning_rate
    from tt_cli.peer.device import choose_device
    from tt_cli.peer.local_steps import inner_optimizers
    from tt_cli.peer.memory_budget import check_host, check_room

    task = task_of(run)
    check_host(task, wanted, None)
    device = choose_device(wanted, task, lambda event: None)
    check_room(task, device, None, None)
    model = task.new_model()
    on_cpu = {name: parameter.detach() for name, parameter in trained(model).items()}
    narrow(model, device.autocast)
    model.to(device.torch_device)

    def loss() -> torch.Tensor:
        with device.precision():
            return task.losses(model, batch.to(device.torch_device))[0]

    started = time.monotonic()
    before = loss()
    before.backward()
    gradients = {name: p.grad.float().cpu() for name, p in trained(model).items() if p.grad is not None}
    rate, settings = learning_rate(run.schedule, 0), run.optimizer
    if settings.name == "local":
        for optimizer in inner_optimizers(settings, trained(model), rate)[0]:
            optimizer.step()
    else:
        Lamb8bit(on_cpu, settings).step(gradients, rate)
    seconds = time.monotonic() - started
    with torch.no_grad():
        for name, parameter in trained(model).items() if settings.name != "local" else ():
            parameter.copy_(on_cpu[name])
        after = float(loss())
    if not math.isfinite(after):
        raise TTError("the loss is not finite after one step: lower schedule.peak_lr, or raise optimizer.eps")
    details = f"one example on {device.name} in {device.dtype_name} took {seconds:.1f} s; its loss went from"
    return True, f"{details} {float(before.detach()):.3f} to {after:.3f}"
