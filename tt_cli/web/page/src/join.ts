// How to join, what the run is, its file, its checkpoints, the five challenges: what changes seldom.

import type { Checkpoint, Checkpoints, Figures, Rounds, Run } from "./answers";
import { byId, fillTable, linkable, make, plain, tell } from "./dom";
import * as words from "./words";

/** A command with a button that copies it. */
export function command(text: string): HTMLElement {
  // A line may break between words, and within a long address, but not after the hyphen of a flag.
  const words = text.split(/( )/).map((word) => (word.length < 30 ? make("span", { class: "word" }, word) : word));
  const box = make("div", { class: "command" }, make("pre", {}, make("code", {}, ...words)));
  addCopy(box);
  return box;
}

export function addCopy(box: Element): void {
  if (box.querySelector("button")) return;
  const button = make("button", { type: "button", class: "copy" }, "Copy");
  const code = (): string => box.querySelector("code")!.textContent ?? "";
  const named = code().length < 80 ? code() : (box.querySelector("pre")?.getAttribute("aria-label") ?? "the text");
  button.append(make("span", { class: "sr" }, ` ${named}`));
  button.addEventListener("click", async () => {
    const done = await copied(code(), box.querySelector("code")!);
    button.firstChild!.textContent = done ? "Copied" : "Selected";
    button.classList.toggle("said", true);
    byId("said").textContent = done ? "Copied to the clipboard" : "Selected; copy it with your keyboard";
    setTimeout(() => {
      button.firstChild!.textContent = "Copy";
      button.classList.toggle("said", false);
    }, 2000);
  });
  box.append(button);
}

/** Pages without TLS may not write to the clipboard; then the text is selected, ready for Ctrl-C. */
async function copied(text: string, shown: Element): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection()?.selectAllChildren(shown);
    return false;
  }
}

export function showRun(run: Run): void {
  byId("story").replaceChildren(...run.story.map((paragraph) => make("p", {}, plain(paragraph, 4000))));
  byId("join-commands").replaceChildren(...run.join.commands.map(command));
  const first = run.join.commands[0];
  if (first) byId("night").replaceChildren(command(`${first} --hours 23:00-07:00`));
  tell(byId("admission"), admission(run));
  const links = run.join.notebooks.flatMap((address) => {
    const url = linkable(address);
    return url ? [make("a", { href: url, download: "" }, plain(address.split("/").pop(), 80))] : [];
  });
  byId("notebooks").hidden = links.length === 0;
  byId("notebooks")
    .querySelector(".links")!
    .replaceChildren(...links.flatMap((link) => [link, " "]));
  showFacts(run);
  byId("run-file-box").hidden = !run.run_file;
  const code = byId("run-file").querySelector("code")!;
  tell(code, run.run_file);
  addCopy(code.closest(".command")!);
  if (run.join.peers.length)
    byId("addresses").replaceChildren(...run.join.peers.map((peer) => make("li", {}, command(plain(peer, 400)))));
  const at = linkable(run.checkpoints_at);
  byId("checkpoints-at").hidden = at === null;
  if (at)
    byId("checkpoints-at").replaceChildren(
      "All of them are at ",
      make("a", { href: at, rel: "noreferrer" }, plain(at)),
      ".",
    );
  tell(byId("foot-identity"), run.identity);
  tell(byId("foot-version"), `Made with tt ${run.version}, Apache-2.0.`);
}

function admission(run: Run): string {
  const { kind, organisation } = run.membership;
  if (kind === "open") return "One command, no account; it fits itself to your machine.";
  const who = organisation ? `members of ${plain(organisation)} on Hugging Face` : "people the organiser admits";
  return `This run is for ${who}: log in once with “tt login”, then`;
}

type Fact = [name: string, value: string, more: string];

const known = (value: number | null, fact: Fact): Fact[] => (value === null ? [] : [fact]);

function showFacts(run: Run): void {
  const { model } = run;
  const facts: Fact[] = [
    [
      "Parameters",
      words.short(model.parameters),
      model.effective && model.effective !== model.parameters
        ? `${words.short(model.effective)} counted layer by layer`
        : "",
    ],
    ...Object.entries(run.described ?? {})
      .filter(([name]) => name !== "model" || model.layers === null) // which follows in figures
      .map(([name, value]): Fact => [plain(name[0]!.toUpperCase() + name.slice(1), 40), plain(value, 80), ""]),
    ...known(model.layers, [
      "Layers",
      words.count(model.layers),
      `${words.count(model.heads)} heads, width ${words.count(model.dim)}`,
    ]),
    ...known(model.text_tokens, [
      "One example",
      `${words.count((model.text_tokens ?? 0) + (model.image_tokens ?? 0))} tokens`,
      model.image_tokens === null
        ? ""
        : `${words.count(model.text_tokens)} of text, ${words.count(model.image_tokens)} of picture`,
    ]),
    ...known(model.vocabulary, ["Vocabulary", words.count(model.vocabulary), ""]),
    ["Batch", words.count(run.target_batch_size), "samples make one step"],
    ["Steps", words.count(run.total_steps), `${words.short(run.total_steps * run.target_batch_size)} samples in all`],
    [
      "Data",
      plain(run.data.name ?? run.data.source ?? "–", 80),
      typeof run.data.rows === "number" ? `${words.count(run.data.rows)} examples` : "",
    ],
    [
      "Membership",
      run.membership.kind === "open"
        ? "open to everybody"
        : plain(run.membership.organisation ?? run.membership.kind, 80),
      "",
    ],
  ];
  byId("facts").replaceChildren(
    ...facts.map(([name, value, more]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, value), more ? make("dd", { class: "of" }, more) : null),
    ),
  );
}

export function showCheckpoints({ rows }: Checkpoints): void {
  byId("checkpoints-empty").hidden = rows.length > 0;
  byId("checkpoints-box").hidden = rows.length === 0;
  const link = (row: Checkpoint): Node | string => {
    const url = linkable(row.url);
    return url
      ? make(
          "a",
          { href: url, rel: "noreferrer" },
          "Get",
          make("span", { class: "sr" }, ` the checkpoint of step ${row.step}`),
        )
      : "–";
  };
  fillTable<Checkpoint>(
    byId<HTMLTableElement>("checkpoints-table"),
    "Checkpoints",
    [
      { head: "Step", number: true, cell: (row) => words.count(row.step) },
      { head: "When", cell: (row) => words.date(row.time) },
      { head: "Size", number: true, cell: (row) => words.bytes(row.bytes) },
      { head: "Held-out loss", number: true, cell: (row) => words.loss(row.heldout_loss) },
      { head: "Digest", cell: (row) => make("code", { title: plain(row.digest, 500) }, plain(row.digest, 14)) },
      { head: "Weights", cell: link },
    ],
    [...rows].reverse().slice(0, 12),
  );
}

export function showRounds({ rows }: Rounds): void {
  byId("rounds-box").hidden = rows.length === 0;
  const newest = [...rows].sort((a, b) => b.time - a.time).slice(0, 12);
  byId("rounds").replaceChildren(
    ...newest.map((row) =>
      make(
        "li",
        {},
        make("span", {}, `step ${words.count(row.step)}`),
        " ",
        make("bdi", {}, plain(row.words, 300)),
        " ",
        make("time", {}, words.when(row.time)),
      ),
    ),
  );
}

export function showFigures(figures: Figures): void {
  for (const card of document.querySelectorAll<HTMLElement>("[data-challenge]")) {
    const list = figures[card.dataset.challenge as keyof Figures] ?? [];
    card.querySelector("dl")!.replaceChildren(
      ...list
        .filter((figure) => figure.value !== null)
        .slice(0, 4)
        .map((figure) => {
          const value = typeof figure.value === "number" ? number(figure.value) : plain(figure.value, 40);
          const unit = figure.value === 1 ? figure.unit.replace(/s$/, "") : figure.unit;
          return make(
            "div",
            {},
            make("dt", {}, plain(figure.label, 80)),
            make("dd", {}, value, unit ? make("span", { class: "unit" }, ` ${plain(unit, 30)}`) : null),
          );
        }),
    );
  }
}

const number = (value: number): string =>
  Math.abs(value) >= 100_000
    ? words.short(value)
    : new Intl.NumberFormat("en", { maximumSignificantDigits: 4 }).format(value);
