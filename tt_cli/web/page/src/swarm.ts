// Who trains now: a treemap whose areas are samples per second, and the same as a table.

import { hierarchy, treemap, treemapSquarify, type HierarchyRectangularNode } from "d3-hierarchy";
import type { PeerView as Peer, Snapshot } from "./answers";
import { byId, draw, fillTable, make, named, plain, tell } from "./dom";
import * as words from "./words";

type Tile = HierarchyRectangularNode<Peer>;

const TILES = 400; // beyond that a tile is smaller than a fingertip's pixel; the rest share one
const REDRAW_MS = 3000;

export class Swarm {
  figures = false; // the table has those that a task tells beside its loss
  private now: Snapshot | null = null;
  private drawnAt = 0;
  private shown = "";
  private rest = 0; // trainers without a tile
  private tiles = new Map<Element, Peer>();

  constructor() {
    const box = byId("swarm-map");
    new ResizeObserver(() => this.draw(true)).observe(box);
    box.addEventListener("pointerover", (event) =>
      this.point(this.tiles.get((event.target as Element).closest(".tile") ?? box) ?? null),
    );
    box.addEventListener("pointerleave", () => this.point(null));
    byId("swarm-view").addEventListener("change", (event) => {
      const table = (event.target as HTMLInputElement).value === "table";
      byId("swarm-map-box").hidden = table;
      byId("swarm-table-box").hidden = !table;
      this.draw(true);
    });
  }

  snapshot(now: Snapshot): void {
    this.now = now;
    const aux = now.peers.filter((peer) => peer.role === "aux").length;
    const people = new Set(now.peers.filter((peer) => peer.role === "trainer").map((peer) => peer.user || peer.peer_id))
      .size;
    byId("swarm-view").hidden = now.peers.length === 0;
    const helpers =
      aux > 0 ? `, and ${plural(aux, "auxiliary peer")} that keep${aux === 1 ? "s" : ""} them together` : "";
    const holders = plural(now.holders, "peer");
    const same = `${now.agreeing} of ${holders} ${now.agreeing === 1 ? "holds" : "hold"} the same parameters, to the last bit.`;
    const agree = now.digest ? ` ${same}` : now.holders > 0 ? ` No state has a majority among ${holders}.` : "";
    tell(
      byId("swarm-words"),
      now.trainers === 0
        ? `Nobody is training at the moment. ${now.epoch < now.total_steps ? "The first to join sets it going." : "All steps are made."}`
        : `${plural(now.trainers, "computer")} of ${people === 1 ? "one person" : `${words.count(people)} people`}${helpers}.${agree}`,
    );
    this.draw(false);
  }

  private draw(must: boolean): void {
    const now = this.now;
    if (!now || (!must && Date.now() - this.drawnAt < REDRAW_MS && this.shown)) return;
    this.drawnAt = Date.now();
    if (byId("swarm-table-box").hidden) this.map(now);
    else this.table(now);
  }

  private map(now: Snapshot): void {
    const box = byId("swarm-map");
    const width = box.clientWidth,
      height = box.clientHeight;
    const trainers = now.peers.filter((peer) => peer.role === "trainer");
    const key = JSON.stringify([
      width,
      height,
      trainers.map((p) => [p.peer_id, p.user, p.lag, Math.round(p.samples_per_second * 10)]),
    ]);
    if (!width || key === this.shown) return;
    this.shown = key;
    const running = trainers
      .filter((peer) => peer.samples_per_second > 0)
      .sort((a, b) => b.samples_per_second - a.samples_per_second);
    const idle = trainers.length - running.length;
    box.hidden = running.length === 0;
    const svg = draw("svg", {
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `${plural(running.length, "computer")} by samples per second; the table says the same`,
    });
    this.tiles.clear();
    const all = { samples_per_second: 0, children: running.slice(0, TILES) } as Partial<Peer> as Peer;
    const tree = hierarchy(all).sum((peer) => peer.samples_per_second);
    const tiles = treemap<Peer>().tile(treemapSquarify.ratio(1)).size([width, height])(tree).leaves();
    for (const tile of running.length ? tiles : []) svg.append(this.tile(tile));
    box.replaceChildren(svg);
    this.rest = idle + Math.max(0, running.length - TILES);
    this.point(null);
  }

  private tile({ data: peer, x0, y0, x1, y1 }: Tile): Element {
    const width = x1 - x0,
      height = y1 - y0;
    const level = peer.lag > 0 ? "late" : peer.share > 0.1 ? "big" : peer.share > 0.02 ? "middle" : "small";
    // An svg in the svg cuts off what a wide font makes too long.
    const box = draw("svg", {
      class: `tile ${level}`,
      x: x0 + 1,
      y: y0 + 1,
      width: Math.max(0, width - 2),
      height: Math.max(0, height - 2),
    });
    box.append(draw("rect", { width: "100%", height: "100%", rx: Math.min(5, width / 6, height / 6) }));
    const name = plain(peer.user || peer.peer_id, 60);
    const letters = Math.floor((width - 20) / 8.8);
    if (height > 30 && letters >= 4) {
      box.append(draw("text", { x: 9, y: 21, class: "who" }, plain(name, letters)));
      if (height > 50)
        box.append(
          draw("text", { x: 9, y: 40, class: "rate" }, plain(`${words.speed(peer.samples_per_second)}/s`, letters)),
        );
      if (height > 76 && letters >= 10)
        box.append(draw("text", { x: 9, y: 59, class: "rate" }, plain(peer.device, letters)));
    }
    this.tiles.set(box, peer);
    return box;
  }

  private point(peer: Peer | null): void {
    const out = byId("swarm-readout");
    if (peer) {
      const late = peer.lag > 0 ? `, ${plural(peer.lag, "step")} behind` : "";
      out.replaceChildren(
        named(peer.user || peer.peer_id),
        ` · ${plain(peer.device, 60)} · ${words.speed(peer.samples_per_second)} samples per second, ${words.percent(peer.share)} of the swarm${late}`,
      );
    } else {
      const late =
        this.tiles.size && [...this.tiles.values()].some((tile) => tile.lag > 0)
          ? " A reddish one is behind the others."
          : "";
      const more =
        this.rest > 0
          ? ` ${words.count(this.rest)} ${this.tiles.size ? "more wait or are too small to draw" : "wait"}.`
          : "";
      tell(out, this.tiles.size ? `A tile is a computer, its area its samples per second.${late}${more}` : more.trim());
    }
  }

  private table(now: Snapshot): void {
    fillTable<Peer>(
      byId<HTMLTableElement>("swarm-table"),
      "Peers",
      [
        { head: "Who", cell: (peer) => named(peer.user || peer.peer_id) },
        { head: "Device", cell: (peer) => make("bdi", {}, plain(peer.device, 60)) },
        {
          head: "Samples/s",
          number: true,
          cell: (peer) => (peer.role === "trainer" ? words.speed(peer.samples_per_second) : "–"),
        },
        { head: "Share", number: true, cell: (peer) => (peer.role === "trainer" ? words.percent(peer.share) : "–") },
        { head: "Given", number: true, cell: (peer) => words.short(peer.total_samples) },
        { head: "Step", number: true, cell: (peer) => words.count(peer.epoch) },
        ...(now.inner_steps == null
          ? []
          : [{ head: "Inner steps", number: true, cell: (peer: Peer) => words.count(peer.inner_steps) }]),
        ...(this.figures ? [{ head: "Figures", cell: figures }] : []),
        {
          head: "Up, down an hour",
          number: true,
          cell: (peer) =>
            [peer.sent_per_hour, peer.received_per_hour].map((sum) => words.bytes(sum || null)).join(", "),
        },
        {
          head: "Link",
          cell: (peer) =>
            peer.role === "trainer" ? (peer.client_mode ? "behind a router" : "reachable") : "auxiliary",
        },
        { head: "Last round", cell: (peer) => make("bdi", {}, plain(peer.round, 120) || "–") },
      ],
      now.peers.slice(0, 1000),
    );
    this.shown = "";
  }
}

const plural = words.plural;

/** "perplexity 12.3, wrong 0.125": each by its own name. */
const figures = (peer: Peer): string =>
  Object.entries(peer.figures ?? {})
    .map(([name, value]) => `${plain(name, 24)} ${words.loss(value)}`)
    .join(", ") || "–";
