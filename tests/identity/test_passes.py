"""Passes and notices: what is signed is read again, and nothing else is."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import example, given
from hypothesis import strategies as st

from tt_cli.identity.passes import (
    CLOCK_LEEWAY,
    MAX_PASS,
    InvalidPass,
    Notice,
    Pass,
    RollBack,
    allowed,
    authority_keys,
    encode,
    public_text,
    read_notice,
    read_pass,
    sign,
)

KEY, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([number] * 32)) for number in (1, 2))
PUBLIC = public_text(KEY)
NOW = 1_800_000_000.0
names = st.text(min_size=1, max_size=40)
times = st.floats(0, 2**39, allow_nan=False)
passes = st.builds(Pass, user=names, peer_id=names, run=names, issued=times, expires=times).filter(
    lambda one: one.issued < one.expires
)
roll_backs = st.builds(RollBack, step=st.integers(0, 2**62), digest=names, source=names, order=st.integers(0, 2**62))
notices = st.builds(
    Notice,
    run=names,
    number=st.integers(0, 2**62),
    issued=times,
    banned_users=st.frozensets(names, max_size=5),
    banned_peers=st.frozensets(names, max_size=5),
    paused=st.text(max_size=40),
    rollback=st.none() | roll_backs,
)
ADA = Pass("ada", "QmPeer", "emoji-0123abcd", NOW, NOW + 3600)
CALM = Notice("emoji-0123abcd", 7, NOW, frozenset(), frozenset(), "", None)


@given(passes)
def test_what_is_signed_is_read_again(what: Pass) -> None:
    text = sign(what, KEY)
    assert read_pass(text, PUBLIC, what.run, what.issued) == what
    assert len(sign(ADA, KEY)) < MAX_PASS / 8


@given(notices)
def test_a_notice_is_read_again(what: Notice) -> None:
    assert read_notice(sign(what, KEY), PUBLIC, what.run, what.issued) == what


@given(st.data())
def test_any_changed_character_is_refused(data: st.DataObject) -> None:
    for text, read in ((sign(ADA, KEY), read_pass), (sign(CALM, KEY), read_notice)):
        at = data.draw(st.integers(0, len(text) - 1))
        other = data.draw(st.characters(exclude_characters=text[at]))
        with pytest.raises(InvalidPass):
            read(text[:at] + other + text[at + 1 :], PUBLIC, ADA.run, NOW)


@given(st.data())
def test_any_cut_or_longer_text_is_refused(data: st.DataObject) -> None:
    text = sign(ADA, KEY)
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    longer = text + data.draw(st.text(min_size=1, max_size=8))
    for one in (cut, longer):
        with pytest.raises(InvalidPass):
            read_pass(one, PUBLIC, ADA.run, NOW)


def test_one_pass_has_one_text_of_bounded_length() -> None:
    text, spaced = sign(ADA, KEY), json.dumps(asdict(ADA), sort_keys=True).encode()
    for other, words in (
        (text[:-1] + chr(ord(text[-1]) + 1), "one spelling"),  # of the same bytes
        (f"tt-pass-1.{encode(spaced)}.{encode(KEY.sign(b'tt-pass-1.' + spaced))}", "not in the canonical form"),
        (sign(replace(ADA, user="\N{BULLET}" * 1000), KEY), "longer than 4096"),
    ):
        with pytest.raises(InvalidPass, match=words):
            read_pass(other, PUBLIC, ADA.run, NOW)


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
@example("tt-pass-1..")
@example("tt-pass-1.e30.AA")
@example("x" * (MAX_PASS + 1))
def test_anything_else_is_refused_in_words(text: str) -> None:
    for read in (read_pass, read_notice):
        with pytest.raises(InvalidPass) as caught:
            read(text, PUBLIC, ADA.run, NOW)
        assert str(caught.value)


@given(st.floats(-7200, 7200), st.floats(0, 300))
def test_the_edges_of_its_time(offset: float, leeway: float) -> None:
    now = ADA.issued + offset
    counts = ADA.issued <= now + leeway and now < ADA.expires + leeway
    if counts:
        assert read_pass(sign(ADA, KEY), PUBLIC, ADA.run, now, leeway=leeway) == ADA
    else:
        with pytest.raises(InvalidPass, match="expired|not yet valid"):
            read_pass(sign(ADA, KEY), PUBLIC, ADA.run, now, leeway=leeway)


def test_honest_clocks_may_differ_a_little() -> None:
    for now in (ADA.issued - CLOCK_LEEWAY, ADA.expires + CLOCK_LEEWAY - 1):
        assert read_pass(sign(ADA, KEY), PUBLIC, ADA.run, now) == ADA
    for now, words in ((ADA.issued - 31, "not yet valid: it begins in 31 s"), (ADA.expires + 30, "expired 30 s ago")):
        with pytest.raises(InvalidPass, match=words):
            read_pass(sign(ADA, KEY), PUBLIC, ADA.run, now)


def test_a_pass_of_another_key_or_run_is_refused() -> None:
    with pytest.raises(InvalidPass, match="forged pass"):
        read_pass(sign(ADA, OTHER), PUBLIC, ADA.run, NOW)
    with pytest.raises(InvalidPass, match="pass of another run: it is for emoji-0123abcd, this run is dalle-1"):
        read_pass(sign(ADA, KEY), PUBLIC, "dalle-1", NOW)
    with pytest.raises(InvalidPass, match="notice of another run"):
        read_notice(sign(CALM, KEY), PUBLIC, "dalle-1", NOW)


def test_a_notice_is_no_pass_and_a_pass_no_notice() -> None:
    with pytest.raises(InvalidPass, match="does not begin with tt-notice-1"):
        read_notice(sign(ADA, KEY), PUBLIC, ADA.run, NOW)
    renamed = "tt-notice-1." + sign(ADA, KEY).partition(".")[2]
    with pytest.raises(InvalidPass, match="forged notice"):
        read_notice(renamed, PUBLIC, ADA.run, NOW)


def test_signed_nonsense_is_refused() -> None:
    for wrong in (
        replace(ADA, expires=math.nan),
        replace(ADA, expires=math.inf),
        replace(ADA, issued=-1.0),
        replace(ADA, expires=ADA.issued),
        replace(ADA, user=""),
        replace(ADA, user="x" * 1001),
        replace(ADA, user=3),  # type: ignore[arg-type] # that is what is tested
    ):
        with pytest.raises((InvalidPass, ValueError)):
            read_pass(sign(wrong, KEY), PUBLIC, ADA.run, NOW)
    for notice in (
        replace(CALM, number=-1),
        replace(CALM, number=True),
        replace(CALM, issued=NOW + 60),
        replace(CALM, rollback=RollBack(-1, "d", "s", 1)),
    ):
        with pytest.raises(InvalidPass):
            read_notice(sign(notice, KEY), PUBLIC, CALM.run, NOW)


def test_the_old_key_counts_until_its_day() -> None:
    both = f"{public_text(OTHER)} {PUBLIC} until 2027-01-15"
    with pytest.raises(ValueError, match="while the key changes"):
        authority_keys(both.replace("until", "since"))
    assert [until for _, until in authority_keys(both)] == [math.inf, 1_799_971_200.0]
    for key in (KEY, OTHER):
        early = replace(ADA, issued=1_799_971_000.0)
        assert read_pass(sign(early, key), both, ADA.run, 1_799_971_199.0) == early
    assert read_pass(sign(early, OTHER), both, ADA.run, 1_799_971_200.0) == early
    with pytest.raises(InvalidPass, match="forged"):
        read_pass(sign(early, KEY), both, ADA.run, 1_799_971_200.0)


def test_who_is_banned_is_refused() -> None:
    allowed(ADA, None)
    allowed(ADA, CALM)
    allowed(ADA, replace(CALM, banned_users=frozenset({"adam"}), banned_peers=frozenset({"QmOther"})))
    with pytest.raises(InvalidPass, match="user ada is banned"):
        allowed(ADA, replace(CALM, banned_users=frozenset({"Ada"})))
    with pytest.raises(InvalidPass, match="user ADA is banned"):
        allowed(replace(ADA, user="ADA"), replace(CALM, banned_users=frozenset({"ada"})))
    with pytest.raises(InvalidPass, match="peer QmPeer of user ada is banned"):
        allowed(ADA, replace(CALM, banned_peers=frozenset({"QmPeer"})))
