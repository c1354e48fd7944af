"""The card of a run's repository: its list of checkpoints changes, and nothing else."""

from __future__ import annotations

from tt_cli.run import load_run
from tt_cli.run.model_card import BEGIN, END, card, with_checkpoints

RUN = load_run("emoji").replaced({"checkpoints.repository": "acme/run"})


def test_only_the_list_between_the_marks_is_written_anew() -> None:
    first = card(RUN)
    assert "None is published yet." in first
    edited = first.replace("## Join", "Hello.\n\n## Join") + "\nMore words.\n"
    later = with_checkpoints(edited, RUN, {1200: 4.25, 600: None})
    assert "| 1,200 | 4.2500 | `step-00001200.safetensors` |\n| 600 |  | `step-00000600.safetensors` |" in later
    assert with_checkpoints(later, RUN, {}) == edited


def test_a_card_without_the_marks_stays() -> None:
    for text in ("", "mine", f"mine {BEGIN}", f"mine {END}"):
        assert with_checkpoints(text, RUN, {1: None}) == text
