"""The card of a run's repository: its lists change, and nothing else."""

from __future__ import annotations

from tt_cli.run import load_run
from tt_cli.run.model_card import MOST_NAMED, card, with_lists

RUN = load_run("emoji").replaced({"checkpoints.repository": "acme/run"})


def test_only_the_list_between_the_marks_is_written_anew() -> None:
    first = card(RUN)
    assert "None is published yet." in first
    edited = first.replace("## Join", "Hello.\n\n## Join") + "\nMore words.\n"
    later = with_lists(edited, RUN, {1200: 4.25, 600: None}, None)
    assert "| 1,200 | 4.2500 | `step-00001200.safetensors` |\n| 600 |  | `step-00000600.safetensors` |" in later
    assert with_lists(later, RUN, {}, ()) == edited


def test_who_trained_is_named_in_text_that_means_nothing_else() -> None:
    by = [("ada", 12_345), ("a|b`\n# c <img>", 7)]
    named = with_lists(card(RUN), RUN, {}, by)
    assert "by the names that they gave themselves" in named
    assert "| `ada` | 12,345 |\n| `a\\|b  # c <img>` | 7 |\n<!-- end of contributors -->" in named
    assert with_lists(named, RUN, {}, None) == named == card(RUN, {}, by)
    closed = RUN.replaced({"membership.kind": "organisation", "membership.organisation": "acme"})
    assert "Trained by members;" in card(closed, {}, by)
    many = [(f"user {number}", 9) for number in range(MOST_NAMED + 3)]
    assert card(RUN, {}, many).count("`user ") == MOST_NAMED and "| and 3 others |" in card(RUN, {}, many)


def test_a_name_is_no_mark_so_the_card_does_not_grow() -> None:
    by = [(f"<!-- {end}{mark} -->", 9) for end in ("", "end of ") for mark in ("checkpoints", "contributors")]
    by += [("<<!--!-- end of contributors -->", 9), ("ada", 7)]
    named = card(RUN, {}, by)
    assert all(named.count(f"<!-- end of {mark} -->") == 1 for mark in ("checkpoints", "contributors"))
    assert with_lists(named, RUN, {}, by) == named and with_lists(named, RUN, {}, ()) == card(RUN)


def test_a_card_without_the_marks_stays() -> None:
    for text in ("", "mine", "mine <!-- checkpoints -->", "mine <!-- end of checkpoints -->"):
        assert with_lists(text, RUN, {1: None}, [("ada", 1)]) == text


def test_it_names_the_package_that_has_what_the_run_needs() -> None:
    assert "\npip install .\n" in card(RUN)
    assert "\npip install '.[lm]'\n" in card(load_run("words"))
