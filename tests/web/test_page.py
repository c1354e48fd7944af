"""The page as a person meets it: a real browser, real keys and clicks, its real server, and 100,000 made steps."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright
from task.test_digits import RUN as DIGITS
from told import MOST

from tests.web.recorded import RUN, TABLES, write_history
from tests.web.standin import CHECKPOINTS, HOSTILE, MadeHistory, Served, draw_pictures
from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import database_url
from tt_cli.memory import shown
from tt_cli.memory.question import CalculatorQuestion
from tt_cli.memory.report import report
from tt_cli.run import load_run
from tt_cli.web import live_updates, step_columns
from tt_cli.web.queries import Answers
from tt_cli.web.site_export import export

pytestmark = [pytest.mark.debian, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
AXE = ROOT / "tt_cli/web/page/node_modules/axe-core/axe.min.js"
CHROMIUM = "/usr/bin/chromium"
DISABLED = [
    *("WebUIOmniboxPopup", "WebUIOmniboxAimPopup"),  # a page each in every window: a third of a test's time
    # And what playwright disables, whose list this one replaces: calls to others, and what is in a test's way.
    *("AimEnabled", "NetworkTimeServiceQuerying", "OptimizationHints", "PreconnectToSearch", "MediaRouter"),
    *("AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "PaintHolding", "LensOverlay"),
    *("AvoidCorsURLLoaderRestartOnRedirect", "HttpsUpgrades", "HttpsFirstBalancedModeAutoEnable"),
    "ThirdPartyStoragePartitioning",
]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    f"--disable-features={','.join(DISABLED)}",
]
SMALL: Any = {"width": 360, "height": 740}
LARGE: Any = {"width": 1440, "height": 900}

expect.set_options(timeout=15_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def axe() -> str:
    subprocess.run([ROOT / "scripts/build_page", "--packages"], check=True, timeout=120)
    return AXE.read_text()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pictures = tmp_path_factory.mktemp("pictures")
    draw_pictures(pictures)
    with pytest.MonkeyPatch.context() as patch:  # what is new is told at once
        patch.setattr(live_updates, "LOOK_SECONDS", 0.05)
        patch.setattr(live_updates, "BEGIN", live_updates.Message("retry: 50\n\n"))
        patch.setattr(step_columns, "LOOK_SECONDS", 0.0)
        one = Served(MadeHistory(100_000, 30), pictures)
        yield one
        one.gone()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport=LARGE, reduced_motion="reduce") as context:
        yield context


def opened(context: BrowserContext, served: Served, *, clock: bool = False) -> Page:
    """The page with its first answers in. Whatever goes wrong in it is in `page.complaints`."""
    page = context.new_page()
    complaints: list[str] = []
    page.complaints = complaints  # type: ignore[attr-defined]
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(served.url) else complaints.append(request.url))
    if clock:
        page.clock.install()
    page.goto(served.url)
    expect(page.locator("#f-trainers")).to_have_text(re.compile(r"\d"))
    expect(page.locator("#facts dt").first).to_be_visible()
    return page


def complaints(page: Page) -> list[str]:
    found: list[str] = page.complaints  # type: ignore[attr-defined]
    return found


def violations(page: Page, axe: str, within: str = "html") -> list[Any]:
    page.evaluate(axe)
    found = page.evaluate("within => axe.run(within, {resultTypes: ['violations']})", within)["violations"]
    return [(rule["id"], [node["html"][:160] for node in rule["nodes"][:3]]) for rule in found]


def choose(control: Locator) -> None:
    """With the keyboard: what moves meanwhile, for the page is still filling, cannot be missed."""
    control.focus()
    control.press("Space")
    expect(control).to_be_checked()


def fits(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


def test_every_view_is_accessible_and_fits(context: BrowserContext, served: Served, axe: str) -> None:
    page = opened(context, served)
    expect(page.locator("#plot-loss canvas")).to_be_visible()
    for summary in page.locator("summary").all():
        summary.click()
    page.get_by_role("button", name="Show all").click()
    for scheme, size, view in (("light", LARGE, "Map"), ("dark", SMALL, "Map"), ("dark", LARGE, "Table")):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(size)
        choose(page.get_by_role("radio", name=view))
        assert violations(page, axe) == []
        assert fits(page)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(SMALL)
    choose(page.get_by_label("Since the start"))
    assert violations(page, axe, "#swarm") == []
    assert fits(page)
    assert page.evaluate("getComputedStyle(document.querySelector('.ruler .now')).animationName") == "none"
    assert complaints(page) == []


def test_an_empty_run_says_so(context: BrowserContext, axe: str, tmp_path: Path) -> None:
    empty = Served(MadeHistory(peers=1), tmp_path)
    page = opened(context, empty)
    for words in ("Nobody is training", "No step is recorded", "No pictures yet", "None has been published"):
        expect(page.get_by_text(words).first).to_be_visible()
    expect(page.locator("#f-eta-of")).to_have_text("nobody computes")
    expect(page.locator("#leaders-empty")).to_have_text("Nobody in the last 24 hours.")  # maybe the run is over
    page.set_viewport_size(SMALL)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert violations(page, axe) == []
    assert fits(page)
    assert complaints(page) == []
    page.close()
    empty.gone()


def test_a_run_of_another_kind_shows_its_own_figures_and_no_pictures(
    context: BrowserContext, axe: str, tmp_path: Path
) -> None:
    digits = Served(MadeHistory(500, 4, {"wrong": 0.125}, prompts=()), tmp_path, DIGITS)
    page = opened(context, digits)
    facts = page.locator("#facts").inner_text().split("\n")
    assert facts[facts.index("Kind") + 1] == "digits" and not {"Layers", "One example", "Vocabulary"} & {*facts}
    choose(page.get_by_role("radio", name="Table"))
    heads = page.locator("#swarm-table th").all_inner_texts()
    assert page.locator("#swarm-table tbody tr").first.locator("td").all_inner_texts()[heads.index("Figures")] == (
        "wrong 0.125"
    )
    expect(page.locator("#f-loss-of")).to_have_text("of the last step")
    expect(page.locator("#calc-command code")).to_have_text("tt calc digits --gpu 8GB")
    for absent in ("#samples", "#newest", "a[href='#samples']"):
        expect(page.locator(absent).first).to_be_hidden()
    said = page.locator("body").inner_text()
    assert not re.search(r"pictur|draws|drawn|\bnull\b|undefined|NaN|infer\.ipynb", said, re.IGNORECASE)
    assert violations(page, axe) == [] and fits(page) and complaints(page) == []
    page.close()
    digits.gone()
    for checkpoint in range(CHECKPOINTS):
        (tmp_path / f"{checkpoint}-0.txt").write_text("2 + 3 = 5")
    writes = Served(MadeHistory(500, 4, {"wrong": 0.125}, ("2 + 3",), "txt"), tmp_path, DIGITS)
    page = opened(context, writes)  # its task has samples
    expect(page.get_by_role("heading", name="What it writes")).to_be_visible()
    expect(page.locator("#pictures blockquote")).to_have_text(["2 + 3 = 5"])
    page.close()
    writes.gone()


def test_a_language_models_texts_are_shown_as_text(context: BrowserContext, axe: str, tmp_path: Path) -> None:
    prompts = ("Once upon a time", "She said")
    for checkpoint in range(CHECKPOINTS):
        for number, prompt in enumerate(prompts):
            text = f"{prompt} <script>window.hacked=1</script>\x1b[31m\nof {checkpoint}"
            (tmp_path / f"{checkpoint}-{number}.txt").write_text(text)
    words = Served(MadeHistory(500, 2, {"perplexity": 12.3}, prompts, "txt"), tmp_path, load_run("words"))
    page = opened(context, words)
    expect(page.get_by_role("heading", name="What it writes")).to_be_visible()
    texts = page.locator("#pictures blockquote")
    shown = "Once upon a time <script>window.hacked=1</script>·[31m of 11"
    expect(texts).to_have_text([shown, shown.replace(prompts[0], prompts[1])])
    expect(texts.first.locator("strong")).to_have_text("Once upon a time")
    expect(page.locator("[data-challenge=devices] dd").last).to_have_text("1 peer")
    page.get_by_label("Checkpoint", exact=True).focus()
    page.keyboard.press("Home")
    expect(texts.first).to_have_text(shown.replace("of 11", "of 0"))
    expect(page.locator("#newest")).to_be_hidden()
    assert violations(page, axe) == [] and fits(page) and complaints(page) == []
    assert page.evaluate("window.hacked") is None
    page.close()
    words.gone()


def test_a_step_is_seen_as_it_is_made(context: BrowserContext, served: Served) -> None:
    page = opened(context, served)
    expect(page.locator("#foot-state")).to_have_text("Live.")
    step = served.history.make_step()
    expect(page.locator("#f-step")).to_have_text(f"{step:,}")
    expect(page.locator("#readout")).to_contain_text(f"Step {step:,}")
    assert complaints(page) == []


def test_steps_that_were_taken_back_leave_a_page_that_is_open(context: BrowserContext, served: Served) -> None:
    page = opened(context, served)
    expect(page.locator("#foot-state")).to_have_text("Live.")
    for changed in (served.history.make_step, partial(served.history.go_back, 50), served.history.make_step):
        step = changed()
        expect(page.locator("#readout")).to_contain_text(f"Step {step:,} ")
    assert complaints(page) == []


def test_a_pause_is_told_with_the_organisers_reason(context: BrowserContext, served: Served, axe: str) -> None:
    page = opened(context, served)
    expect(page.locator("#notice")).to_be_hidden()
    served.history.now = {"paused": HOSTILE[0], "eta_s": None}
    served.history.make_step()  # a snapshot of another time
    expect(page.locator("#notice")).to_have_text(f"The organiser paused the run: {HOSTILE[0]}")
    assert [page.locator(place).inner_text() for place in ("#f-eta", "#f-eta-of")] == ["–", "paused"]
    assert page.locator("#notice").evaluate("box => getComputedStyle(box).position") == "static", "it may be long"
    assert violations(page, axe, "body") == [] and fits(page) and complaints(page) == []
    served.history.now = {}
    served.history.make_step()
    expect(page.locator("#notice")).to_be_hidden()


def test_who_trains_and_who_agrees_is_told_as_the_monitor_does(context: BrowserContext, served: Served) -> None:
    page = opened(context, served)
    words = page.locator("#swarm-words")
    helped = "and 1 auxiliary peer that keeps them together."
    expect(words).to_contain_text(f"{helped} 1 of 1 peer holds the same parameters, to the last bit.")
    served.history.now = {"digest": "", "holders": 4, "agreeing": 0, "trainers": 28}  # one of 29 is an assistant
    served.history.make_step()
    expect(words).to_contain_text(f"28 computers of 16 people, {helped} No state has a majority among 4 peers.")
    served.history.now = {}
    expect(page.locator("#calc-step")).to_contain_text(re.compile(r"tokens are 0\.\d+ TFLOP;"))


class HeldUp(BaseHTTPRequestHandler):
    """A proxy that passes on that there are events, and none of them."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.rfile.read(1)  # until the page closes


@pytest.mark.parametrize("held_up", [False, True])
def test_without_events_it_asks_again_and_again(context: BrowserContext, served: Served, held_up: bool) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), HeldUp) as proxy:
        threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        held = f"http://127.0.0.1:{proxy.server_address[1]}/"
        context.route("**/api/events", lambda route: route.continue_(url=held) if held_up else route.abort())
        page = opened(context, served, clock=True)
        expect(page.locator("#readout")).to_contain_text("Step")
        for changed in (served.history.make_step, partial(served.history.go_back, 50)):
            step, shown, late = f"{changed():,}", list[str](), time.monotonic() + MOST
            while shown != [step, "Asked every few seconds."]:  # the server may answer as a second ago
                assert time.monotonic() < late, shown
                page.clock.run_for(5_000)  # before it counts as gone
                shown = [page.locator(place).inner_text() for place in ("#f-step", "#foot-state")]
            expect(page.locator("#readout")).to_contain_text(f"Step {step} ")
        page.clock.run_for(40_000)  # it tries the events again
        expect(page.locator("#foot-state")).to_have_text("Asked every few seconds.")
        expect(page.locator("#notice")).to_be_hidden()
        context.close()
        proxy.shutdown()


def test_what_was_made_while_a_connection_was_lost_is_asked_for(context: BrowserContext, served: Served) -> None:
    page = opened(context, served)
    expect(page.locator("#foot-state")).to_have_text("Live.")
    expect(page.locator("#readout")).to_contain_text("Step")
    with page.expect_request(re.compile(r"api/history\?")):
        served.gone()
        served.back()


def test_a_curve_that_did_not_come_is_asked_for_again(context: BrowserContext, served: Served) -> None:
    context.route("**/api/history?**", lambda route: route.fulfill(status=503))
    page = opened(context, served, clock=True)
    expect(page.locator("#foot-state")).to_have_text("Live.")
    expect(page.locator("#readout")).to_have_text("No step is recorded yet.")
    context.unroute_all()
    for _ in range(4):  # a minute, in which the server is heard
        with page.expect_response("**/api/snapshot"):
            page.clock.run_for(16_000)
    expect(page.locator("#readout")).to_contain_text(f"Step {served.history.step:,} ")


def test_a_server_that_is_gone_is_told_and_its_return_is_seen(
    context: BrowserContext, served: Served, axe: str
) -> None:
    page = opened(context, served, clock=True)
    notice = page.locator("#notice")
    expect(page.locator("#readout")).to_contain_text("Step")
    served.gone()
    page.clock.run_for(10_000)
    expect(notice).to_contain_text(re.compile(r"last seen \d+ s ago. Trying again"))
    page.clock.fast_forward(120_000)
    expect(notice).to_contain_text("last seen 2 min ago")
    assert violations(page, axe, "body") == []
    step = served.history.make_step()  # made while nobody listened
    served.back()
    page.clock.run_for(6_000)
    expect(notice).to_be_hidden()
    expect(page.locator("#f-step")).to_have_text(f"{step:,}")
    expect(page.locator("#readout")).to_contain_text(f"Step {step:,}")


@pytest.mark.parametrize(("dragged", "across"), [("#plot-loss", "Steps"), ("#plot-active", "Time")])
def test_a_closer_look_asks_for_the_steps_in_between(
    context: BrowserContext, served: Served, dragged: str, across: str
) -> None:
    page = opened(context, served)
    choose(page.get_by_label(across, exact=True))
    plot = page.locator(f"{dragged} .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    with page.expect_request(re.compile(r"api/history\?.*first=\d+&last=\d+")) as asked:
        page.mouse.move(box["x"] + 0.5 * box["width"], middle)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=4)
        page.mouse.up()
    first, last = (int(number) for number in re.findall(r"(?:first|last)=(\d+)", asked.value.url))
    assert abs(first - 50_000) < 500
    assert abs(last - 60_000) < 500
    page.mouse.move(box["x"] + 0.5 * box["width"], middle)
    expect(page.locator("#readout")).to_contain_text(re.compile(r"Step 5[45],\d{3} ·.* loss \d\.\d+ · \d+ computers"))
    reset = page.get_by_role("button", name="Whole run")
    expect(reset).to_be_enabled()
    plot.dblclick()
    expect(reset).to_be_disabled()
    assert complaints(page) == []


def test_log_scale_smoothing_and_time(context: BrowserContext, served: Served) -> None:
    page = opened(context, served)
    canvas = page.locator("#plot-loss canvas")

    def drawn() -> str:
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        return str(canvas.evaluate("canvas => canvas.toDataURL()"))

    seen = {drawn()}
    page.get_by_label("Log scale").check()
    seen.add(drawn())
    page.get_by_label("Smoothing").fill("90")
    seen.add(drawn())
    choose(page.get_by_label("Time", exact=True))
    seen.add(drawn())
    page.get_by_role("button", name="Zoom in").click()
    seen.add(drawn())
    page.get_by_role("button", name="Earlier").click()
    seen.add(drawn())
    assert len(seen) == 6
    assert complaints(page) == []


def test_the_keyboard_goes_everywhere(context: BrowserContext, served: Served) -> None:
    page = opened(context, served)
    expect(page.locator("#plot-loss canvas")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Lend your computer")).to_be_focused()

    page.locator("#charts").focus()
    page.keyboard.press("Home")
    expect(page.locator("#readout")).to_contain_text("Step 1 ·")
    expect(page.locator("#readout-said")).to_contain_text("Step 1 ·")
    page.keyboard.press("+")
    expect(page.locator("#zoom-reset")).to_be_enabled()
    page.keyboard.press("0")
    expect(page.locator("#zoom-reset")).to_be_disabled()

    slider = page.get_by_label("Checkpoint", exact=True)
    picture = page.locator("#pictures img").first
    newest = picture.get_attribute("src")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#samples-step")).to_contain_text("held-out loss 3.800")
    assert picture.get_attribute("src") != newest
    page.keyboard.press("Home")
    expect(page.locator("#samples-step")).to_contain_text("held-out loss 6.800")

    page.get_by_role("radio", name="Map").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("table", name="Peers")).to_be_visible()


def test_the_leaderboard_of_a_day_and_ever(context: BrowserContext, served: Served) -> None:
    page = opened(context, served)
    rows = page.locator("#leaders tbody tr")
    expect(rows).to_have_count(15)
    first = rows.first.inner_text()
    choose(page.get_by_label("Since the start"))
    expect(rows.first).not_to_have_text(first, use_inner_text=True)
    expect(rows.first).to_contain_text("36M")
    expect(page.locator("#ever")).to_have_text("So far 60 computers took part.")
    page.get_by_role("button", name="Show all").click()
    expect(rows).to_have_count(28)


def test_the_ways_to_join_are_at_hand(context: BrowserContext, served: Served) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = opened(context, served)
    box = page.locator("#join-commands .command")
    box.get_by_role("button").click()
    expect(box.get_by_role("button")).to_contain_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == served.answers.run()["join"]["commands"][0]
    link = page.get_by_role("link", name="join.ipynb")
    expect(link).to_be_visible()
    assert link.evaluate("a => [a.href, a.hasAttribute('download')]") == [f"{served.url}notebooks/join.ipynb", True]


def test_names_of_peers_are_text(context: BrowserContext, served: Served) -> None:
    page = opened(context, served)
    choose(page.get_by_role("radio", name="Table"))
    for table in ("#leaders", "#swarm-table"):
        names = page.locator(f"{table} .who").all_inner_texts()
        assert HOSTILE[0] in names
        assert "</title><script>window.hacked=1</script>" in names
        assert not any(ord(letter) < 32 or letter in "\u202e\u202c\u200f\u2066" for name in names for letter in name)
        assert max(map(len, names)) <= 60
        assert page.locator(f"{table} img, {table} script").count() == 0
    assert page.evaluate("window.hacked") is None
    assert fits(page)


def test_inner_steps_and_bytes_an_hour_stand_apart_from_global_steps(context: BrowserContext, served: Served) -> None:
    page = opened(context, served)
    expect(page.locator("#f-step-of")).to_have_text(re.compile(r"^of [\d,]+ · 210 of 600 inner steps$"))
    choose(page.get_by_role("radio", name="Table"))
    heads = page.locator("#swarm-table th").all_inner_texts()
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#swarm-table tbody tr").all()[2:4]]
    assert "Figures" not in heads
    shown = [[row[heads.index(head)] for head in ("Inner steps", "Up, down an hour")] for row in rows]
    assert shown == [["2", "–, 1.4 GB"], ["3", "222 MB, 1.4 GB"]]


def test_the_colours_are_kept(context: BrowserContext, served: Served) -> None:
    page = opened(context, served)
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    switch = page.get_by_role("button", name="Colours")
    switch.click()
    switch.click()
    expect(switch).to_contain_text("dark")
    dark = page.evaluate(paper)
    assert dark != light
    page.reload()
    assert page.evaluate(paper) == dark
    assert context.cookies() == []


def test_without_scripts_it_tells_how_to_join(browser: Browser, served: Served) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(served.url)
    run = served.answers.run()
    assert page.title().startswith(run["title"])
    expect(page.get_by_role("heading", level=1)).to_have_text(run["title"])
    expect(page.locator("#join-commands code")).to_have_text(run["join"]["commands"][0])
    expect(page.get_by_text(run["story"][0])).to_be_visible()
    context.close()


QUESTIONS = [
    ({"Model": "GPT-2 large"}, {}),
    (
        {"Graphics card": "T4, 16 GB", "Optimizer": "8-bit Adam", "Activations": "checkpointed"},
        {"gpu": "t4", "bits": 8, "layers": "checkpointed"},
    ),
    (
        {"Numbers": "16 bits", "Optimizer’s place": "in the host’s memory", "Examples at a time": "8"},
        {"precision": "pure16", "offload": True, "micro_batch": 8},
    ),
]


def test_the_calculator_answers_as_the_command_does(context: BrowserContext, served: Served, axe: str) -> None:
    page = opened(context, served)
    expect(page.locator("#calc-command code")).to_have_text("tt calc emoji --gpu 8GB")
    asked: dict[str, Any] = {"model": "gpt2-large", "gpu": "8GB"}
    for chosen, question in QUESTIONS:
        for label, option in chosen.items():
            page.get_by_label(label, exact=True).select_option(option)
        asked |= question
        expect(page.locator("#calc-command code")).to_contain_text("gpt2-large")
        size = asked.get("micro_batch") or report(CalculatorQuestion(**asked)).largest or 1
        found = report(
            CalculatorQuestion(**asked | {"micro_batch": 1 << (size.bit_length() - 1)})
        )  # the page has powers of two
        verdict = page.locator("#calc-verdict")
        expect(verdict).to_contain_text("It fits" if found.fits else "It does not fit")
        expect(verdict).to_contain_text(shown(found.answer.taken))
        expect(verdict).to_contain_text(shown(found.room))
        for table, place in (("#calc-device", "device"), ("#calc-host", "host")):
            rows = [component for component in found.answer.components if component.place == place]
            expect(page.locator(f"{table} tbody tr")).to_have_count(len(rows) + 1)
            for row in rows:
                shown_row = page.locator(f"{table} tbody tr").filter(has_text=row.what)
                expect(shown_row.filter(has_text=shown(row.bytes))).to_have_count(1)
            expect(page.locator(f"{table} tbody tr").last).to_contain_text(shown(found.answer.total(place)))
        expect(page.locator("#calc-step")).to_contain_text(shown(found.network["bytes_each_way"]))
    command = page.locator("#calc-command code").inner_text()
    flags = "--gpu t4 --precision pure16 --8bit --checkpointing --offload --micro-batch 8"
    assert command.split() == f"tt calc gpt2-large {flags}".split()
    expect(page.locator("#calc-others strong")).to_have_count(4)
    page.get_by_label("Model").select_option("emoji: this run")  # which has fewer choices
    expect(page.get_by_label("Optimizer", exact=True)).to_be_hidden()
    page.get_by_label("Model").focus()
    page.keyboard.press("ArrowDown")  # by keyboard alone, and the focus stays
    expect(page.locator("#calc-command code")).to_contain_text("tt calc bert-base --gpu t4")
    expect(page.get_by_label("Model")).to_be_focused()
    assert violations(page, axe, "#memory") == []
    assert complaints(page) == []


def test_an_export_works_under_any_path(context: BrowserContext, tmp_path: Path) -> None:
    write_history(tmp_path / "run", steps=40)
    reader = HistoryReader(database_url(tmp_path / "run"))
    answers = Answers(reader, RUN, "emoji", tables=TABLES)
    export(answers, tmp_path / "run" / "pictures", tmp_path / "www" / "some" / "where")
    reader.close()
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "www"))) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        page = context.new_page()
        failed: list[str] = []
        page.on("console", lambda message: failed.append(message.text) if message.type == "error" else None)
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/some/where/")
        expect(page.locator("#f-step")).to_have_text("40")
        expect(page.locator("#readout")).to_contain_text("Step 40")
        expect(page.locator("#foot-state")).to_contain_text("A copy of")
        expect(page.locator("#notice")).to_be_hidden()
        expect(page.locator("#pictures figcaption")).to_have_text(["red apple"])
        choose(page.get_by_label("Since the start"))
        expect(page.locator("#leaders .who").first).to_have_text("<b>ada</b>")
        with page.expect_request(re.compile(r"api/history-0\.json$")):
            page.get_by_role("button", name="Zoom in").click()
        page.get_by_label("Model").select_option("BERT base")
        expect(page.locator("#calc-command code")).to_have_text("tt calc bert-base --gpu 8GB")
        server.shutdown()
    assert failed == []
    assert not [path for path in asked if not path.startswith("/some/where/")]
    assert not [path for path in asked if "events" in path or "?" in path]
