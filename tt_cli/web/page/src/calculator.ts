// Does it fit? All answers for a model come as one table from `tt calc`'s own code; here they are chosen and added up.

import { ask, type NamedGpu, type Table } from "./answers";
import { byId, fillTable, make, plain, tell } from "./dom";
import { command } from "./join";
import * as words from "./words";

type Parts = [number, number][]; // a component's number and its bytes

const RUN = "run";
const PEERS = 16;
const LINE_MBIT = 100;
const USUAL_GPU = "8GB";
const MANY = "many"; // as many examples at a time as fit

export class Calculator {
  private table: Table | null = null;
  private wanted = RUN;
  private chosen: Record<string, number> = {}; // by the choice's name: kept from model to model
  private gpu = USUAL_GPU;
  private size = MANY;

  /** Asks for the model's table, where it is not there yet, and shows it; without one the section stays away. */
  async load(): Promise<void> {
    const { wanted } = this;
    if (this.table?.name === wanted) return;
    const table = await ask("calculator", { model: wanted }, wanted);
    if (wanted !== this.wanted) return; // another one was chosen meanwhile
    this.table = table;
    for (const id of ["memory", "memory-link"]) byId(id).hidden = false;
    this.offer(table);
    this.show(table);
  }

  /** The lists that are chosen from; one that has the focus stays. */
  private offer(table: Table): void {
    const gpus = table.gpus.map((gpu): [string, string] => [gpu.flag, gpu.title]);
    const sizes = table.micro_batches.map((size): [string, string] => [String(size), words.count(size)]);
    this.list("Model", "model", table.models.map(({ name, title }) => [name, plain(title)]), this.wanted, (name) => {
      this.wanted = name;
      this.load().catch(() => {
        tell(byId("calc-verdict"), "The table of this model did not come. Choose again.");
      });
    });
    this.list("Graphics card", "gpu", gpus, this.gpu, (flag) => (this.gpu = flag));
    for (const { name, title, options } of table.choices) {
      const offered = options.map((option, index): [string, string] => [String(index), option.words]);
      this.list(title, name, offered, String(this.chosen[name] ?? 0), (index) => (this.chosen[name] = Number(index)));
    }
    const many: [string, string] = [MANY, "as many as fit"];
    this.list("Examples at a time", "size", [many, ...sizes], this.size, (size) => (this.size = size));
    const shown = new Set(["model", "gpu", "size", ...table.choices.map(({ name }) => name)]);
    for (const box of byId("calc-asked").children) {
      (box as HTMLElement).hidden = !shown.has((box as HTMLElement).dataset.asks ?? "");
    }
  }

  private list(
    title: string,
    name: string,
    offered: [string, string][],
    value: string,
    take: (value: string) => void,
  ): void {
    const id = `calc-${name}`;
    let select = document.getElementById(id) as HTMLSelectElement | null;
    if (select === null) {
      select = make("select", { id });
      byId("calc-asked").append(make("p", { "data-asks": name }, make("label", { for: id }, title), select));
    }
    select.replaceChildren(...offered.map(([value, text]) => make("option", { value }, text)));
    select.value = value;
    select.onchange = () => {
      take(select.value);
      if (this.table && name !== "model") this.show(this.table);
    };
    if (name === "size") byId("calc-asked").append(select.parentElement!); // the last one
  }

  private show(table: Table): void {
    const gpu = table.gpus.find(({ flag }) => flag === this.gpu)!;
    const room = Math.floor(table.usable * gpu.bytes);
    const key = keyOf(table, this.chosen);
    const largest = this.largest(table, key, room);
    const size = this.size === MANY ? largest || 1 : Number(this.size);
    const taken = total(table, key, size, "device");
    const fits = taken <= room;
    const many = words.plural(size, "example");
    tell(
      byId("calc-verdict"),
      fits
        ? `It fits: ${amount(taken)} of the ${amount(room)} that may be used, with ${many} at a time.`
        : `It does not fit: ${amount(taken)} with ${many} at a time, and ${amount(room)} of the card may be used.`,
    );
    byId("calc-verdict").dataset.fits = String(fits);
    this.showParts(table, key, size, Math.max(room, taken));
    this.showOthers(table, room, size);
    const flags = table.choices.map(({ name, options }) => options[this.chosen[name] ?? 0]?.flag);
    const asked = [table.command, "--gpu", gpu.flag, ...flags];
    if (this.size !== MANY) asked.push("--micro-batch", this.size);
    byId("calc-command").replaceChildren(command(asked.filter(Boolean).join(" ")));
    tell(byId("calc-step"), this.step(table, key, gpu));
  }

  private largest(table: Table, key: string, room: number): number {
    return table.micro_batches.filter((size) => total(table, key, size, "device") <= room).pop() ?? 0;
  }

  private showParts(table: Table, key: string, size: number, most: number): void {
    for (const place of ["device", "host"]) {
      const parts = partsOf(table, key, size).filter(([part]) => table.components[part]!.place === place);
      parts.sort(([, a], [, b]) => b - a);
      const sum = total(table, key, size, place);
      const bar = (bytes: number): Node => {
        const filled = make("span", { class: "bar-of" });
        filled.style.width = `${(100 * bytes) / Math.max(1, place === "device" ? most : sum)}%`;
        return make("span", { class: "bar-in-cell", "aria-hidden": "true" }, filled);
      };
      const row = ([part, bytes]: [number, number]): { what: string; bytes: number } => {
        const { what, assumed } = table.components[part]!;
        return { what: assumed ? `${what} (assumed)` : what, bytes };
      };
      const name = place === "device" ? "On the card" : "In the computer’s own memory";
      fillTable(
        byId<HTMLTableElement>(`calc-${place}`),
        name,
        [
          { head: name, cell: ({ what }) => what },
          { head: "Share", cell: ({ bytes }) => bar(bytes) },
          { head: "Takes", number: true, cell: ({ bytes }) => amount(bytes) },
        ],
        [...parts.map(row), { what: "in all", bytes: sum }],
      );
    }
  }

  /** What each other choice alone would change. */
  private showOthers(table: Table, room: number, size: number): void {
    const rows = table.choices.flatMap(({ name, title, options }) =>
      options.map((option, index) => {
        const key = keyOf(table, { ...this.chosen, [name]: index });
        const most = this.largest(table, key, room);
        const last = table.micro_batches[table.micro_batches.length - 1]!;
        return {
          what: `${title}: ${option.words}`,
          taken: index === (this.chosen[name] ?? 0),
          card: total(table, key, size, "device"),
          host: total(table, key, size, "host"),
          most: most === 0 ? "none" : most === last ? `${most} or more` : words.count(most),
        };
      }),
    );
    fillTable(
      byId<HTMLTableElement>("calc-others"),
      "What each choice would change",
      [
        { head: "Choice", cell: (row) => (row.taken ? make("strong", {}, `${row.what} (chosen)`) : row.what) },
        { head: "Card", number: true, cell: (row) => amount(row.card) },
        { head: "Computer", number: true, cell: (row) => amount(row.host) },
        { head: "Fit at a time", number: true, cell: (row) => row.most },
      ],
      rows,
    );
  }

  /** What a global step takes of the line and of the card. */
  private step(table: Table, key: string, gpu: NamedGpu): string {
    const bytes = Math.floor((2 * table.gradient_bytes * (PEERS - 1)) / PEERS);
    const seconds = (8 * bytes) / (LINE_MBIT * 1e6);
    const line = `Among ${PEERS} peers a step sends and receives ${amount(bytes)}: ${words.duration(seconds)} on a line of ${LINE_MBIT} Mbit/s.`;
    const flops = table.flops[key]! * table.examples;
    const wide = table.choices.some(
      ({ name, options }) => name === "precision" && options[this.chosen[name] ?? 0]?.flag === "--precision fp32",
    );
    const peak = wide ? gpu.full : gpu.half;
    const work = `${words.count(table.examples)} examples of ${words.count(table.sequence)} tokens are ${words.short(flops / 1e12)} TFLOP`;
    if (peak === null) return `${line} ${work}; name the card to see for how long it computes.`;
    const share = words.percent(table.utilisation);
    return `${line} ${work}: ${words.duration(flops / (table.utilisation * peak * 1e12))} on this card alone, at an assumed ${share} of its peak.`;
  }
}

function keyOf(table: Table, chosen: Record<string, number>): string {
  return table.choices.map(({ name, options }) => Math.min(chosen[name] ?? 0, options.length - 1)).join(" ");
}

function partsOf(table: Table, key: string, size: number): Parts {
  const [same, ...rest] = table.answers[key] as Parts[];
  return [...same!, ...rest[table.micro_batches.indexOf(size)]!];
}

function total(table: Table, key: string, size: number, place: string): number {
  return partsOf(table, key, size)
    .filter(([part]) => table.components[part]!.place === place)
    .reduce((sum, [, bytes]) => sum + bytes, 0);
}

/** As `tt calc` writes it: powers of 1024, as memory is made. */
function amount(bytes: number): string {
  for (const [unit, name] of [
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
  ] as const)
    if (bytes >= unit) return `${(bytes / unit).toFixed(bytes < 100 * unit ? 1 : 0)} ${name}`;
  return `${(bytes / 1024).toFixed(0)} KiB`;
}
