// The run at a glance: five figures, and the whole run as a ruler whose marks are as high as the loss was there.

import type { History, Run, Snapshot } from "./answers";
import { byId, tell } from "./dom";
import * as words from "./words";

const GAP = 6; // from one mark of the ruler to the next, in pixels
const HEIGHT = 72;

export class Hero {
  private total = 0;
  private epoch = 0;
  private history: History | null = null;

  constructor() {
    new ResizeObserver(() => this.rule()).observe(byId("ruler"));
  }

  run(run: Run): void {
    this.total = run.total_steps;
    for (const element of document.querySelectorAll('[data-run="name"]')) tell(element, run.name);
    tell(document.querySelector('[data-run="title"]')!, run.title);
    document.title = `${run.title} · tt`;
    this.rule();
  }

  snapshot(now: Snapshot): void {
    this.total = now.total_steps;
    this.epoch = now.epoch;
    const left = Math.max(0, now.total_steps - now.epoch);
    const { eta_s: next, samples_per_second: speed } = now;
    const seconds = next === null || !speed ? null : next + ((left - 1) * now.target_batch_size) / speed;
    tell(byId("f-step"), words.count(now.epoch));
    const inner = now.inner_steps == null ? "" : ` · ${words.innerSteps(now.inner_steps, now.inner_steps_due)}`;
    tell(byId("f-step-of"), `of ${words.count(now.total_steps)}${inner}`);
    tell(byId("f-loss"), words.loss(now.loss));
    tell(byId("f-trainers"), words.count(now.trainers));
    tell(byId("f-trainers-of"), now.trainers === 1 ? "computer" : "computers");
    tell(byId("f-speed"), words.speed(speed));
    tell(byId("f-eta"), left === 0 ? "done" : words.duration(seconds));
    tell(
      byId("f-eta-of"),
      left === 0
        ? "all steps made"
        : next === null
          ? now.paused
            ? "paused"
            : "nobody computes"
          : `next step in ${words.duration(next)}`,
    );
    this.rule();
  }

  recorded(history: History): void {
    this.history = history;
    this.rule();
  }

  private rule(): void {
    const box = byId("ruler");
    const width = box.clientWidth;
    if (!width) return;
    const done = this.total ? Math.min(1, this.epoch / this.total) : 0;
    const percent = (100 * done).toFixed(done > 0 && done < 0.1 ? 1 : 0);
    box.setAttribute("aria-valuenow", percent);
    box.setAttribute("aria-valuetext", `step ${words.count(this.epoch)} of ${words.count(this.total)}`);
    if (this.total) {
      tell(byId("ruler-done"), `${percent} % of the way`);
      tell(byId("ruler-left"), done < 1 ? `${words.plural(this.total - this.epoch, "step")} to go` : "all steps made");
    }
    const marks = Math.floor(width / GAP);
    const heights = this.heights(marks);
    const now = this.epoch ? Math.min(marks - 1, Math.floor(done * marks)) : -1;
    const path = { done: "", now: "", next: "" };
    for (let mark = 0; mark < marks; mark++) {
      const height = mark <= now ? (heights[mark] ?? 0.12) : 0;
      const line = `M${mark * GAP + GAP / 2} ${HEIGHT - 2}v${(-4 - height * (HEIGHT - 10)).toFixed(1)}`;
      path[mark < now ? "done" : mark === now ? "now" : "next"] +=
        mark > now ? `M${mark * GAP + GAP / 2} ${HEIGHT - 2}v-3` : line;
    }
    const svg = box.querySelector("svg")!;
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    for (const [name, d] of Object.entries(path)) svg.querySelector(`.${name}`)!.setAttribute("d", d);
  }

  /** From 0 to 1 for each mark: the loss between the lowest and the highest of the run, on a log scale. */
  private heights(marks: number): number[] {
    const sums = new Array<number>(marks).fill(0),
      counts = new Array<number>(marks).fill(0);
    const { step = [], loss = [] } = this.history ?? {};
    step.forEach((at, index) => {
      const value = loss[index];
      if (!value || value <= 0 || !this.total) return;
      const mark = Math.min(marks - 1, Math.floor((at / this.total) * marks));
      sums[mark]! += Math.log(value);
      counts[mark]! += 1;
    });
    const known = sums.map((sum, mark) => (counts[mark] ? sum / counts[mark]! : undefined));
    const values = known.filter((value): value is number => value !== undefined);
    const lowest = Math.min(...values),
      highest = Math.max(...values);
    let last = highest;
    return known.map((value) => {
      last = value ?? last;
      return highest > lowest ? 0.06 + (0.94 * (last - lowest)) / (highest - lowest) : 0.5;
    });
  }
}
