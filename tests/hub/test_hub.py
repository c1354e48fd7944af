"""What can go wrong with the Hub, as one line."""

from __future__ import annotations

import json

import pytest

from tt_cli.hub.hub_files import HubUnreachable, hub_errors


def test_an_answer_of_somebody_else_is_one_line() -> None:
    with pytest.raises(HubUnreachable, match="cannot look: the answer is not the Hub's"), hub_errors("cannot look"):
        json.loads("<html>Log in to this network</html>")
