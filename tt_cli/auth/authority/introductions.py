"""Introductions: who gets a pass is told where some members are, beside the initial peers that the run file names.

A newcomer that joins through one peer alone sees the swarm that this one shows; and where none of the run file's peers
answers, nobody else could come. Kept in memory alone, for as long as a pass lasts: who renews its pass says it again.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress

from tt_cli.identity.multiaddr import is_multiaddr
from tt_cli.identity.passes import InvalidPass, Notice, Pass, allowed

MOST_NAMED = 6  # members, each of another user


class Introductions:
    """Members' addresses, as they said them. For any thread."""

    def __init__(self) -> None:
        self._told = dict[str, tuple[Pass, list[str]]]()  # by peer id
        self._lock = threading.Lock()

    def of(self, asking: Pass, addresses: Sequence[str], notice: Notice) -> list[str]:
        """Multiaddrs of members for who got this pass, and says that it is at `addresses`: none but its own count.

        Of each user one peer, drawn by chance, so that nobody's peers are most of them. No word of who is banned.
        """
        with self._lock:
            self._told = {peer: told for peer, told in self._told.items() if asking.issued < told[0].expires}
            self._told.pop(asking.peer_id, None)
            drawn = list(self._told.values())
            own = [one for one in addresses if one.endswith(f"/p2p/{asking.peer_id}") and is_multiaddr(one)]
            if own:
                self._told[asking.peer_id] = asking, own
        secrets.SystemRandom().shuffle(drawn)
        by_user = dict[str, list[str]]()
        for held, where in drawn:
            with suppress(InvalidPass):
                allowed(held, notice)
                by_user.setdefault(held.user.casefold(), where)
        return [address for where in list(by_user.values())[:MOST_NAMED] for address in where]
