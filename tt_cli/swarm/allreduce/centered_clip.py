"""Parts of an average from those of the members, as a reducer makes them and an audit repeats it.

CenteredClip is an average that a minority of the members cannot move far (Karimireddy, He, Jaggi, 2021).

As in "Secure Distributed Training at Scale" (Gorbunov et al., 2021) each part of the gradient is averaged by itself;
far from the centre it is shortened to a radius.

- The centre begins at the weighted median of each element. When nobody is clipped there, the result is the mean over
  the samples, to the last bit: honest members lose nothing.
- The radius follows from the part itself. A mean over w samples is off by the noise of one sample over sqrt(w), and so
  is the centre: distances are divided by what is to be expected of them. The median of the quotients is this part's
  noise, and RADIUS of it is the radius.
- No one member has more than MAX_VOTE of the votes in these medians, nor weighs more than all others in the average:
  what a member says of its samples nobody can check. Else it has the weight of its samples.
- Parts in which most gradients vanish have no noise to go by: the members say how large their whole gradient is.
- Who is LEFT_OUT radii away or more is no honest member and has no part in the average. Nor has who points against the
  others: whose product with the centre, but for its own share in it, is negative, and further from the usual than
  OPPOSED times what is usual. A gradient with its sign flipped is no further away than its noise, but that it shows.
- The same bytes on every CPU: medians are taken of whole numbers, differences are single fp32 operations, squares are
  exact in float64, and their sums are made in a fixed order, by `PortableClip` and `centered_clip_numba.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from tt_cli.kernel_choice import Implementation, choose
from tt_cli.swarm.allreduce.clip_kernels import LANES, PortableClip
from tt_cli.swarm.compression.codec import GradientCodec
from tt_cli.swarm.compression.gradient_buffer import GradientBuffer, TensorPart

RADIUS = 2.0  # of the noise; of honest members none was beyond 1.6 (scripts/bench clipping)
LEFT_OUT = 3.0  # radii
OPPOSED = 4.0  # times the median; of honest members' parts this leaves out less than one in a hundred
LEAST_OPPOSED = 5  # members
CHANCE = 8.0  # times what a product with noise alone would have: then it is none
FLOOR = 0.25  # of the noise that the whole gradient would have in this part, at least
MAX_VOTE = 0.45  # of one member; of three, two have more than half
ITERATIONS = 3  # after the first, while somebody is clipped
FEWEST = 3  # members: of two, nobody knows which one is wrong
PIECE, TOGETHER = 2**15, 2**19  # elements that are looked at together: of each member at least, of all at most
VOTES = 2**16 - 1  # of the heaviest
LARGEST = 1e18  # magnitude: beyond it no gradient is meant, and below it no weighted sum overflows

Aggregation = Literal["centered_clip", "mean"]


@dataclass(frozen=True)
class ReceivedPart:
    """One member's part, encoded and checked. weight: samples. spread: root mean square of its whole gradient."""

    sender: str
    encoded: bytes
    weight: float
    spread: float


@dataclass(frozen=True)
class AveragedPart:
    """encoded: as it travels. clipped: senders that were moved towards the others. huge: senders left out for values
    beyond LARGEST."""

    encoded: bytes
    clipped: frozenset[str] = frozenset()
    huge: list[str] = field(default_factory=list)


def average_part(
    codec: GradientCodec, aggregation: Aggregation, contributions: Sequence[ReceivedPart], elements: int, large: bool
) -> AveragedPart:
    """Equal contributions, in the order of the senders' peer ids, give equal bytes on every machine.

    Zeros when nobody has samples. CenteredClip begins at three members; below, nobody knows which one is wrong.
    """
    huge: list[str] = []
    for again in (False, True):
        taking = [part for part in contributions if part.weight > 0.0 and part.sender not in huge]
        if aggregation == "mean" or len(taking) < FEWEST:
            average, factors = weighted_mean(codec, taking, elements, large), dict[str, float]()
        else:
            average, factors = centered_clip(codec, _bounded(taking), elements, large)
        if again or average.abs().max() <= LARGEST:
            break
        huge = [part.sender for part in taking if _magnitude(codec, part, elements, large) > LARGEST]
    return AveragedPart(codec.of(large).encode(average), frozenset(factors), huge)


def _bounded(contributions: Sequence[ReceivedPart]) -> list[ReceivedPart]:
    """The heaviest with the weight of all others, where it has more."""
    heaviest = max(contributions, key=lambda part: part.weight)
    most = add_up(np.array([part.weight for part in contributions if part is not heaviest]))
    return [replace(part, weight=min(part.weight, most)) for part in contributions]


def _magnitude(codec: GradientCodec, part: ReceivedPart, elements: int, large: bool) -> float:
    decoded = torch.empty(elements)
    codec.of(large).decode_into(part.encoded, decoded)
    return float(decoded.abs().max())


@np.errstate(all="ignore")  # whoever claims next to no weight is infinitely uncertain
def centered_clip(
    codec: GradientCodec, contributions: Sequence[ReceivedPart], elements: int, large: bool
) -> tuple[torch.Tensor, dict[str, float]]:
    """The average (elements,) fp32, and by which factor the distance of each sender was shortened where it was.

    contributions: in the order of the senders, each with a weight above 0, FEWEST or more. The result may be beyond
    fp32 where values are.
    """
    weights, spreads = np.array([(part.weight, part.spread) for part in contributions]).T
    votes = _votes(weights)
    likely = _likely_distances(weights, votes)
    least = FLOOR * _median(spreads * np.sqrt(weights), votes) * math.sqrt(elements)
    centre, enough = torch.empty(elements), len(contributions) >= LEAST_OPPOSED
    squares, products = _look(codec, contributions, centre, large, votes, enough)
    factors = _factors(squares, likely, votes, least)
    factors[factors * LEFT_OUT < 1.0] = 0.0
    if enough:
        others = np.where(_opposed(squares, products, weights, votes, elements), 0.0, factors)
        factors = others if others.any() else factors  # else nobody knows who is right
    clipped = {part.sender: 0.0 for part, factor in zip(contributions, factors, strict=True) if factor == 0.0}
    kept = np.flatnonzero(factors > 0.0)
    contributions, likely, votes, factors = [contributions[i] for i in kept], likely[kept], votes[kept], factors[kept]
    for _ in range(ITERATIONS):
        centre = _moved(codec, contributions, centre, factors, large)
        if factors.min() == 1.0:
            return centre, clipped
        factors = _factors(_look(codec, contributions, centre, large)[0], likely, votes, least)
    centre = _moved(codec, contributions, centre, factors, large)
    shortened = zip(contributions, factors.tolist(), strict=True)
    return centre, clipped | {part.sender: factor for part, factor in shortened if factor < 1.0}


def weighted_mean(
    codec: GradientCodec, contributions: Sequence[ReceivedPart], elements: int, large: bool
) -> torch.Tensor:
    """The mean over the samples, (elements,) fp32; zeros when nobody has any."""
    return _moved(codec, contributions, torch.zeros(elements), np.ones(len(contributions)), large)


def spread(gradient: GradientBuffer, parts: Sequence[TensorPart]) -> float:
    """Root mean square of all parts, from the first PIECE elements of each."""
    total = 0.0
    for part in parts:
        looked_at = min(PIECE, part.elements)
        first = ReceivedPart("", gradient.read(part.start, part.start + looked_at), 1.0, 0.0)
        squares, _ = _look(gradient.codec, [first], torch.zeros(looked_at), part.large)
        total += float(squares[0]) * (part.elements / looked_at)
    return math.sqrt(total / max(1, sum(part.elements for part in parts)))


def add_up(values: np.ndarray) -> float:
    """Left to right; the built-in `sum` compensates for rounding since Python 3.12, numpy adds in another order."""
    total = 0.0
    for value in values.tolist():
        total += value
    return total


def _votes(weights: np.ndarray) -> np.ndarray:
    """Votes of the members in a median: their samples, but for a cap at MAX_VOTE of all; VOTES for the heaviest."""
    falling = np.sort(weights)[::-1]
    cap = float(falling[0])
    if cap > MAX_VOTE * add_up(falling):
        for capped in (1, 2):  # more cannot be at the cap, which is above a third
            cap = MAX_VOTE * add_up(falling[capped:]) / (1.0 - MAX_VOTE * capped)
            if falling[capped] <= cap:
                break
    return np.maximum(1, np.floor(np.minimum(weights, cap) / cap * VOTES + 0.5)).astype(np.int64)


def _likely_distances(weights: np.ndarray, votes: np.ndarray) -> np.ndarray:
    """From the centre, were the noise of one sample 1: that of a member's mean and that of the centre."""
    total = float(votes.sum())
    centre = add_up(votes * votes / weights) / (total * total)
    return np.sqrt(1.0 / weights + centre)


def _median(values: np.ndarray, votes: np.ndarray) -> float:
    """The smallest of them that has half of the votes at or below it."""
    order = np.argsort(values)
    passed = votes[order].cumsum()
    return float(values[order][np.argmax(2 * passed >= passed[-1])])


def _factors(squares: np.ndarray, likely: np.ndarray, votes: np.ndarray, least: float) -> np.ndarray:
    """Factors by which the distances are to be shortened. squares: of the distances. least: of the noise."""
    distances = np.sqrt(squares)
    radii = RADIUS * max(_median(distances / likely, votes), least) * likely
    return np.where(distances <= radii, 1.0, radii / distances)


def _opposed(
    squares: np.ndarray, products: np.ndarray, weights: np.ndarray, votes: np.ndarray, elements: int
) -> np.ndarray:
    """Whether each member points against the others. products: with the centre, and the centre's own.

    Asked for LEAST_OPPOSED members and more: what is usual cannot be told from three or four; honest members with few
    samples point anywhere.
    """
    products, own = products[:-1], products[-1]
    if own <= 0.0:
        return np.zeros(len(weights), bool)
    sizes = np.fmax(0.0, squares + 2.0 * products - own) * weights
    shares = np.minimum(sizes, _median(sizes, votes)) / add_up(weights)  # who is larger has no larger share in a median
    along = (products - shares) / own
    behind = _median(along, votes) - along
    usual = _median(np.abs(behind) * np.sqrt(weights), votes)
    chance = CHANCE * np.sqrt(squares / own / elements)
    return (along < 0.0) & (behind > OPPOSED * usual / np.sqrt(weights)) & (behind > chance)


def _look(
    codec: GradientCodec,
    contributions: Sequence[ReceivedPart],
    centre: torch.Tensor,
    large: bool,
    votes: np.ndarray | None = None,
    multiply: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The squared distance of each member from `centre`, which becomes their median where votes are given.

    Then, where asked for, their products with the centre, and the centre's with itself.
    """
    kernels, elements, members = implementation().kernels, centre.numel(), len(contributions)
    squares, products = np.zeros((members, LANES)), np.zeros((members + 1 if multiply else 0, LANES))
    piece = max(PIECE, TOGETHER // members // PIECE * PIECE)  # whole blocks of every codec
    for start in range(0, elements, piece):
        stop = min(elements, start + piece)
        rows = torch.empty(members, stop - start)
        for row, part in zip(rows, contributions, strict=True):
            whole = stop - start == elements
            encoded = part.encoded if whole else codec.cut(part.encoded, elements, large, start, stop)
            codec.of(large).decode_into(encoded, row)
        middle = centre[start:stop].numpy()
        if votes is not None:
            kernels.median(rows.numpy(), votes, middle)
        kernels.add_sums(rows.numpy(), middle, squares, products)
    return _folded(squares), _folded(products)


def _folded(sums: np.ndarray) -> np.ndarray:
    """The sum of each row of LANES sums, which are used up."""
    half = LANES // 2
    while half:
        sums[:, :half] += sums[:, half : 2 * half]
        half //= 2
    return sums[:, 0]


def _moved(
    codec: GradientCodec, contributions: Sequence[ReceivedPart], centre: torch.Tensor, factors: np.ndarray, large: bool
) -> torch.Tensor:
    """The next centre: this one and the mean of the shortened differences from it."""
    summed = torch.zeros(centre.numel())
    weights = np.array([part.weight for part in contributions])
    taken = weights * factors
    for part, weight in zip(contributions, taken.tolist(), strict=True):
        codec.of(large).add_decoded(part.encoded, summed, weight)
    whole = add_up(weights)
    if whole <= 0.0:
        return summed
    if (rest := whole - add_up(taken)) > 0.0:
        summed.add_(centre * rest)
    return summed.div_(whole)


@functools.cache
def implementation() -> Implementation[PortableClip]:
    """The kernels of this machine. Call it once before any fork: loading or compiling them later delays a round."""
    return choose(PortableClip(), "tt_cli.swarm.allreduce.centered_clip_numba:NumbaClip", _trial)


def _trial(kernels: PortableClip) -> Iterator[tuple[str, object]]:
    """Results for values of unlike sizes and zeros of both signs, the last lane short."""
    draws = np.random.Generator(np.random.PCG64(9))
    for members in (3, 4, 10):
        rows = (draws.standard_t(3, (members, 2 * LANES + 77)) * 10.0 ** draws.uniform(-38, 37)).astype(np.float32)
        rows[1, :200], rows[2, :200] = 0.0, -0.0
        votes = draws.integers(1, VOTES, members)
        middle = np.empty(rows.shape[1], np.float32)
        kernels.median(rows, votes, middle)
        squares, products, alone = (np.ones((count, LANES)) for count in (members, members + 1, members))
        kernels.add_sums(rows, middle, squares, products)
        kernels.add_sums(rows, middle, alone, np.ones((0, LANES)))
        yield "medians", middle.tobytes()
        yield "squares", (squares.tobytes(), alone.tobytes())
        yield "products", products.tobytes()
