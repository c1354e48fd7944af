"""What is committed is what the sources build; it is small, and needs nobody else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tt_cli.run import load_run
from tt_cli.web.index_html import STATIC, index_html
from tt_cli.web.run_facts import figures, run_facts

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tt_cli/web/page"
RUN = {
    "name": "emoji",
    "title": "Draws <b>emoji</b> & more",
    "story": ["One \\1 <i>word</i>.", "Another."],
    "join": {"commands": ['tt join emoji --peer "/ip4/<x>"']},
}


@pytest.mark.debian
def test_what_is_committed_is_what_the_sources_build(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts/build_page", "--to", tmp_path], check=True, timeout=200)
    built = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert built == {file.name: file.read_bytes() for file in STATIC.iterdir()}, "run scripts/build_page and commit"


def test_the_page_is_small() -> None:
    assert sum(file.stat().st_size for file in STATIC.iterdir()) < 300_000


def test_the_page_and_its_build_name_no_host() -> None:
    locked = (PAGE / "package-lock.json").read_text()
    assert not re.search(
        r"https?://", re.sub(r'"url": "https://github.com/[^"]*"', "", locked)
    )  # where its makers ask for thanks
    for file in STATIC.glob("*.*"):
        if file.suffix in (".html", ".css", ".js"):
            addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", file.read_text()))
            assert addresses <= {"http://www.w3.org"}, file.name  # the name of SVG's namespace; never asked
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\bstyle=|\bon\w+=|<style", page), "the content policy forbids these"


def test_the_run_is_written_into_the_page_escaped() -> None:
    page = index_html(RUN)
    assert "<title>Draws &lt;b&gt;emoji&lt;/b&gt; &amp; more · tt</title>" in page
    assert "<p>One \\1 &lt;i&gt;word&lt;/i&gt;.</p><p>Another.</p>" in page
    assert page.count("tt join emoji --peer &#34;/ip4/&lt;x&gt;&#34;") == 2
    assert "--hours 23:00-07:00" in page
    assert "tt-static" not in page
    assert "{%" not in page and "{{" not in page
    assert '<meta name="tt-static" content="1">' in index_html(RUN, static=True)


def test_the_command_names_the_address_that_most_others_reach() -> None:
    addresses = [f"/ip4/{address}/p2p/x" for address in ("127.0.0.1/tcp/1", "192.168.1.7/tcp/1", "8.8.8.8/tcp/1")]
    for known in (addresses, addresses[::-1]):
        commands = run_facts(load_run("emoji"), "emoji", {}, known)["join"]["commands"]
        assert commands == ["tt join emoji --peer /ip4/8.8.8.8/tcp/1/p2p/x"]


def test_a_run_that_says_little_keeps_the_pages_own_words() -> None:
    page = index_html({})
    assert "One model, trained by many" in page
    assert "tt join RUN" in page


def test_figures_of_a_run_with_local_steps_tell_of_inner_steps() -> None:
    totals = {"peers": 1, "devices": 1, "seconds": 0, "samples": 0}
    run = load_run("emoji").replaced({"optimizer": {"name": "local", "inner_batch": 24}})
    local, averaged = (figures(each, {"parameters": 10**6}, {}, totals) for each in (run, load_run("emoji")))
    labels = [[figure["label"] for figure in each["communication"]] for each in (local, averaged)]
    assert labels[0][:2] == ["one pseudo-gradient, as it travels", "the same in 32 bits"]
    assert local["communication"][3] == {"label": "of them in one inner step of a peer", "value": 24, "unit": "samples"}
    assert labels[1][0] == "one gradient, as it travels" and not any("inner" in label for label in labels[1])
    assert [each["memory"][2]["value"] for each in (local, averaged)] == [0, 2]
    sent = [(each["communication"][0]["value"], each["communication"][-1]["value"]) for each in (local, averaged)]
    assert sent == [(0.2, 0.22), (1.0, 1.01)], "sparse messages, and 8 bits and a scale"


def test_names_that_nobody_checked_are_marked() -> None:
    open_run = load_run("emoji")
    closed = {"kind": "organisation", "organisation": "acme"}
    guarded = {**closed, "authority": "https://passes.example.org", "authority_key": "ed25519:" + "A" * 43}
    for membership, marked in (({}, True), (closed, True), (guarded, False)):
        run = open_run.replaced({f"membership.{key}": value for key, value in membership.items()})
        page = index_html(run_facts(run, "emoji", {}, []))
        assert page.count("Names are self-given here: nobody checked who is behind one.") == (2 if marked else 0)
    assert "self-given" not in index_html(RUN)
