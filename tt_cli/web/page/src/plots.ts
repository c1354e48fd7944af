// The loss, and who trained when: two plots over the same steps or the same time. They hold as many points as the
// width can show; a closer look asks the server for those in between.

import uPlot from "uplot";
import { ask, isStatic, type Activity, type History, type Step } from "./answers";
import { byId, tell } from "./dom";
import { decades, nearest, smoothed, type Values } from "./curves";
import * as words from "./words";

type Range = [number, number];

const APPENDED = 400; // steps that came live; after so many the whole is asked for anew, thinned
const BLOCKS = 3; // files of an exported page that are read for a closer look
const WAIT_MS = 120; // a zoom may go on; after so long it is asked what lies there
const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";

const ink = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Plots {
  private whole: History | null = null;
  private shown: History | null = null;
  private activity: Activity | null = null;
  private across: "step" | "time" = "step";
  private log = false;
  private smoothing = 35;
  private range: Range | null = null;
  private plots: uPlot[] = [];
  private appended = 0;
  private early: Step[] | null = null; // steps told while the whole was being asked for
  private asked = 0;
  private timer = 0;
  private pointed: number | null = null;
  private keyed = false; // the cursor is being moved by a key, which knows its step exactly
  private readonly box = byId("charts");

  constructor(private readonly recorded: (history: History) => void) {
    for (const choice of document.querySelectorAll<HTMLInputElement>('input[name="across"]')) {
      choice.addEventListener("change", () => this.turn(choice.value as "step" | "time"));
    }
    byId("log").addEventListener("change", (event) => {
      this.log = (event.target as HTMLInputElement).checked;
      this.build();
    });
    byId("smooth").addEventListener("input", (event) => {
      this.smoothing = Number((event.target as HTMLInputElement).value);
      this.fill();
    });
    for (const button of document.querySelectorAll<HTMLElement>("[data-zoom]")) {
      button.addEventListener("click", () => this.move(button.dataset.zoom!));
    }
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("blur", () => this.point(null));
    new ResizeObserver(() => this.resize()).observe(this.box);
    document.addEventListener("tt-theme", () => this.build());
  }

  /** Everything anew: at the start, and when the server was away. */
  async load(): Promise<void> {
    const points = Math.max(400, Math.min(4000, 2 * this.box.clientWidth));
    const early: Step[] = (this.early = []);
    let history: History, activity: Activity | null;
    try {
      [history, activity] = await Promise.all([
        ask<History>("history", { points }),
        ask<Activity>("activity", { points }).catch(() => null),
      ]);
    } finally {
      if (this.early === early) this.early = null;
    }
    this.whole = history;
    this.activity = activity;
    this.appended = 0;
    if (this.range === null) this.shown = history;
    else this.look();
    this.recorded(history);
    if (this.plots.length) this.fill();
    else this.build();
    for (const step of early) this.add(step);
  }

  add(step: Step): void {
    const { whole } = this;
    this.early?.push(step);
    if (!whole || step.step <= whole.last_step || !Number.isFinite(step.loss)) return;
    for (const key of ["step", "time", "loss", "peers", "samples_per_second"] as const)
      (whole[key] as Values).push(step[key]);
    whole.last_step = step.step;
    whole.total += 1;
    this.recorded(whole);
    if (++this.appended > APPENDED) {
      void this.load();
      return;
    }
    if (this.plots.length) this.fill();
    else this.build();
  }

  private x(history: History): number[] {
    return this.across === "step" ? history.step : history.time;
  }

  private turn(across: "step" | "time"): void {
    const from = this.whole;
    const steps = from && this.range ? this.stepsOf(this.range) : null;
    this.across = across;
    if (from && steps)
      this.range = [this.x(from)[nearest(from.step, steps[0])]!, this.x(from)[nearest(from.step, steps[1])]!];
    this.build();
  }

  private stepsOf(range: Range): Range {
    if (this.across === "step" || !this.whole) return [Math.floor(range[0]), Math.ceil(range[1])];
    const { time, step } = this.whole;
    return [
      step[Math.max(0, nearest(time, range[0]) - 1)]!,
      step[Math.min(step.length - 1, nearest(time, range[1]) + 1)]!,
    ];
  }

  /** Show what lies between two places; null for the whole run. */
  private zoom(range: Range | null): void {
    this.range = range;
    byId<HTMLButtonElement>("zoom-reset").disabled = range === null;
    if (range === null) {
      this.shown = this.whole;
      this.fill();
    }
    this.scale();
    clearTimeout(this.timer);
    if (range !== null) this.timer = window.setTimeout(() => this.look(), WAIT_MS);
  }

  private look(): void {
    if (!this.range || !this.whole) return;
    const [first, last] = this.stepsOf(this.range);
    const ticket = ++this.asked;
    const points = Math.min(4000, 2 * this.box.clientWidth);
    const closer = isStatic()
      ? this.blocks(first, last)
      : ask<History>("history", { points, first: Math.max(0, first), last: Math.max(0, last) });
    closer
      .then((history) => {
        if (ticket !== this.asked || !this.range || history.step.length < 2) return;
        this.shown = history;
        this.fill();
      })
      .catch(() => undefined); // what is shown is thinner, not wrong
  }

  /** The same from the files of an exported page, where the range lies within a few of them. */
  private async blocks(first: number, last: number): Promise<History> {
    const { block = 0, last_step } = this.whole!;
    const from = Math.floor(Math.max(0, first) / block),
      to = Math.floor(Math.min(last_step, last) / block);
    if (!block || to - from >= BLOCKS) throw new Error("no closer look at so many steps");
    const parts = await Promise.all(
      Array.from({ length: to - from + 1 }, (_, index) => ask<History>("history", {}, String(from + index))),
    );
    const joined = parts[0]!;
    for (const part of parts.slice(1)) {
      for (const key of ["step", "time", "loss", "peers", "samples_per_second"] as const)
        (joined[key] as Values).push(...part[key]);
    }
    return joined;
  }

  private full(): Range | null {
    const x = this.whole ? this.x(this.whole) : [];
    return x.length ? [x[0]!, Math.max(x[x.length - 1]!, x[0]! + 1)] : null;
  }

  private move(how: string): void {
    const full = this.full();
    if (!full) return;
    if (how === "reset") {
      this.zoom(null);
      return;
    }
    const [from, to] = this.range ?? full;
    const middle = (from + to) / 2,
      half = (to - from) / 2;
    const least = this.across === "step" ? 2 : 10;
    let next: Range =
      how === "in"
        ? [middle - half / 2, middle + half / 2]
        : how === "out"
          ? [middle - half * 2, middle + half * 2]
          : how === "earlier"
            ? [from - half / 2, to - half / 2]
            : [from + half / 2, to + half / 2];
    if (next[1] - next[0] < 2 * least) return;
    const width = next[1] - next[0];
    if (next[0] < full[0]) next = [full[0], full[0] + width];
    if (next[1] > full[1]) next = [Math.max(full[0], full[1] - width), full[1]];
    this.zoom(next[0] <= full[0] && next[1] >= full[1] ? null : next);
  }

  private key(event: KeyboardEvent): void {
    if (event.target !== this.box || event.ctrlKey || event.metaKey || event.altKey || !this.shown) return;
    const named: Record<string, string> = { "+": "in", "=": "in", "-": "out", "0": "reset", Escape: "reset" };
    const by: Record<string, number> = {
      ArrowLeft: -1,
      ArrowRight: 1,
      PageUp: -20,
      PageDown: 20,
      Home: -Infinity,
      End: Infinity,
    };
    if (named[event.key]) this.move(named[event.key]!);
    else if (by[event.key] !== undefined) {
      const x = this.x(this.shown);
      const [from, to] = this.range ?? [-Infinity, Infinity];
      const first = Math.max(
        0,
        x.findIndex((value) => value >= from),
      );
      const beyond = x.findIndex((value) => value > to);
      const last = beyond < 0 ? x.length - 1 : Math.max(first, beyond - 1);
      const at = Math.min(
        last,
        Math.max(first, (this.pointed ?? last + (by[event.key]! < 0 ? 1 : 0)) + by[event.key]!),
      );
      this.point(at);
      const value = x[at];
      this.keyed = true;
      if (value !== undefined) this.plots[0]?.setCursor({ left: this.plots[0].valToPos(value, "x"), top: 20 });
      this.keyed = false;
      tell(byId("readout-said"), byId("readout").textContent ?? "");
    } else return;
    event.preventDefault();
  }

  private point(index: number | null): void {
    this.pointed = index;
    const from = index === null ? this.whole : this.shown;
    const at = index ?? (from ? from.step.length - 1 : -1);
    const step = from?.step[at];
    if (!from || step === undefined) {
      tell(byId("readout"), "No step is recorded yet.");
      return;
    }
    const peers = from.peers[at] ?? null;
    tell(
      byId("readout"),
      `Step ${words.count(step)} · ${words.when(from.time[at]!)} · loss ${words.loss(from.loss[at])} · ${peers === null ? "–" : words.plural(peers, "computer")} · ${words.speed(from.samples_per_second[at])} samples/s`,
    );
  }

  private build(): void {
    for (const plot of this.plots) plot.destroy();
    this.plots = [];
    const some = (this.whole?.step.length ?? 0) > 0;
    byId("chart-tools").hidden = byId("charts-hint").hidden = this.box.hidden = !some;
    if (!some || this.box.clientWidth === 0) {
      this.point(null);
      return;
    }
    this.plots = [this.lossPlot(), this.activePlot()];
    this.fill();
  }

  private options(height: number, series: uPlot.Series[], axes: uPlot.Axis[], scales: uPlot.Scales): uPlot.Options {
    return {
      width: this.box.clientWidth,
      height,
      legend: { show: false },
      series,
      scales: { x: { time: this.across === "time" }, ...scales },
      padding: [8, axes.length > 1 ? 0 : side(), 0, 0], // both plots end at one place
      axes: [{ ...axis(), values: (plot, at) => at.map((value) => this.mark(plot, value)), space: 90 }, ...axes],
      cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "tt" }, points: { size: 7 } },
      hooks: {
        setSelect: [
          (plot) => {
            const { left, width } = plot.select;
            if (width < 6) return;
            const range: Range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
            plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            this.zoom(range);
          },
        ],
        setCursor: [
          (plot) => {
            const left = plot.cursor.left ?? -1;
            if (this.keyed || (document.activeElement === this.box && left < 0)) return;
            this.point(left < 0 || !this.shown ? null : nearest(this.x(this.shown), plot.posToVal(left, "x")));
          },
        ],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => this.zoom(null))],
      },
    };
  }

  private mark(plot: uPlot, value: number): string {
    if (this.across === "step")
      return Math.abs(value) >= 1_000_000 ? words.short(value) : Number.isInteger(value) ? words.count(value) : "";
    const span = (plot.scales.x!.max ?? 0) - (plot.scales.x!.min ?? 0);
    const form: Intl.DateTimeFormatOptions =
      span > 3 * 86400 ? { day: "numeric", month: "short" } : { hour: "2-digit", minute: "2-digit" };
    return new Date(value * 1000).toLocaleString("en-GB", form);
  }

  private lossPlot(): uPlot {
    const logged: uPlot.Axis = {
      splits: (_plot, _axis, low, high) => decades(low, high),
      filter: (_plot, splits) => splits,
    };
    const scale: uPlot.Scale = this.log
      ? { distr: 3, range: (_plot, low, high) => [(low || 0.1) * 0.98, (high || 1) * 1.02] }
      : {
          range: (_plot, low, high) => {
            const room = Math.max((high - low) * 0.06, 1e-3);
            return [Math.max(0, low - room), high + room];
          },
        };
    const series: uPlot.Series[] = [
      {},
      { stroke: () => ink("--hot-faint"), width: 1, points: { show: false } },
      { stroke: () => ink("--hot"), width: 2.2 },
    ];
    const axes = [
      {
        ...axis(),
        size: side(),
        scale: "y",
        values: (_: uPlot, at: number[]) => at.map((value) => String(Number(value.toPrecision(4)))),
        ...(this.log ? logged : {}),
      },
    ];
    return new uPlot(this.options(this.tall(), series, axes, { y: scale }), [[], [], []], byId("plot-loss"));
  }

  private activePlot(): uPlot {
    const zero: uPlot.Scale = { range: (_plot, _low, high) => [0, Math.max(1, high * 1.1)] };
    const lower: uPlot.Scale = { range: (_plot, _low, high) => [0, Math.max(1, high * 2)] }; // they rise and fall as one
    const series: uPlot.Series[] = [
      {},
      {
        stroke: () => ink("--cool"),
        width: 1.8,
        fill: () => ink("--cool-wash"),
        paths: uPlot.paths.stepped!({ align: 1 }),
        points: { show: false },
      },
      { stroke: () => ink("--muted"), width: 1.2, scale: "speed", points: { show: false } },
    ];
    const axes: uPlot.Axis[] = [
      {
        ...axis(),
        size: side(),
        values: (_plot, at) => at.map((value) => (Number.isInteger(value) ? words.count(value) : "")),
      },
      {
        ...axis(),
        size: side(),
        scale: "speed",
        side: 1,
        grid: { show: false },
        values: (_plot, at) => at.map((value) => (value >= 10_000 ? words.short(value) : String(value))),
      },
    ];
    return new uPlot(this.options(190, series, axes, { y: zero, speed: lower }), [[], [], []], byId("plot-active"));
  }

  private tall(): number {
    return innerWidth < 600 ? 240 : 340;
  }

  private fill(): void {
    const [lossPlot, activePlot] = this.plots;
    const history = this.shown ?? this.whole;
    if (!lossPlot || !activePlot || !history) return;
    const x = this.x(history);
    const losses = this.log ? history.loss.map((value) => (value && value > 0 ? value : null)) : history.loss;
    const smooth = smoothed(losses, Math.round((losses.length * this.smoothing * this.smoothing) / 150_000));
    lossPlot.setData([x, losses, smooth] as uPlot.AlignedData, false);
    const sampled = this.across === "time" && (this.activity?.time.length ?? 0) > 1 ? this.activity : null;
    activePlot.setData(
      sampled
        ? [sampled.time, sampled.trainers, sampled.samples_per_second]
        : [x, history.peers, history.samples_per_second],
      false,
    );
    this.scale();
    this.point(this.pointed !== null && this.pointed < x.length ? this.pointed : null);
  }

  private scale(): void {
    const range = this.range ?? this.full();
    if (range) for (const plot of this.plots) plot.setScale("x", { min: range[0], max: range[1] });
  }

  private resize(): void {
    if (!this.plots.length) {
      if (this.whole) this.build();
      return;
    }
    const width = this.box.clientWidth;
    if (width && width !== this.plots[0]!.width) {
      this.plots[0]!.setSize({ width, height: this.tall() });
      this.plots[1]!.setSize({ width, height: 190 });
    }
  }
}

const side = (): number => (innerWidth < 600 ? 40 : 52);

function axis(): uPlot.Axis {
  return {
    stroke: () => ink("--muted"),
    font: FONT,
    gap: 6,
    ticks: { show: false },
    grid: { stroke: () => ink("--line"), width: 1 },
    border: { show: false },
  };
}
