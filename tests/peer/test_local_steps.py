"""Local steps: what a peer's own steps come to is what a round gets, and nothing of it is lost on the way."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from optim.settings import normal
from peer.states import layers, small_run
from testbed.tiny_words import tiny_words
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tt_cli.checkpoint.checkpoint_files import newest, save
from tt_cli.optim.schedule import learning_rate
from tt_cli.peer.local_steps import LocalSteps, adamw, inner_optimizers
from tt_cli.peer.trained_state import TrainedState
from tt_cli.run import RunConfig
from tt_cli.run.checkpoint_names import read_head
from tt_cli.supervisor.events import Choice, Event
from tt_cli.swarm.compression.codec import codec_of
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer, Partition
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import LockedState
from tt_cli.swarm.state.bridge import Chunks
from tt_cli.task import task_of
from tt_cli.task.task import trained


def local_run(**optimizer: Any) -> RunConfig:
    settings = {"name": "local", "inner_batch": 4, "sparse": 0, "warmup_steps": 0, **optimizer}
    return small_run(optimizer=settings, **{"schedule.peak_lr": 1e-2})


class Peer:
    """A member with a model of two layers; its gradients are drawn by a number."""

    def __init__(self, run: RunConfig, seed: int = 0):
        self.model, self.events = layers(seed), list[Event]()
        self.shared = TrainedState(run, layers(), None)
        self.state, self.local = LockedState(self.shared), LocalSteps(run, self.model, self.shared, self.events.append)
        codec = codec_of(run)
        self.buffer = GradientBuffer(Partition(self.shared.shapes(), 4096, codec.block), codec)

    def micro_batch(self, number: int, samples: int = 4) -> bool:
        self.local.renew(self.state)
        gradients = {
            name: normal(10 * number + index, *shape, scale=0.01)
            for index, (name, shape) in enumerate(self.shared.shapes().items())
        }
        return self.local.add(gradients, samples, torch.tensor(float(number)), {"text_loss": torch.tensor(1.0)})

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def away(self) -> dict[str, Tensor]:
        """theta - theta_i."""
        theirs = self.shared.state().parameters
        return {name: theirs[name] - own for name, own in self.parameters().items()}

    def step(self) -> None:
        """A global step with what this peer's buffer holds, as if all had sent the same."""
        self.state.step(DecodedGradients(self.buffer))


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Equal but for what the codec loses."""
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=float(tensor.abs().max()) / 100, msg=name)


def test_an_inner_step_is_one_of_adamw_with_the_mean_gradient_and_the_schedules_rate() -> None:
    run = local_run(max_grad_norm=1e9)
    peer, plain = Peer(run), layers()
    assert peer.micro_batch(1, 1) and not peer.local.inner_steps and not peer.local.samples
    assert peer.micro_batch(2, 3) and peer.local.inner_steps == 1
    assert peer.local.samples == 4 and peer.local.new.mean_loss() == pytest.approx((1 + 2 * 3) / 4)
    assert peer.local.new.mean_figures() == {"text_loss": 1.0}

    named = dict(plain.named_parameters())
    groups = [{"params": [p], "weight_decay": 0.0 if name.endswith("bias") else 0.1} for name, p in named.items()]
    adamw = torch.optim.AdamW(groups, lr=learning_rate(run.schedule, 0), betas=(0.9, 0.95), eps=1e-8)
    for index, parameter in enumerate(named.values()):
        parts = (normal(10 * number + index, *parameter.shape, scale=0.01) for number in (1, 2))
        parameter.grad = next(parts) / 4 + 3 * next(parts) / 4
    adamw.step()
    for name, own in peer.parameters().items():
        torch.testing.assert_close(own, named[name].detach(), msg=name)
    assert [event.what for event in peer.events if isinstance(event, Choice)] == ["inner optimizer"]


def test_between_inner_steps_there_are_no_sums_and_a_first_micro_batch_becomes_them() -> None:
    peer, loss = Peer(local_run()), torch.ones(())
    first, second = ({name: torch.ones(shape) for name, shape in peer.shared.shapes().items()} for _ in range(2))
    peer.local.renew(peer.state)
    assert peer.local.add(first, 1, loss, {})
    assert all(peer.local._sums[name] is gradient for name, gradient in first.items())
    assert peer.local.add(second, 3, loss, {}) and peer.local.inner_steps == 1
    assert not peer.local._sums and all(parameter.grad is None for parameter in peer.model.parameters())


def test_muon_has_the_matrices_between_embedding_and_logits_and_adamw_all_else() -> None:
    run = local_run(inner="muon", max_grad_norm=1e9, weight_decay=0.0)
    peer = Peer(run)
    peer.micro_batch(1)
    step = peer.away()["0.weight"] / learning_rate(run.schedule, 0)
    singular = torch.linalg.svdvals(step) / (0.2 * max(step.shape) ** 0.5)
    assert 0.6 < float(singular.median()) < float(singular.max()) < 1.3, "about orthogonal"
    assert 0.1 < float(step.square().mean().sqrt()) < 0.3, "as far as AdamW's"
    assert [event.value for event in peer.events if isinstance(event, Choice)] == [
        "Muon, and AdamW for all but matrices"
    ]

    names = {"embedding": (9, 4), "attention.0.qkv": (12, 4), "norm.weight": (4,), "logits.weight": (9, 4)}
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in names.items()}
    settings = local_run(inner="muon").optimizer
    assert settings.name == "local"
    rest, muon = inner_optimizers(settings, parameters)[0]
    assert muon.param_groups[0]["params"] == [parameters["attention.0.qkv"]]
    assert sum(len(group["params"]) for group in rest.param_groups) == 3


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 1024, "n_positions": 32}


@pytest.mark.parametrize(
    ("model", "edges"),
    [
        ({}, {"model.embed_tokens.weight"}),
        ({"tie_word_embeddings": False}, {"model.embed_tokens.weight", "lm_head.weight"}),
        (GPT2, {"transformer.wte.weight", "transformer.wpe.weight"}),
    ],
)
def test_nor_has_muon_the_embeddings_and_the_head_of_a_language_model(model: dict[str, Any], edges: set[str]) -> None:
    config = json.dumps(model) if model is GPT2 else tiny_words(**model).model.config
    run = tiny_words().replaced({"optimizer": {"name": "local", "inner": "muon"}, "model.config": config})
    task = task_of(run)
    parameters = trained(task.new_model())
    assert run.optimizer.name == "local"
    optimizers = inner_optimizers(run.optimizer, parameters)[0]
    muons = {id(p) for p in optimizers[1].param_groups[0]["params"]}
    stepped = {name for name, p in parameters.items() if id(p) in muons}
    matrices = {name for name, p in parameters.items() if p.dim() == 2}
    assert matrices - stepped == edges and stepped
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    moments = [t.nbytes for one in optimizers for state in one.state.values() for t in state.values() if t.numel() > 1]
    assert {item.what: item.bytes for item in task.need("cpu").items}["inner moments"] == sum(moments)


def test_new_moments_warm_up() -> None:
    slow, fast = Peer(local_run(warmup_steps=4)), Peer(local_run())
    for peer in (slow, fast):
        peer.micro_batch(1)
    for name, away in fast.away().items():
        torch.testing.assert_close(slow.away()[name], away / 4, rtol=1e-2, atol=1e-6)


def test_a_round_gets_the_way_since_the_shared_parameters_and_all_go_on_from_the_new_ones() -> None:
    peer = Peer(local_run())
    for number in range(3):
        peer.micro_batch(number)
    went, before = peer.away(), peer.shared.snapshot().parameters
    peer.local.hold(peer.buffer)
    assert peer.local.held.samples == 12 and not peer.local.new.samples and not peer.local.ready
    assert_close(went, {name: t.clone() for name, t in DecodedGradients(peer.buffer).items()})
    peer.step()
    assert peer.local.release().samples == 12 and peer.local.ready and peer.local.inner_steps == 0
    peer.local.renew(peer.state)
    assert_close(went, {name: before[name] - own for name, own in peer.parameters().items()})
    assert not any(tensor.any() for tensor in peer.away().values())
    peer.micro_batch(9)
    assert peer.local.inner_steps == 1


def test_a_micro_batch_amid_a_round_changes_nothing_until_it_is_over() -> None:
    peer = Peer(local_run())
    peer.micro_batch(1)
    peer.local.hold(peer.buffer)
    before = peer.parameters()
    assert peer.micro_batch(2)
    assert all(torch.equal(before[name], own) for name, own in peer.parameters().items())
    peer.step()
    peer.local.release()
    assert peer.local.samples == 0, "its inner step is still to be made"
    peer.micro_batch(3)
    assert peer.local.inner_steps == 1 and peer.local.samples == 8


@pytest.mark.parametrize("amid", [False, True], ids=["held by a round", "on its way"])
def test_what_no_round_took_goes_on_from_the_state_that_the_others_came_to(amid: bool) -> None:
    peer, others = Peer(local_run()), Peer(local_run())
    others.micro_batch(7)
    others.local.hold(others.buffer)
    for number in range(2):
        peer.micro_batch(number)
    if amid:  # a round that the others made without this peer
        peer.local.hold(peer.buffer)
        peer.local.give_back(peer.buffer)
        peer.micro_batch(2)
    went, samples = peer.away(), peer.local.samples
    peer.local.set_aside(peer.buffer)
    peer.state.step(DecodedGradients(others.buffer))  # the average of the step that it missed
    peer.local.give_back(peer.buffer)
    assert peer.local.samples == samples
    peer.local.renew(peer.state)
    assert_close(went, peer.away())


def test_what_was_set_aside_goes_into_a_round_that_comes_before_a_micro_batch() -> None:
    peer, others = Peer(local_run()), Peer(local_run())
    others.micro_batch(7)
    others.local.hold(others.buffer)
    peer.micro_batch(1)
    went = peer.away()
    peer.local.set_aside(peer.buffer)
    peer.state.step(DecodedGradients(others.buffer))
    peer.local.give_back(peer.buffer)
    peer.local.hold(peer.buffer)
    assert peer.local.held.samples == 4
    assert_close(went, {name: t.clone() for name, t in DecodedGradients(peer.buffer).items()})
    peer.step()
    peer.local.release()
    peer.local.renew(peer.state)
    assert not any(tensor.any() for tensor in peer.away().values())


def test_a_peer_without_steps_of_its_own_sends_zeros_without_samples() -> None:
    peer = Peer(local_run(), seed=3)  # its model is not the shared state's yet
    peer.local.hold(peer.buffer)
    assert peer.local.held.samples == 0
    assert not any(bool(tensor.any()) for tensor in DecodedGradients(peer.buffer).values())


def test_parameters_that_are_in_doubt_begin_anew_and_count_for_nothing() -> None:
    peer = Peer(local_run())
    peer.micro_batch(1)
    peer.state.fresh = True
    peer.local.renew(peer.state)
    assert peer.local.samples == 0 and not any(tensor.any() for tensor in peer.away().values())

    peer.micro_batch(2)
    with torch.no_grad():
        next(peer.model.parameters())[0, 0] = float("nan")
    with pytest.raises(ValueError):
        peer.local.hold(peer.buffer)
    assert peer.local.held.samples == 0
    assert not any(bool(tensor.any()) for tensor in DecodedGradients(peer.buffer).values())
    peer.local.give_back(peer.buffer)
    peer.local.renew(peer.state)
    assert not any(tensor.any() for tensor in peer.away().values())


class RunsOut(TorchDispatchMode):
    """Memory that does not suffice for the calls of one operator with these numbers, from 0 on."""

    def __init__(self, operator: str, *numbers: int):
        super().__init__()
        self._operator, self._numbers, self._calls = operator, numbers, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] == self._operator:
            self._calls += 1
            if self._calls - 1 in self._numbers:
                raise torch.OutOfMemoryError("out of memory")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("delayed", [False, True])
def test_where_memory_runs_out_in_an_inner_step_no_example_counts_twice(delayed: bool) -> None:
    """Some of the tensors may have stepped, and the batch comes again in smaller pieces."""
    peer, calm = Peer(local_run(delayed=delayed)), Peer(local_run(delayed=delayed))
    peer.micro_batch(1)
    if delayed:
        peer.local.hold(peer.buffer)
    with RunsOut("aten::_fused_adamw_", 1), pytest.raises(torch.OutOfMemoryError):
        peer.micro_batch(2, 8)
    assert peer.local.new.samples == 0 and peer.local.held.samples == (4 if delayed else 0)
    if delayed:  # theta_i begins anew when the round is over, and the round has taken what it held
        assert not peer.local.ready
        peer.step()
        peer.local.release()
        calm.state.step(DecodedGradients(peer.buffer))
    for each in (peer, calm):
        assert each.micro_batch(2, 4) and each.micro_batch(3, 4)
    assert peer.local.samples == calm.local.samples == 8
    assert_equal(peer.away(), calm.away())


def test_where_memory_runs_out_on_the_way_to_new_parameters_nothing_is_moved_twice() -> None:
    peer = Peer(local_run(delayed=True))
    peer.micro_batch(1)
    peer.local.hold(peer.buffer)
    peer.micro_batch(2)
    peer.step()
    peer.local.release()
    with RunsOut("aten::sub_", 2), pytest.raises(torch.OutOfMemoryError):
        peer.local.renew(peer.state)
    peer.local.renew(peer.state)
    assert peer.local.samples == 0 and not any(tensor.any() for tensor in peer.away().values())


def test_an_order_to_go_back_drops_all_and_nothing_is_made_before_it_is_followed() -> None:
    peer, ordered = Peer(local_run()), Peer(local_run())
    ordered.micro_batch(7)
    ordered.local.hold(ordered.buffer)
    peer.micro_batch(1)
    peer.local.forget()
    peer.micro_batch(2)
    assert peer.local.inner_steps == 0 and peer.local.samples == 0 and not peer.local.ready
    peer.state.step(DecodedGradients(ordered.buffer))
    peer.local.give_back(peer.buffer)
    peer.local.renew(peer.state)
    assert peer.local.ready and not any(tensor.any() for tensor in peer.away().values())


def test_parameters_are_all_of_the_shared_state_on_disk_and_on_the_wire(tmp_path: Path) -> None:
    """A joiner takes it over, and a backup counts as one to train on."""
    one, other = Peer(local_run()), Peer(local_run())
    one.micro_batch(1)
    one.local.hold(one.buffer)
    one.step()
    state, buffer = one.shared.state(), StateBuffer.new()
    assert sum(tensor.nbytes for tensor in state.optimizer.values()) == 0
    tree = other.shared.read_tree(one.shared.write_into(buffer.write).manifest())
    with Chunks(tree, tree.differing(other.shared.tree), buffer) as chunks:
        other.state.patch(tree, chunks)
    assert other.state.position == one.state.position

    path = save(tmp_path, state)
    assert read_head(path).trains
    read = newest(tmp_path, state.identity, to_train=True)
    assert read is not None
    again = TrainedState(local_run(), layers(1), read[1])
    assert (again.epoch, again.digest) == one.state.position
    for each in (one.shared, other.shared, again):
        each.step(DecodedGradients(one.buffer))
    assert one.shared.digest == other.shared.digest == again.digest


def test_a_peer_that_returns_trains_on_its_backup_and_not_on_first_weights() -> None:
    before, returned = Peer(local_run()), Peer(local_run())
    before.micro_batch(1)
    before.local.hold(before.buffer)
    before.step()
    shared = TrainedState(local_run(), returned.model, before.shared.snapshot())
    state = LockedState(shared)
    assert state.fresh
    LocalSteps(local_run(), returned.model, shared, lambda event: None).renew(state)
    for name, own in returned.parameters().items():
        assert torch.equal(own, shared.state().parameters[name])


def sparse_peer() -> Peer:
    return Peer(local_run(sparse=64))


def unsent(peer: Peer) -> dict[str, Tensor]:
    """How far the peer is away, and what its messages left out."""
    return {name: way + peer.local._left.get(name, 0.0) for name, way in peer.away().items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor], kept: float = 1.0, left_out: bool = False) -> None:
    """Equal but for what fp32 loses. left_out: or bf16 in a few roundings, in which what messages left out is kept."""
    for name, tensor in one.items():
        loses = max(1e-7, 2**-7 * float(tensor.abs().max()) * left_out)
        torch.testing.assert_close(kept * tensor, other[name], rtol=1e-4, atol=loses, msg=name)


def meanwhile(peer: Peer, *numbers: int) -> dict[str, Tensor]:
    """Make inner steps while a round has the pseudo-gradient; how far they went."""
    before = peer.parameters()
    for number in numbers:
        peer.micro_batch(number)
    return {name: before[name] - own for name, own in peer.parameters().items()}


@pytest.mark.parametrize("sparse", [0, 64])
def test_with_delayed_updates_a_peer_goes_on_from_the_new_state_less_what_it_did_meanwhile(sparse: int) -> None:
    peer = Peer(local_run(delayed=True, sparse=sparse))
    peer.micro_batch(0)
    went = peer.away()
    peer.local.hold(peer.buffer)
    assert peer.local.ready and peer.local.settled
    since = meanwhile(peer, 1, 2)
    assert all(way.any() for way in since.values()) and peer.local.inner_steps == 3
    if not sparse:
        assert_close(went, {name: t.clone() for name, t in DecodedGradients(peer.buffer).items()})
    peer.step()
    assert not peer.local.settled, "the next round has to wait"
    assert peer.local.release().samples == 4 and peer.local.samples == 8 and peer.local.inner_steps == 2
    peer.local.renew(peer.state)
    assert peer.local.settled
    assert_equal(since, peer.away())
    peer.local.hold(peer.buffer)
    assert peer.local.held.samples == 8
    if not sparse:
        assert_close(since, {name: t.clone() for name, t in DecodedGradients(peer.buffer).items()})


@pytest.mark.parametrize("sparse", [0, 64])
@pytest.mark.parametrize("others_stepped", [False, True])
def test_what_is_done_beside_a_round_that_is_dropped_counts_with_what_it_had(sparse: int, others_stepped: bool) -> None:
    peer, others = (Peer(local_run(delayed=True, sparse=sparse)) for _ in range(2))
    others.micro_batch(7)
    others.local.hold(others.buffer)
    peer.micro_batch(0)
    peer.local.hold(peer.buffer)
    meanwhile(peer, 1)
    before = peer.away()  # nothing of it is left out yet
    if others_stepped:
        peer.local.give_back(peer.buffer)
        peer.local.set_aside(peer.buffer)
        peer.state.step(DecodedGradients(others.buffer))
    peer.local.give_back(peer.buffer)
    assert peer.local.samples == 8
    peer.local.renew(peer.state)
    if others_stepped and not sparse:
        assert_close(before, unsent(peer))
    else:
        assert_equal(before, unsent(peer), left_out=sparse > 0)
    peer.local.hold(peer.buffer)
    assert peer.local.held.samples == 8 and peer.local.settled


def test_with_delayed_updates_an_order_to_go_back_drops_all() -> None:
    peer = Peer(local_run(delayed=True))
    peer.micro_batch(0)
    peer.local.hold(peer.buffer)
    meanwhile(peer, 1)
    peer.local.forget()
    assert not peer.local.ready and not peer.local.samples
    peer.local.give_back(peer.buffer)
    peer.local.renew(peer.state)
    assert peer.local.ready and peer.local.settled and not any(way.any() for way in peer.away().values())


@contextmanager
def in_a_thread(work: Any) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("delayed", [False, True])
def test_rounds_of_one_thread_and_steps_of_another_lose_no_sample(delayed: bool) -> None:
    peer, ended, taken = Peer(local_run(delayed=delayed)), threading.Event(), 0

    def rounds() -> None:
        nonlocal taken
        while not ended.is_set():
            if peer.local.settled:
                peer.local.hold(peer.buffer)
                peer.step()
                taken += peer.local.release().samples

    with in_a_thread(rounds):
        for number in range(60):
            assert peer.micro_batch(number)
        ended.set()
    waits = peer.local._waiting.samples
    assert taken + peer.local.samples + waits == 240
    assert peer.shared.digest == peer.shared.state().digest()


def test_where_bitsandbytes_does_not_run_it_is_fp32_with_the_reason() -> None:
    make, name, reason = adamw(torch.device("cpu"))
    assert name == "AdamW" and "GPU" in reason
    optimizer = make([nn.Parameter(torch.ones(2))], lr=1e-3)
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"], "a step without memory of its own"


def test_what_a_sparse_message_leaves_out_goes_into_the_next_ones() -> None:
    peer = sparse_peer()
    for number in range(4):
        peer.micro_batch(number)
        before = unsent(peer)
        peer.local.hold(peer.buffer)
        sent = {name: tensor.clone() for name, tensor in DecodedGradients(peer.buffer).items()}
        largest = max(before, key=lambda name: before[name].numel())
        assert 0 < int(sent[largest].count_nonzero()) <= before[largest].numel() / 64 + 64
        peer.step()
        peer.local.release()
        peer.local.renew(peer.state)
        assert_equal({name: before[name] - sent[name] for name in sent}, unsent(peer), kept=0.95, left_out=True)


def test_a_dropped_round_loses_nothing_of_a_sparse_message_and_moves_nothing() -> None:
    peer = sparse_peer()
    peer.micro_batch(0)
    peer.local.hold(peer.buffer)
    peer.step()
    peer.local.release()
    peer.micro_batch(1)
    went, before = peer.parameters(), unsent(peer)
    for _ in range(3):
        peer.local.hold(peer.buffer)
        peer.local.give_back(peer.buffer)
    peer.local.renew(peer.state)
    assert_equal(before, unsent(peer), left_out=True)
    assert all(torch.equal(went[name], own) for name, own in peer.parameters().items())


@pytest.mark.parametrize("sends_at_once", [False, True])
def test_who_missed_a_step_sends_all_of_its_own_in_sparse_messages(sends_at_once: bool) -> None:
    peer, others = sparse_peer(), sparse_peer()
    others.micro_batch(7)
    others.local.hold(others.buffer)
    peer.micro_batch(1)
    before = unsent(peer)
    peer.local.set_aside(peer.buffer)
    peer.state.step(DecodedGradients(others.buffer))
    peer.local.give_back(peer.buffer)
    if not sends_at_once:
        peer.local.renew(peer.state)
        assert_equal(before, unsent(peer), left_out=True)
        return
    peer.local.hold(peer.buffer)
    sent = {name: tensor.clone() for name, tensor in DecodedGradients(peer.buffer).items()}
    assert peer.local.held.samples == 4
    peer.step()
    peer.local.release()
    peer.local.renew(peer.state)
    assert_equal({name: before[name] - sent[name] for name in sent}, unsent(peer), kept=0.95, left_out=True)


def test_what_is_given_up_or_not_finite_is_in_no_sparse_message() -> None:
    for spoiled in (False, True):
        peer = sparse_peer()
        peer.micro_batch(1)
        peer.local.hold(peer.buffer)
        peer.step()
        peer.local.release()
        assert any(bool(left.any()) for left in peer.local._left.values())
        if spoiled:
            peer.micro_batch(2)
            with torch.no_grad():
                next(peer.model.parameters())[0, 0] = float("nan")
            with pytest.raises(ValueError):
                peer.local.hold(peer.buffer)
        else:
            peer.local.forget()
        peer.local.give_back(peer.buffer)
        peer.local.renew(peer.state)
        assert not any(bool(tensor.any()) for tensor in unsent(peer).values())


def test_without_samples_what_was_left_out_stays() -> None:
    peer = sparse_peer()
    peer.micro_batch(1)
    peer.local.hold(peer.buffer)
    peer.step()
    peer.local.release()
    peer.local.renew(peer.state)
    before = unsent(peer)
    peer.local.hold(peer.buffer)
    assert not any(bool(tensor.any()) for tensor in DecodedGradients(peer.buffer).values())
    peer.local.release()
    assert_equal(before, unsent(peer))
