// Who gave most: of the last day, or ever.

import { ask, type Leader } from "./answers";
import { byId, fillTable, make, named, tell } from "./dom";
import * as words from "./words";

const FIRST = 15;

export class Leaderboard {
  private window: "day" | "ever" = "day";
  private rows: Leader[] = [];
  private all = false;

  constructor() {
    for (const choice of document.querySelectorAll<HTMLInputElement>('input[name="window"]')) {
      choice.addEventListener("change", () => {
        this.window = choice.value as "day" | "ever";
        void this.load();
      });
    }
    byId("leaders-more").addEventListener("click", () => {
      this.all = !this.all;
      this.show();
    });
  }

  async load(): Promise<void> {
    const wanted = this.window;
    const answer = await ask("leaderboard", { window: wanted }, wanted === "day" ? "day" : "");
    if (wanted !== this.window) return; // another window was chosen meanwhile
    this.rows = answer.rows;
    this.show();
  }

  private show(): void {
    const { rows } = this;
    const most = rows[0]?.samples || 1;
    const now = Date.now() / 1000;
    const table = byId<HTMLTableElement>("leaders");
    table.hidden = rows.length === 0;
    tell(
      byId("leaders-empty"),
      this.window === "day" ? "Nobody in the last 24 hours." : "Nobody yet: be the first.",
    );
    byId("leaders-empty").hidden = rows.length > 0;
    const bar = (row: Leader): Node => {
      const filled = make("span", { class: "bar-of" });
      filled.style.width = `${Math.max(1, (100 * row.samples) / most)}%`;
      return make(
        "span",
        { class: "given" },
        make("span", { class: "bar-in-cell", "aria-hidden": "true" }, filled),
        words.short(row.samples),
      );
    };
    fillTable<Leader>(
      table,
      "Leaderboard",
      [
        { head: "Rank", number: true, cell: (_, index) => String(index + 1) },
        { head: "Who", cell: (row) => named(row.user) },
        { head: "Samples", cell: bar },
        { head: "Share", number: true, cell: (row) => words.percent(row.share) },
        { head: "Computed for", number: true, cell: (row) => words.duration(row.seconds) },
        { head: "Computers", number: true, cell: (row) => words.count(row.peers) },
        { head: "Last seen", cell: (row) => words.ago(Math.max(0, now - row.last_seen)) },
      ],
      this.all ? rows : rows.slice(0, FIRST),
    );
    const more = byId("leaders-more");
    more.hidden = rows.length <= FIRST;
    tell(more, this.all ? "Show the first alone" : `Show all ${words.count(rows.length)}`);
  }
}
