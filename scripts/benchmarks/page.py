"""What the run's web page costs a visitor: 100,000 recorded steps, the real server process, headless Chromium.

first_paint_s: from the request to the first contentful paint, of a browser that has nothing cached; whole_s: until both
plots are drawn. interaction_ms: from a click or key to the next painted frame, the slowest of several (the median of
each one's repeats); interaction_cpu_ms: the main thread's own time for it, which other programs do not lengthen.
page_kb: what one visit transfers, pictures left out; built_kb: the page's files, not compressed.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import statistics
import tempfile
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from playwright.sync_api import Browser, Page, Response, sync_playwright
from sqlalchemy import create_engine, insert

from scripts.benchmarks.web import snapshot
from tt_cli.auxiliary.parts import WEB_PAGE
from tt_cli.auxiliary.web_process import WebOptions
from tt_cli.history.schema import activity, hours, peers, steps
from tt_cli.history.writer import HistoryWriter, database_url
from tt_cli.run import folders, load_run
from tt_cli.supervisor.events import Event, Log
from tt_cli.web.index_html import STATIC

RUN = load_run("emoji")
CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
STEP_SECONDS = 20.0
TRAINERS = 60
QUICK = "10,000 steps, two visits"

# Runs in the page: does one thing, waits for the frame that shows it, and returns the milliseconds until then.
TIMED = """
([selector, how]) => new Promise((done) => {
  const element = document.querySelector(selector), began = performance.now();
  if (how === "input") {
    element.value = String(20 + Math.floor(Math.random() * 60));
    element.dispatchEvent(new Event("input", { bubbles: true }));
  } else if (how.startsWith("key ")) {
    element.focus({ preventScroll: true });
    element.dispatchEvent(new KeyboardEvent("keydown", { key: how.slice(4), bubbles: true }));
  } else element.click();
  requestAnimationFrame(() => {
    const painted = new MessageChannel();
    painted.port1.onmessage = () => done(performance.now() - began);
    painted.port2.postMessage(0);
  });
})
"""
INTERACTIONS = {
    "zoom in": ('[data-zoom="in"]', "click"),
    "zoom out": ('[data-zoom="out"]', "click"),
    "log scale": ("#log", "click"),
    "smoothing": ("#smooth", "input"),
    "time": ('input[name="across"][value="time"]', "click"),
    "steps": ('input[name="across"][value="step"]', "click"),
    "along the steps": ("#charts", "key ArrowLeft"),
    "leaderboard": ('input[name="window"][value="ever"]', "click"),
    "swarm as table": ('input[name="swarm-as"][value="table"]', "click"),
    "swarm as map": ('input[name="swarm-as"][value="map"]', "click"),
    "colours": ("#theme", "click"),
}


def fill(folder: Path, count: int) -> None:
    """A history of `count` steps, a sample of the activity every 30 s, and a snapshot of 60 trainers."""
    chance = random.Random(0)
    store = HistoryWriter(database_url(folder), RUN.identity)
    now = time.time()
    began = now - count * STEP_SECONDS

    def trainers(at: float) -> int:
        return round(40 + 20 * math.sin(30 * at))

    made = [
        {"undone": 0, "step": step, "era": 0, "time": began + step * STEP_SECONDS, "samples": 512}
        | {"loss": 4 + 3 * math.exp(-9 * step / count) + chance.gauss(0, 0.05), "trainers": trainers(step / count)}
        | {"samples_per_second": 13.0 * trainers(step / count) + chance.gauss(0, 9)}
        for step in range(1, count + 1)
    ]
    given = [
        {"peer_id": f"12D3KooW{number:038d}", "user": f"volunteer-{number}"}
        | {"samples": 100_000 // (number + 1), "seconds": 3600.0 * (number + 1)}
        for number in range(TRAINERS)
    ]
    one = {"role": "trainer", "device": "NVIDIA GeForce RTX 3060", "first_seen": began, "last_seen": now}
    seen = [{**one, "told": 0, "progressed": now, **row} for row in given]
    times = range(int(began), int(now), 30)
    sampled = [(at, trainers((at - began) / (now - began))) for at in times]
    active = [{"time": at, "trainers": many, "samples_per_second": 13.0 * many} for at, many in sampled]
    engine = create_engine(database_url(folder))
    with engine.begin() as connection:
        connection.execute(insert(steps), made)
        connection.execute(insert(peers), seen)
        connection.execute(insert(hours), [{"hour": int(now // 3600), **row} for row in given])
        connection.execute(insert(activity), active)
    engine.dispose()
    store.put("snapshot", snapshot(count, TRAINERS, now), now)
    store.close()


def visit(browser: Browser, url: str) -> tuple[Page, dict[str, float]]:
    """Open the page as somebody who was never there."""
    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
    answers: list[Response] = []
    page.on("response", lambda answer: answers.append(answer))  # noqa: PLW0108 - it marks the function it is given
    page.goto(url)
    page.wait_for_selector("#plot-active canvas", state="attached")
    page.wait_for_selector("#leaders td", state="attached")
    whole = page.evaluate("performance.now()") / 1000
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
    sizes = [
        answer.request.sizes()["responseBodySize"]
        for answer in answers
        if "/pictures/" not in answer.url and "/api/events" not in answer.url
    ]
    return page, {"first_paint_s": paint, "whole_s": whole, "page_kb": sum(sizes) / 1000}


def interactions(page: Page, repeats: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds to the next frame and of the main thread's CPU time, by what was done."""
    chromium = page.context.new_cdp_session(page)
    chromium.send("Performance.enable", {"timeDomain": "threadTicks"})

    def cpu() -> float:
        metrics = chromium.send("Performance.getMetrics")["metrics"]
        return 1000 * next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in INTERACTIONS}
    for _ in range(repeats):
        for name, how in INTERACTIONS.items():
            before = cpu()
            took = float(page.evaluate(TIMED, list(how)))
            found[name].append((took, cpu() - before))
            page.wait_for_timeout(200)  # what it asked of the server is drawn, and not timed with the next
    return {
        name: (statistics.median(t for t, _ in times), statistics.median(c for _, c in times))
        for name, times in found.items()
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Visits, then interactions on the last one's page."""
    count, visits = (10_000, 2) if args.quick else (100_000, 7)
    addresses: SimpleQueue[str] = SimpleQueue()

    def show(event: Event) -> None:
        if isinstance(event, Log):
            for address in re.findall(r"http://\S+", event.message):
                addresses.put(address)

    with tempfile.TemporaryDirectory(prefix="tt-bench-page-") as home:
        os.environ["TT_HOME"] = home
        fill(folders.run_folder(RUN), count)
        options = WebOptions(RUN.to_toml(), "emoji", "127.0.0.1", 0)
        with WEB_PAGE.watched(vars(options), Path(home) / "web.log", show), sync_playwright() as playwright:
            url = addresses.get(timeout=60)
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            visit(browser, url)  # the server reads the history, the browser its own files
            seen = []
            for _ in range(visits):
                page, times = visit(browser, url)
                seen.append(times)
                if len(seen) < visits:
                    page.context.close()
            slow = interactions(page, 3 if args.quick else 9)
            browser.close()
    figures: dict[str, Any] = {key: round(statistics.median(times[key] for times in seen), 3) for key in seen[0]}
    figures["first_paint_max_s"] = round(max(times["first_paint_s"] for times in seen), 3)
    figures["interaction_ms"] = round(max(wall for wall, _ in slow.values()), 1)
    figures["interaction_cpu_ms"] = round(max(own for _, own in slow.values()), 1)
    figures["built_kb"] = sum(file.stat().st_size for file in STATIC.iterdir()) / 1000
    return {"steps": count, **figures, "interactions_ms": {key: round(wall, 1) for key, (wall, _) in slow.items()}}
