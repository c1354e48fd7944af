// The loss, and who trained when: two plots over the same steps or the same time. They hold as many points as the
// width can show; a closer look asks the server for those in between.

import uPlot from "uplot";
import { ask, COLUMNS, isStatic, type Activity, type History, type Step } from "./answers";
import { axis, line, narrow } from "./chart";
import { between, decades, smoothed } from "./curves";
import { byId, tell } from "./dom";
import * as words from "./words";

type Range = [number, number];

const APPENDED = 400; // steps that came live; after so many the whole is asked for anew, thinned
const BLOCKS = 3; // files of an exported page that are read for a closer look
const WAIT_MS = 120; // a zoom may go on; after so long it is asked what lies there
const ACTIVE_HEIGHT = 190;
const MOVES: Record<string, Range> = { in: [0.25, -0.25], out: [-0.5, 0.5], earlier: [-0.25, -0.25], later: [0.25, 0.25] };
const ZOOM_KEYS: Record<string, string> = { "+": "in", "=": "in", "-": "out", "0": "reset", Escape: "reset" };
const STEP_KEYS: Record<string, number> = {
  ArrowLeft: -1,
  ArrowRight: 1,
  PageUp: -20,
  PageDown: 20,
  Home: -Infinity,
  End: Infinity,
};

const box = byId("charts");
const log = byId<HTMLInputElement>("log");
const smoothing = byId<HTMLInputElement>("smooth");
const time = document.querySelector<HTMLInputElement>('input[name="across"][value="time"]')!;

const lossHeight = (): number => (narrow() ? 240 : 340);
const mostPoints = (): number => Math.max(400, Math.min(4000, 2 * box.clientWidth));

export class Plots {
  private whole: History | null = null; // the run, thinned
  private shown: History | null = null; // the range
  private activity: Activity | null = null;
  private range: Range | null = null; // steps; null for the whole run
  private plots: [loss: uPlot, active: uPlot] | null = null;
  private appended = 0;
  private early: Step[] | null = null; // steps that came while the whole was being asked for
  private asked = 0;
  private timer = 0;
  private pointed: number | null = null; // index into what is shown

  constructor(private readonly recorded: (history: History) => void) {
    const tools = byId("chart-tools");
    tools.addEventListener("input", (event) => (event.target === smoothing ? this.fill() : this.build()));
    tools.addEventListener("click", (event) => {
      const button = (event.target as Element).closest<HTMLElement>("[data-zoom]");
      if (button) this.move(button.dataset.zoom!);
    });
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("blur", () => this.point(null));
    new ResizeObserver(() => this.resize()).observe(box);
    document.addEventListener("tt-theme", () => this.build());
  }

  /** Everything anew: at the start, and when the server was away. */
  async load(): Promise<void> {
    const points = mostPoints();
    const early: Step[] = (this.early = []);
    const answers = Promise.all([ask("history", { points }), ask("activity", { points }).catch(() => null)]);
    const [history, activity] = await answers.finally(() => {
      if (this.early === early) this.early = null;
    });
    this.whole = history;
    this.activity = activity;
    this.appended = 0;
    if (this.range === null || this.range[0] >= history.last_step) this.zoom(null);
    else this.look();
    this.changed(history);
    for (const step of early) this.add(step);
  }

  add(step: Step): void {
    const { whole } = this;
    this.early?.push(step);
    if (!whole || step.step <= whole.last_step || !Number.isFinite(step.loss)) return;
    for (const column of COLUMNS) whole[column].push(step[column]);
    whole.last_step = step.step;
    whole.total += 1;
    if (++this.appended > APPENDED) void this.load();
    this.changed(whole);
  }

  private changed(history: History): void {
    this.recorded(history);
    if (this.plots) this.fill();
    else this.build();
  }

  private full(): Range | null {
    const step = this.whole?.step ?? [];
    return step.length ? [step[0]!, Math.max(step.at(-1)!, step[0]! + 1)] : null;
  }

  /** Show the steps of a range; null for the whole run. */
  private zoom(range: Range | null): void {
    this.range = range;
    byId<HTMLButtonElement>("zoom-reset").disabled = range === null;
    clearTimeout(this.timer);
    if (range === null) {
      this.shown = this.whole;
      this.fill();
    } else {
      this.scale();
      this.timer = window.setTimeout(() => this.look(), WAIT_MS);
    }
  }

  private move(how: string): void {
    const full = this.full();
    if (!full) return;
    const [from, to] = this.range ?? full;
    const [left, right] = MOVES[how] ?? [-Infinity, Infinity];
    const size = Math.min(full[1] - full[0], (to - from) * (1 + right - left));
    if (size < 4 && how === "in") return;
    const first = Math.min(full[1] - size, Math.max(full[0], from + (to - from) * left));
    this.zoom(size < full[1] - full[0] ? [first, first + size] : null);
  }

  /** Ask for all steps of the range. */
  private look(): void {
    if (!this.range || !this.whole) return;
    const [first, last] = [Math.max(0, Math.floor(this.range[0])), Math.max(0, Math.ceil(this.range[1]))];
    const ticket = ++this.asked;
    const closer = isStatic() ? this.blocks(first, last) : ask("history", { points: mostPoints(), first, last });
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
    const from = Math.floor(first / block),
      to = Math.floor(Math.min(last_step, last) / block);
    if (!block || to - from >= BLOCKS) throw new Error("no closer look at so many steps");
    const numbers = Array.from({ length: to - from + 1 }, (_, index) => String(from + index));
    const parts = await Promise.all(numbers.map((number) => ask("history", {}, number)));
    return parts.reduce((joined, part) => {
      for (const column of COLUMNS) joined[column].push(...part[column]);
      return joined;
    });
  }

  private key(event: KeyboardEvent): void {
    const [zoom, by] = [ZOOM_KEYS[event.key], STEP_KEYS[event.key]];
    if (event.target !== box || event.ctrlKey || event.metaKey || event.altKey || !this.plots) return;
    if (zoom !== undefined) this.move(zoom);
    else if (by !== undefined) this.walk(by);
    else return;
    event.preventDefault();
  }

  /** Move the cursor by so many points of those that are seen. */
  private walk(by: number): void {
    const [plot] = this.plots!;
    const [first, last] = plot.series[0]!.idxs!;
    const at = Math.min(last, Math.max(first, (this.pointed ?? last + (by < 0 ? 1 : 0)) + by));
    plot.setCursor({ left: plot.valToPos(plot.data[0][at]!, "x"), top: 20 });
    tell(byId("readout-said"), byId("readout").textContent ?? "");
  }

  /** Say what was at this place of what is shown; null: what was last. */
  private point(index: number | null): void {
    this.pointed = index;
    const from = index === null ? this.whole : this.shown;
    const at = index ?? (from?.step.length ?? 0) - 1;
    if (!from || from.step[at] === undefined) {
      tell(byId("readout"), "No step is recorded yet.");
      return;
    }
    const [step, when, loss, peers, speed] = COLUMNS.map((column) => from[column][at]!) as [number, number, number, number, number];
    tell(
      byId("readout"),
      `Step ${words.count(step)} · ${words.when(when)} · loss ${words.loss(loss)} · ${words.plural(peers, "computer")} · ${words.speed(speed)} samples/s`,
    );
  }

  private build(): void {
    for (const plot of this.plots ?? []) plot.destroy();
    this.plots = null;
    const some = (this.whole?.step.length ?? 0) > 0;
    byId("chart-tools").hidden = byId("charts-hint").hidden = box.hidden = !some;
    if (some && box.clientWidth > 0) {
      this.plots = [this.lossPlot(), this.activePlot()];
      this.fill();
    } else this.point(null);
  }

  private plot(height: number, place: string, series: uPlot.Series[], axes: uPlot.Axis[], scales: uPlot.Scales): uPlot {
    const options: uPlot.Options = {
      width: box.clientWidth,
      height,
      legend: { show: false },
      series: [{}, ...series],
      scales: { x: { time: time.checked }, ...scales },
      padding: [8, axes.length > 1 ? 0 : (axes[0]!.size as number), 0, 0], // both plots end at one place
      axes: [axis(String, { size: 50, space: 90, values: marks }), ...axes],
      cursor: {
        drag: { x: true, y: false, setScale: false },
        sync: { key: "tt" },
        points: { size: 7 },
        bind: { dblclick: () => () => (this.zoom(null), null) },
      },
      hooks: { setSelect: [(plot) => this.select(plot)] },
    };
    return new uPlot(options, [[], ...series.map(() => [])], byId(place));
  }

  private lossPlot(): uPlot {
    const scale: uPlot.Scale = log.checked
      ? { distr: 3, range: (_plot, low, high) => [(low || 0.1) * 0.98, (high || 1) * 1.02] }
      : {
          range: (_plot, low, high) => {
            const room = Math.max((high - low) * 0.06, 1e-3);
            return [Math.max(0, low - room), high + room];
          },
        };
    const logged: uPlot.Axis = {
      splits: (_plot, _axis, low, high) => decades(low, high),
      filter: (_plot, splits) => splits,
    };
    const left = axis((value) => String(Number(value.toPrecision(4))), log.checked ? logged : {});
    const series = [line("--hot-faint", 1, { points: { show: false } }), line("--hot", 2.2)];
    const plot = this.plot(lossHeight(), "plot-loss", series, [left], { y: scale });
    plot.hooks.setCursor = [
      ({ cursor }) => {
        const away = (cursor.left ?? -1) < 0;
        if (away && document.activeElement === box) return; // the keys' place stays
        this.point(away || !this.shown ? null : (cursor.idx ?? null));
      },
    ];
    return plot;
  }

  private activePlot(): uPlot {
    const stepped = { paths: uPlot.paths.stepped!({ align: 1 }), points: { show: false } };
    const series = [
      line("--cool", 1.8, stepped, "--cool-wash"),
      line("--muted", 1.2, { scale: "speed", points: { show: false } }),
    ];
    const axes = [
      axis((value) => (Number.isInteger(value) ? words.count(value) : "")),
      axis((value) => (value >= 10_000 ? words.short(value) : String(value)), {
        scale: "speed",
        side: 1,
        grid: { show: false },
      }),
    ];
    // They rise and fall as one: so that they do not lie upon each other, the speed stays in the lower half.
    const upTo = (factor: number): uPlot.Scale => ({ range: (_plot, _low, high) => [0, Math.max(1, high * factor)] });
    return this.plot(ACTIVE_HEIGHT, "plot-active", series, axes, { y: upTo(1.1), speed: upTo(2) });
  }

  /** Zoom to what was dragged over. */
  private select(plot: uPlot): void {
    const { left, width } = plot.select;
    const { whole } = this;
    if (width < 6 || !whole) return;
    const [low, high] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.zoom(time.checked ? [between(whole.time, whole.step, low), between(whole.time, whole.step, high)] : [low, high]);
  }

  private fill(): void {
    const { plots, activity } = this;
    const history = this.shown ?? this.whole;
    if (!plots || !history) return;
    const x = time.checked ? history.time : history.step;
    const losses = log.checked ? history.loss.map((value) => (value > 0 ? value : null)) : history.loss;
    const smooth = smoothed(losses, Math.round((losses.length * Number(smoothing.value) ** 2) / 150_000));
    plots[0].setData([x, losses, smooth] as uPlot.AlignedData, false);
    plots[1].setData(
      time.checked && activity && activity.time.length > 1
        ? [activity.time, activity.trainers, activity.samples_per_second]
        : [x, history.peers, history.samples_per_second],
      false,
    );
    this.scale();
    this.point(this.pointed !== null && this.pointed < x.length ? this.pointed : null);
  }

  private scale(): void {
    const { whole } = this;
    const range = this.range ?? this.full();
    if (!range || !whole) return;
    const [min, max] = time.checked ? range.map((step) => between(whole.step, whole.time, step)) : range;
    for (const plot of this.plots ?? []) plot.setScale("x", { min: min!, max: Math.max(max!, min! + 1) });
  }

  private resize(): void {
    const width = box.clientWidth;
    if (!this.plots && this.whole) this.build();
    else if (this.plots && width && width !== this.plots[0].width) {
      this.plots[0].setSize({ width, height: lossHeight() });
      this.plots[1].setSize({ width, height: ACTIVE_HEIGHT });
    }
  }
}

/** Steps in whole numbers; times as days where the plot shows more than three, else as hours. */
function marks(plot: uPlot, splits: number[]): string[] {
  const { min = 0, max = 0 } = plot.scales.x!;
  const form: Intl.DateTimeFormatOptions =
    max! - min! > 3 * 86400 ? { day: "numeric", month: "short" } : { hour: "2-digit", minute: "2-digit" };
  return splits.map((value) => {
    if (time.checked) return new Date(value * 1000).toLocaleString("en-GB", form);
    return value >= 1_000_000 ? words.short(value) : Number.isInteger(value) ? words.count(value) : "";
  });
}
