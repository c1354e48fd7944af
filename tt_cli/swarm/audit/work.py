"""Audits of work: members whose gradients come of no examples, as one reducer sees it over rounds.

- With g what the gradients of all examples have in common and v the variance of one, the product of two members' means
  over w examples each is |g|² on average, and the square of one is |g|² + v / w. What both are is said by medians over
  the members, which a minority changes little, whatever it sends. CenteredClip has the products anyway.
- A member's likeness is the median of its products with the others over |g|², as if its square were what its examples
  allow: about 1 for who works, however many examples it has and however its gradient is scaled, 0 for zeros and noise.
- A gradient is further from every other than its own noise. Who is much nearer to one that came before has copied it.

What is found is told; nothing is proven by it, and nothing follows. Who has unlike data is less like the others, or
even against them: only who is surely neither is named.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from tt_cli.swarm.allreduce.clipping.centered_clip import FLOOR
from tt_cli.swarm.allreduce.reducer import Reducer

FEWEST_MEMBERS = 4  # of two others nobody knows which one is wrong
WINDOW, FEWEST = 10, 5  # rounds with a member that are looked at; from how many on it is judged
LIKE = 0.25  # a mean likeness, or its opposite, beyond which a member has something to say
SURE = 4.0  # standard errors of the mean
NEAR = 0.05  # of its noise: so near to another gradient is none of one's own
LEAST_OWN = 1e-4  # of its square that is noise: with less, honest members may send the same
COPIED = 3  # rounds
TINY = 1e-12  # of what is usual: rounding
REMEMBERED = 100  # rounds for which it is kept how who has left worked
NOTHING, UNLIKE_ALL = "it sends zeros for the examples that it counts", "what it sends is like noise to the others"
COPY = "what it sends is a copy of what another member sent"


class WorkAudits:
    """What one peer, as a reducer, knows of the members' work. For one thread."""

    def __init__(self) -> None:
        self._round = 0
        self._seen: dict[str, deque[tuple[int, float, bool]]] = {}  # member → round, likeness, whether it is a copy

    def look(self, reducer: Reducer) -> dict[str, str]:
        """Count in a round that was committed. Returns the members without work lately, each with what it sends."""
        self._round += 1
        self._seen = {member: seen for member, seen in self._seen.items() if seen[-1][0] > self._round - REMEMBERED}
        came = [sender for sender, weight in reducer.weights.items() if weight]
        members = [sender for sender in came if reducer.used(sender) == len(reducer.parts)]
        places = [reducer.senders.index(member) for member in members]
        weights = np.array([reducer.weights[member] for member in members])
        usual = np.square([reducer.spreads.get(member, 0.0) for member in members])
        usual *= sum(part.elements for part in reducer.parts)
        likenesses, copies = judge(reducer.products[np.ix_(places, places)], weights, usual)
        for member, likeness, copied in zip(members, likenesses, copies, strict=False):
            self._seen.setdefault(member, deque(maxlen=WINDOW)).append((self._round, likeness, copied))
        return {member: words for member in self._seen if member != reducer.me and (words := self._words(member))}

    def _words(self, member: str) -> str:
        """What this member does instead of work, "" where it works or that is not known yet."""
        _, likenesses, copies = map(np.array, zip(*self._seen[member], strict=True))
        if copies.sum() >= COPIED:
            return COPY
        error = likenesses.std(ddof=1) / math.sqrt(len(likenesses)) if len(likenesses) >= FEWEST else math.inf
        if not abs(likenesses.mean()) + SURE * error < LIKE:
            return ""
        return UNLIKE_ALL if likenesses.any() else NOTHING


@np.errstate(all="ignore")  # whoever sends next to nothing is infinitely far from the others
def judge(products: np.ndarray, weights: np.ndarray, usual: np.ndarray) -> tuple[list[float], list[bool]]:
    """Members' likenesses, and whether they are copies, in the order in which they came; of none where nobody knows.

    products: (members, members) float64. weights: their examples (members,). usual: their squares (members,) if all of
    a gradient were as large. Where most gradients vanish, as in rows of rare tokens, a few examples may have none.
    """
    if len(weights) < FEWEST_MEMBERS:
        return [], []
    squares = products.diagonal()
    common = np.array([np.median(np.delete(row, i)) for i, row in enumerate(products)])
    if (shared := float(np.median(common))) <= 0.0 or np.median(squares) < FLOOR**2 * np.median(usual):
        return [], []
    noise = np.fmax(0.0, np.median((squares - shared) * weights)) / weights
    sizes = np.sqrt(np.where(squares > TINY * np.median(squares), squares, np.inf))
    likenesses = common / shared * np.sqrt(shared + noise) / sizes
    own = noise / (shared + noise)
    apart = 1.0 - np.square(products / sizes / sizes[:, None])  # the squared sine
    near = (own > LEAST_OWN)[:, None] & (apart < NEAR * own[:, None])
    return likenesses.tolist(), [bool(row[:i].any()) for i, row in enumerate(near)]
