"""Members without work are named by whoever reduces what they send, and nobody else is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
import torch
from optim.settings import normal
from swarm.rounds import CODEC
from swarm.test_audit import SPARSE

from tt_cli.swarm.allreduce.clipping.centered_clip import Aggregation
from tt_cli.swarm.allreduce.reducer import Reducer
from tt_cli.swarm.audit.work import COPIED, COPY, FEWEST, NOTHING, REMEMBERED, UNLIKE_ALL, WINDOW, WorkAudits, judge
from tt_cli.swarm.compression.codec import GradientCodec
from tt_cli.swarm.compression.gradient_buffer import GradientBuffer, Partition

ELEMENTS = 2 * 4096
WEIGHTS = {
    f"p{number}": weight for number, weight in enumerate((28.0, 20.0, 12.0, 4.0, 16.0, 16.0, 8.0, 8.0, 12.0, 4.0))
}
ME = "p1"
Sent = Mapping[str, torch.Tensor]
Instead = Callable[[Sent, int], torch.Tensor]


def honest(step: int, noise: float, members: Mapping[str, float] = WEIGHTS) -> dict[str, torch.Tensor]:
    """Each one's mean over its samples, of which one has so many times the norm of what they have in common."""
    common = normal(step, ELEMENTS)
    return {
        name: common + normal(1000 * (number + 1) + step, ELEMENTS, scale=noise / math.sqrt(weight))
        for number, (name, weight) in enumerate(members.items())
    }


def zeros(sent: Sent, step: int) -> torch.Tensor:
    return torch.zeros(ELEMENTS)


def noise(sent: Sent, step: int) -> torch.Tensor:
    return normal(90_000 + step, ELEMENTS, scale=float(sent["p2"].square().mean().sqrt()))


def copy(sent: Sent, step: int) -> torch.Tensor:
    return sent["p4"].clone()


def reduced(
    sent: Sent,
    weights: Mapping[str, float] = WEIGHTS,
    codec: GradientCodec = CODEC,
    aggregation: Aggregation = "centered_clip",
) -> Reducer:
    """The round of the reducer ME, with the parts of the others in the order of `sent`."""
    layout = Partition({"weight": torch.Size([ELEMENTS])}, 4096, codec.block)
    parts = layout.parts((1,))
    own = GradientBuffer(layout, codec)
    own.encode("weight", sent[ME])
    reducer = Reducer(codec, parts, own, weights[ME], ME, dict.fromkeys(weights, 1000.0), lambda *_: None, aggregation)

    async def send(name: str) -> None:
        for part in parts:
            encoded = codec.large.encode(sent[name][part.start : part.stop])
            await reducer.take(name, codec.message(encoded, part.elements, part.large), weights[name])

    async def round_() -> None:
        idle = (reducer.skip(name) for name in weights if name not in sent)
        await asyncio.gather(reducer.run(), *(send(name) for name in sent if name != ME), *idle)

    asyncio.run(round_())
    return reducer


def rounds(
    instead: Mapping[str, Instead], share: float = 6.0, count: int = WINDOW, **more: GradientCodec
) -> Iterator[dict[str, str]]:
    """Who is named after each round. instead: member → what it sends in place of its gradient."""
    audits = WorkAudits()
    for step in range(count):
        gradients = honest(step, share)
        yield audits.look(reduced(gradients | {name: made(gradients, step) for name, made in instead.items()}, **more))


@pytest.mark.parametrize(("codec", "share"), [(CODEC, 6.0), (SPARSE, 1.5)], ids=["dense", "sparse"])
def test_zeros_noise_and_a_copy_are_named_within_ten_rounds_and_nobody_else(codec: GradientCodec, share: float) -> None:
    named = list(rounds({"p3": zeros, "p6": noise, "p8": copy}, share, codec=codec))
    assert named[-1] == {"p3": NOTHING, "p6": UNLIKE_ALL, "p8": COPY}
    assert [step for step, names in enumerate(named, 1) if "p3" in names][0] == FEWEST, "zeros have no spread"
    assert [step for step, names in enumerate(named, 1) if "p8" in names][0] == COPIED
    assert {member for names in named for member in names} == {"p3", "p6", "p8"}


@pytest.mark.parametrize("share", [0.0, 0.5, 6.0, 40.0])
def test_no_honest_member_is_named_however_noisy_gradients_are(share: float) -> None:
    """At 40 the noise of a member with four samples has 400 times the square of what it has in common with others."""
    assert not any(rounds({}, share, count=25))


def test_a_minority_that_sends_one_noise_together_is_named() -> None:
    """Each of the three is like the two others, and has most of what a mean over the others would be."""

    def together(sent: Sent, step: int) -> torch.Tensor:
        return 3 * noise(sent, step)

    *_, last = rounds({"p0": together, "p4": together, "p5": together})
    assert last.keys() == {"p0", "p4", "p5"}


def test_who_sent_first_is_not_the_copier() -> None:
    audits = WorkAudits()
    for step in range(COPIED):
        gradients = honest(step, 6.0)
        named = audits.look(reduced({"p4": gradients["p4"], **gradients, "p0": gradients["p4"]}))
    assert named == {"p0": COPY}
    for step in range(COPIED):
        gradients = honest(step, 6.0)
        late = {"p4": gradients["p0"]}
        named = audits.look(reduced({name: value for name, value in gradients.items() if name != "p4"} | late))
    assert named == {"p0": COPY, "p4": COPY}


def test_a_gradient_that_is_scaled_is_as_like_the_others() -> None:
    """As of a slow peer's local steps, which are fewer."""
    gradients = list(honest(0, 6.0).values())
    rows = torch.stack([gradients[0] * 0.1, *gradients[1:]]).double().numpy()
    likenesses, copies = judge(rows @ rows.T, np.array(list(WEIGHTS.values())), np.zeros(len(rows)))
    assert all(likeness == pytest.approx(1.0, abs=0.25) for likeness in likenesses) and not any(copies)


def test_where_most_gradients_vanish_nobody_is_judged() -> None:
    """As in rows of rare tokens: a few examples may have none of them, round after round."""
    audits = WorkAudits()
    for step in range(WINDOW):
        gradients = honest(step, 6.0)
        reducer = reduced(gradients | {"p3": zeros(gradients, step)})
        reducer.spreads = {name: 5.0 * float(gradient.square().mean().sqrt()) for name, gradient in gradients.items()}
        assert audits.look(reducer) == {}


def test_who_works_again_is_not_named_any_more() -> None:
    audits = WorkAudits()
    for step in range(2 * WINDOW):
        gradients = honest(step, 6.0)
        named = audits.look(reduced(gradients | ({"p3": zeros(gradients, step)} if step < WINDOW else {})))
        assert ("p3" in named) == (FEWEST <= step + 1 <= WINDOW), (step, named)


def test_who_is_away_stays_named_for_a_while() -> None:
    audits, gradients = WorkAudits(), honest(0, 6.0)
    for _ in range(FEWEST):
        named = audits.look(reduced(gradients | {"p3": zeros(gradients, 0)}))
    without = {name: gradient for name, gradient in gradients.items() if name != "p3"}
    others = {name: weight for name, weight in WEIGHTS.items() if name != "p3"}
    quiet = reduced(without, others)
    for _ in range(REMEMBERED - 1):
        assert audits.look(quiet) == named == {"p3": NOTHING}
    assert audits.look(quiet) == {}


def test_few_members_and_plain_means_name_nobody() -> None:
    for members, aggregation in ((3, "centered_clip"), (10, "mean")):
        weights, audits = dict(list(WEIGHTS.items())[:members]), WorkAudits()
        for step in range(WINDOW):
            gradients = honest(step, 6.0, weights)
            sent = gradients | {"p2": zeros(gradients, step)}
            assert audits.look(reduced(sent, weights, aggregation=aggregation)) == {}  # type: ignore[arg-type]


def test_members_without_samples_count_for_nothing() -> None:
    audits = WorkAudits()
    assert not any(audits.look(reduced(honest(step, 6.0), WEIGHTS | {"idle": 0.0})) for step in range(WINDOW))
