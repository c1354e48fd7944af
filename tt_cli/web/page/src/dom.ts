// Elements. Text goes in as text only: names and words of peers are a stranger's.

export function byId<T extends Element = HTMLElement>(id: string): T {
  return document.getElementById(id) as unknown as T;
}

type Child = Node | string | null;

/** A new element; `attributes` that are null are left out. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, string | null> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function draw(tag: string, attributes: Record<string, string | number> = {}, text = ""): SVGElement {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (text) element.textContent = text;
  return element;
}

/** Sets text where it changed: what did not change is neither laid out again nor read out again. */
export function tell(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Control characters and those that turn the direction of text around, seen instead of obeyed. */
export function plain(text: unknown, longest = 120): string {
  const seen = String(text ?? "").replace(
    /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    "·",
  );
  const characters = [...seen];
  return characters.length > longest ? `${characters.slice(0, longest - 1).join("")}…` : seen;
}

/** A stranger's name: isolated from the text around it, cut where it is too long. */
export function named(text: string): HTMLElement {
  return make("bdi", { class: "who", title: plain(text, 500) }, plain(text, 60));
}

/** An address that may stand in a link: of this page's own place, or of the web. */
export function linkable(address: string | null | undefined): string | null {
  if (!address) return null;
  try {
    const url = new URL(address, document.baseURI);
    return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
  } catch {
    return null;
  }
}

/** The same for a picture, which only this page's own place may give. */
export function ownPicture(address: string): string | null {
  const url = linkable(address);
  return url !== null && new URL(url).origin === location.origin ? url : null;
}

const CELL = new Intl.NumberFormat("en");

/** Rows of a table; numbers are right-aligned. Columns: header, and what a row shows there. */
export interface Column<T> {
  head: string;
  number?: boolean;
  cell: (row: T, index: number) => Child;
}

export function fillTable<T>(table: HTMLTableElement, caption: string, columns: Column<T>[], rows: T[]): void {
  const kind = (column: Column<T>): string | null => (column.number ? "number" : null);
  const head = make("tr", {}, ...columns.map((c) => make("th", { scope: "col", class: kind(c) }, c.head)));
  const body = rows.map((row, index) =>
    make("tr", {}, ...columns.map((c) => make("td", { class: kind(c) }, c.cell(row, index)))),
  );
  table.replaceChildren(
    make("caption", { class: "sr" }, `${caption}, ${CELL.format(rows.length)} rows`),
    make("thead", {}, head),
    make("tbody", {}, ...body),
  );
}
