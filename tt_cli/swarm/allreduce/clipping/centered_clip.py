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
- Some may lean the same way, each within the radius. The noise of members that know nothing of each other has no
  direction; so the directions along which they differ far more than that (the first eigenvectors of how their
  differences correlate; spectral filters: Diakonikolas et al., 2017; Shejwalkar and Houmansadr, 2021) are looked at.
  Along one of them the noise is small: the median, in which all count alike, is that of the honest ones, and who is
  further from it than OPPOSED times what is usual is taken back to there; of whom that is most, is left out.
- All follows from the products of the members' differences from the first centre: one look at their parts is enough.
- The same bytes on every CPU: medians are taken of whole numbers, differences are single fp32 operations, products
  are exact in float64, and all sums are made in a fixed order, by `PortableClip` and `centered_clip_numba.py`.
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
from tt_cli.swarm.allreduce.clipping.clip_kernels import BLOCK, LANES, PortableClip
from tt_cli.swarm.compression.codec import GradientCodec
from tt_cli.swarm.compression.gradient_buffer import GradientBuffer, TensorPart

RADIUS = 2.0  # of the noise; of honest members none was beyond 1.6 (scripts/bench clipping)
LEFT_OUT = 3.0  # radii
OPPOSED = 4.0  # times the median; of honest members' parts this leaves out less than one in a hundred
LEAST_OPPOSED = 5  # members: with fewer, nobody knows what is usual
CHANCE = 8.0  # times what a product with noise alone would have: then it is none
FLOOR = 0.25  # of the noise that the whole gradient would have in this part, at least
MAX_VOTE = 0.45  # of one member; of three, two have more than half
ITERATIONS = 3  # after the first, while somebody is clipped
FEWEST = 3  # members: of two, nobody knows which one is wrong
TOGETHER = 2**19  # elements of all members that are looked at together
DIRECTIONS = 3  # at most, along which members are looked at
LEANING = 0.05  # of all that members differ along one direction, beside what one has alone: then some lean together
MOST = 0.4  # of a member's difference
SQUARINGS = 7  # until the first eigenvector stands out
VOTES = 2**16 - 1  # of the heaviest
TINY = 1e-300  # squares
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
    beyond LARGEST. products: of the parts of each two members, in the order of the contributions, (members, members)
    float64; None where not all were compared."""

    encoded: bytes
    clipped: frozenset[str] = frozenset()
    huge: list[str] = field(default_factory=list)
    products: np.ndarray | None = field(default=None, compare=False)


def average_part(
    codec: GradientCodec, aggregation: Aggregation, contributions: Sequence[ReceivedPart], elements: int, large: bool
) -> AveragedPart:
    """Equal contributions, in the order of the senders' peer ids, give equal bytes on every machine.

    Zeros when nobody has samples. CenteredClip begins at three members; below, nobody knows which one is wrong.
    """
    huge: list[str] = []
    for again in (False, True):
        taking = [part for part in contributions if part.weight > 0.0 and part.sender not in huge]
        factors, products = dict[str, float](), None
        if aggregation == "mean" or len(taking) < FEWEST:
            average = weighted_mean(codec, taking, elements, large)
        else:
            average, factors, products = centered_clip(codec, _bounded(taking), elements, large)
        if again or average.abs().max() <= LARGEST:
            break
        huge = [part.sender for part in taking if _magnitude(codec, part, elements, large) > LARGEST]
    compared = products if len(taking) == len(contributions) else None
    return AveragedPart(codec.averages.of(large).encode(average), frozenset(factors), huge, compared)


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
) -> tuple[torch.Tensor, dict[str, float], np.ndarray]:
    """The average (elements,) fp32, by which factor the distance of each sender was shortened where it was, products.

    contributions: in the order of the senders, each with a weight above 0, FEWEST or more. The result may be beyond
    fp32 where values are. products: see `AveragedPart`.
    """
    weights, spreads = np.array([(part.weight, part.spread) for part in contributions]).T
    votes = _votes(weights)
    likely = _likely_distances(weights, votes)
    least = FLOOR * _median(spreads * np.sqrt(weights), votes) * math.sqrt(elements)
    centre, gram = _look(codec, contributions, elements, large, votes)
    factors = _factors(gram.diagonal()[:-1], likely, votes, least)
    factors[factors * LEFT_OUT < 1.0] = 0.0
    if len(contributions) >= LEAST_OPPOSED:
        others = np.where(_opposed(gram, weights, votes, elements), 0.0, factors)
        factors = others if others.any() else factors  # else nobody knows who is right
    left = np.zeros(1)
    while left.min() == 0.0:
        kept = np.flatnonzero(factors > 0.0)
        among, have, said = gram[np.ix_(kept, kept)], weights[kept], votes[kept]
        rows, shortened = _shortened(among, have, likely[kept], said, factors[kept], least)
        rows, left = _straightened(among, rows, have, said, least)
        factors[kept[left == 0.0]] = 0.0
    factors[kept] = shortened * left
    taken = np.fmax(0.0, _multiplied(have[None], rows)[0])
    average = _moved(codec, [contributions[i] for i in kept], centre, taken, add_up(have), large)
    clipped = {part.sender: f for part, f in zip(contributions, factors.tolist(), strict=True) if f < 1.0}
    along = gram[:-1, -1] + gram[-1, -1] / 2
    return average, clipped, gram[:-1, :-1] + along[:, None] + along


def _shortened(
    gram: np.ndarray, weights: np.ndarray, likely: np.ndarray, votes: np.ndarray, factors: np.ndarray, least: float
) -> tuple[np.ndarray, np.ndarray]:
    """Each member within the radius around the centre, which moves to their mean, and the factors in the end.

    gram: of the members' differences from the first centre, of which all are sums: row i has what is taken of each.
    """
    centre, total = np.zeros(len(weights)), add_up(weights)
    for iteration in range(ITERATIONS + 1):
        rows = np.diag(factors) + (1.0 - factors)[:, None] * centre
        if iteration == ITERATIONS or factors.min() == 1.0:
            break
        centre = _multiplied(weights[None] / total, rows)[0]
        towards = _multiplied(gram, centre[:, None])[:, 0]
        squares = gram.diagonal() - 2.0 * towards + add_up(centre * towards)
        factors = _factors(np.fmax(0.0, squares), likely, votes, least)
    return rows, factors


def _straightened(
    gram: np.ndarray, rows: np.ndarray, weights: np.ndarray, votes: np.ndarray, least: float
) -> tuple[np.ndarray, np.ndarray]:
    """Members as `rows` has them, none further along what many share than is usual; how much is left of each.

    gram, rows: see `_shortened`. Of whom most sticks out, nothing is left: the mean is to be taken without it.
    """
    roots, whole = np.sqrt(weights), add_up(weights)
    left, alike = np.ones(len(weights)), np.ones(len(weights))
    for _ in range(DIRECTIONS if len(weights) >= LEAST_OPPOSED else 0):
        apart = rows - _multiplied(weights[None] / whole, rows)
        products = _multiplied(_multiplied(apart, gram), apart.T)
        noise = _median(np.sqrt(np.fmax(products.diagonal(), 0.0) / (1.0 / weights - 1.0 / whole)), votes)
        alone = products + noise * noise / whole  # without what all differences share: the noise of the mean
        sizes = np.sqrt(np.fmax(alone.diagonal(), TINY))
        shares, strength = _direction(alone / sizes / sizes[:, None])
        if not strength > 1.0 + LEANING * len(weights):
            break
        shares = shares / sizes
        along = _multiplied(products, shares[:, None])[:, 0]
        length = math.sqrt(max(TINY, add_up(shares * along)))
        shares, along = shares / length, along / length
        beyond = along - _median(along, alike)
        usual = _median(np.abs(beyond) * roots, alike)
        excess = np.fmax(0.0, np.abs(beyond) - max(OPPOSED * usual, FLOOR * noise, least) / roots)
        if np.count_nonzero(excess) < 2:
            break
        left *= np.where(excess > MOST * sizes, 0.0, 1.0 - excess / np.fmax(np.abs(beyond), TINY))
        rows = rows - np.copysign(excess, beyond)[:, None] * _multiplied(shares[None], apart)
    return rows, left


def _direction(correlations: np.ndarray) -> tuple[np.ndarray, float]:
    """The first eigenvector of this matrix, of length 1, and its eigenvalue, by squaring it again and again."""
    power = correlations
    for _ in range(SQUARINGS):
        power = _multiplied(power, power)
        power = power / power.diagonal().max()
    first = power[:, power.diagonal().argmax()]
    first = first / math.sqrt(add_up(first * first))
    return first, add_up(first * _multiplied(correlations, first[:, None])[:, 0])


def _multiplied(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The product of two matrices, summed in a fixed order."""
    product = np.zeros((left.shape[0], right.shape[1]))
    for k in range(left.shape[1]):
        product += left[:, k, None] * right[k]
    return product


def weighted_mean(
    codec: GradientCodec, contributions: Sequence[ReceivedPart], elements: int, large: bool
) -> torch.Tensor:
    """The mean over the samples, (elements,) fp32; zeros when nobody has any."""
    weights = np.array([part.weight for part in contributions])
    return _moved(codec, contributions, torch.zeros(elements), weights, add_up(weights), large)


def spread(gradient: GradientBuffer, parts: Sequence[TensorPart]) -> float:
    """Root mean square of all parts, from the first BLOCK elements of each."""
    total, kernels, zeros = 0.0, implementation().kernels, np.zeros(BLOCK, np.float32)
    for part in parts:
        looked_at = min(BLOCK, part.elements)
        first, gram = torch.empty(1, looked_at), np.zeros((2, 2))
        gradient.codec.of(part.large).decode_into(gradient.read(part.start, part.start + looked_at), first[0])
        kernels.add_products(first.numpy(), zeros[:looked_at], gram)
        total += float(gram[0, 0]) * (part.elements / looked_at)
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
    total, weights = float(votes.sum()), np.maximum(weights, 1.0)
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


def _opposed(gram: np.ndarray, weights: np.ndarray, votes: np.ndarray, elements: int) -> np.ndarray:
    """True where a member points against the others. gram: of their differences from the centre, and of the centre.

    Asked for LEAST_OPPOSED members and more: what is usual cannot be told from three or four; honest members with few
    samples point anywhere.
    """
    squares, products, own = gram.diagonal()[:-1], gram[:-1, -1] + gram[-1, -1], gram[-1, -1]
    if own <= 0.0:
        return np.zeros(len(weights), bool)
    sizes = np.fmax(0.0, squares + 2.0 * products - own) * weights
    shares = np.fmin(sizes, _median(sizes, votes)) / add_up(weights)  # who is larger has no larger share in a median
    along = (products - shares) / own
    behind = _median(along, votes) - along
    usual = _median(np.abs(behind) * np.sqrt(weights), votes)
    chance = CHANCE * np.sqrt(squares / own / elements)
    return (along < 0.0) & (behind > OPPOSED * usual / np.sqrt(weights)) & (behind > chance)


def _look(
    codec: GradientCodec,
    contributions: Sequence[ReceivedPart],
    elements: int,
    large: bool,
    votes: np.ndarray | None = None,
) -> tuple[torch.Tensor, np.ndarray]:
    """The members' median, zeros without votes, and the products of their differences from it, and of itself.

    The latter (members + 1, members + 1) float64, it last.
    """
    kernels, members, centre = implementation().kernels, len(contributions), torch.zeros(elements)
    gram = np.zeros((members + 1, members + 1))
    piece = max(BLOCK, TOGETHER // members // BLOCK * BLOCK)  # whole blocks of every codec
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
        kernels.add_products(rows.numpy(), middle, gram)
    return centre, np.where(np.tri(members + 1, dtype=bool), gram.T, gram)


def _moved(
    codec: GradientCodec,
    contributions: Sequence[ReceivedPart],
    centre: torch.Tensor,
    taken: np.ndarray,
    whole: float,
    large: bool,
) -> torch.Tensor:
    """The mean in which each member has the weight `taken`, and the centre the rest of the `whole`."""
    summed = torch.zeros(centre.numel())
    for part, weight in zip(contributions, taken.tolist(), strict=True):
        codec.of(large).add_decoded(part.encoded, summed, weight)
    if whole <= 0.0:
        return summed
    if rest := whole - add_up(taken):
        summed.add_(centre * rest)
    return summed.div_(whole)


@functools.cache
def implementation() -> Implementation[PortableClip]:
    """The kernels of this machine. Call it once before any fork: loading or compiling them later delays a round."""
    return choose(PortableClip(), "tt_cli.swarm.allreduce.clipping.centered_clip_numba:NumbaClip", _trial)


def _trial(kernels: PortableClip) -> Iterator[tuple[str, object]]:
    """Results for values of unlike sizes and zeros of both signs, the last lane short."""
    draws = np.random.Generator(np.random.PCG64(9))
    for members in (3, 4, 10):
        rows = (draws.standard_t(3, (members, 2 * LANES + 77)) * 10.0 ** draws.uniform(-38, 37)).astype(np.float32)
        rows[1, :200], rows[2, :200] = 0.0, -0.0
        votes = draws.integers(1, VOTES, members)
        middle = np.empty(rows.shape[1], np.float32)
        kernels.median(rows, votes, middle)
        gram = np.ones((members + 1, members + 1))
        kernels.add_products(rows, middle, gram)
        yield "medians", middle.tobytes()
        yield "products", gram.tobytes()
