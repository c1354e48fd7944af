"""Decoding that a picture ends, in a module that costs the processes of a pool little to import."""

from __future__ import annotations

import os
import signal

from tt_cli.data.build.picture_decoding import Decoded, Undecodable, decode


def dying_decode(content: bytes, side: int) -> Decoded | Undecodable:
    if content == b"die":
        os.kill(os.getpid(), signal.SIGKILL)
    return decode(content, side)
