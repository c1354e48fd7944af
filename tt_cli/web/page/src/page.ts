// The page of a run: asks for what the run is and has done, then follows what is new.

import { ask, isStatic } from "./answers";
import { Calculator } from "./calculator";
import { byId, make, plain, tell } from "./dom";
import { Hero } from "./hero";
import { addCopy, showCheckpoints, showFigures, showRounds, showRun } from "./join";
import { Leaderboard } from "./leaderboard";
import { Live, type Link } from "./live";
import { Plots } from "./plots";
import { Samples } from "./samples";
import { Swarm } from "./swarm";
import * as words from "./words";

const SELDOM_MS = 60_000; // how often the leaderboard, checkpoints and the like are asked for again
const OLD_SECONDS = 90; // a snapshot of this age: the web page is served, but nobody looks at the swarm any more

document.body.append(make("p", { class: "sr", role: "status", id: "said" }));
for (const box of document.querySelectorAll(".command")) addCopy(box);

const hero = new Hero();
const swarm = new Swarm();
const leaders = new Leaderboard();
const samples = new Samples();
const calculator = new Calculator();
const plots = new Plots((history) => hero.recorded(history));
let seenAt = 0; // Unix seconds of the newest snapshot, by this machine's clock
let paused = ""; // the organiser's reason

const live = new Live({
  snapshot(now) {
    seenAt = Date.now() / 1000 - now.age_s;
    if (isStatic()) seenAt = now.time;
    paused = now.paused ?? "";
    hero.snapshot(now);
    swarm.snapshot(now);
  },
  step: (step) => plots.add(step),
  state: (link, silent) => notice(link, silent),
  back: () => {
    void everything();
  },
});

function notice(link: Link, silent: number): void {
  const age = seenAt ? Date.now() / 1000 - seenAt : silent;
  const gone = seenAt
    ? `The run’s server was last seen ${words.ago(Math.max(silent, 2))}. Trying again; the figures below are from then.`
    : "The run’s server does not answer. Trying again.";
  const stale = `No news from the swarm since ${words.duration(age)}: the auxiliary peer that watches it is away, or nobody trains.`;
  const wrong = link === "gone" ? gone : link === "file" || age < OLD_SECONDS || !seenAt ? "" : stale;
  const text = wrong || (paused && `The organiser paused the run: ${plain(paused, 500)}`);
  // Said aloud when it comes and goes, not with every second.
  const box = byId("notice");
  if (text && !box.hidden) box.setAttribute("aria-live", "off");
  else box.removeAttribute("aria-live");
  tell(box, text);
  box.style.position = wrong ? "" : "static"; // the organiser's words may be long
  box.hidden = text === "";
  document.documentElement.dataset.link = text ? "gone" : link; // nothing moves
  tell(
    byId("foot-state"),
    {
      starting: "",
      live: "Live.",
      asking: "Asked every few seconds.",
      gone: "Not connected.",
      file: seenAt ? `A copy of ${words.date(seenAt)}.` : "A copy.",
    }[link],
  );
}

async function seldom(): Promise<void> {
  const checkpoints = ask("checkpoints").then((answer) => {
    showCheckpoints(answer);
    samples.take(answer);
  });
  const figures = ask("figures").then((answer) => {
    showFigures(answer);
    const computers = Number(answer.devices[0]?.value);
    tell(byId("ever"), computers ? `So far ${words.plural(computers, "computer")} took part.` : "");
  });
  const rounds = ask("rounds").then(showRounds);
  await Promise.allSettled([leaders.load(), checkpoints, figures, rounds, calculator.load()]);
}

let complete = false; // what is asked for once is there: a server that was just started, or asked by many, may be late

async function everything(): Promise<void> {
  const [run, curves] = await Promise.allSettled([
    ask("run").then((run) => {
      showRun(run);
      hero.run(run);
      swarm.figures = run.described !== undefined;
    }),
    plots.load(),
    seldom(),
  ]);
  complete = run.status === "fulfilled" && curves.status === "fulfilled";
}

// The switch: as the system has it, light, dark.
const THEMES = ["automatic", "light", "dark"];
const themeButton = byId("theme");
const theme = (): string => document.documentElement.dataset.theme ?? "automatic";
themeButton.hidden = false;
tell(byId("theme-name"), theme());
themeButton.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]!;
  if (next === "automatic") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("tt-theme", next);
  } catch {
    /* storage is off: for this visit alone */
  }
  tell(byId("theme-name"), next);
  document.dispatchEvent(new Event("tt-theme"));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  document.dispatchEvent(new Event("tt-theme")),
);

// The section that is read is marked in the navigation.
const links = new Map(
  [...document.querySelectorAll<HTMLAnchorElement>("nav a")].map((link) => [link.hash.slice(1), link]),
);
const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const link = links.get(entry.target.id);
      if (!link) continue;
      if (entry.isIntersecting) {
        link.setAttribute("aria-current", "true");
        const list = link.closest("ul")!;
        list.scrollTo({ left: link.offsetLeft - list.clientWidth / 2 + link.offsetWidth / 2 });
      } else link.removeAttribute("aria-current");
    }
  },
  { rootMargin: "-30% 0px -69% 0px" },
);
for (const section of document.querySelectorAll("main > section")) watcher.observe(section);

live.start();
void everything();
setInterval(() => {
  if (!document.hidden && !isStatic()) void (complete ? seldom() : everything());
}, SELDOM_MS);
