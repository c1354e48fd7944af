// What it draws or writes: the pictures or texts of each checkpoint, and a slider through them.

import type { Checkpoint, Checkpoints } from "./answers";
import { byId, make, ownPicture, plain, tell } from "./dom";
import * as words from "./words";

const FRAME_MS = 700;

export class Samples {
  private checkpoints: Checkpoint[] = [];
  private playing = 0;
  private readonly slider = byId<HTMLInputElement>("samples-at");

  constructor() {
    this.slider.addEventListener("input", () => {
      this.stop();
      this.show();
    });
    byId("samples-play").addEventListener("click", () => (this.playing ? this.stop() : this.play()));
  }

  take({ rows }: Checkpoints): void {
    const atEnd = Number(this.slider.value) >= this.checkpoints.length - 1;
    this.checkpoints = rows.filter((row) => row.pictures.length > 0);
    byId("samples-empty").hidden = this.checkpoints.length > 0;
    byId("samples-box").hidden = this.checkpoints.length === 0;
    const newest = this.checkpoints[this.checkpoints.length - 1];
    this.beside(newest);
    if (!newest) return;
    for (const id of ["samples", "samples-link"]) byId(id).hidden = false;
    this.slider.max = String(this.checkpoints.length - 1);
    if (atEnd) this.slider.value = this.slider.max;
    byId("samples-play").hidden = this.checkpoints.length < 2;
    this.show();
  }

  /** The newest pictures beside the title. */
  private beside(newest: Checkpoint | undefined): void {
    const box = byId("newest");
    box.hidden = newest === undefined || newest.pictures.some(({ url }) => isText(url));
    if (!newest) return;
    const images = newest.pictures.slice(0, 9).flatMap(({ prompt, url }) => {
      const address = ownPicture(url);
      return address && !isText(address)
        ? [
            make("img", {
              src: address,
              alt: plain(prompt),
              title: plain(prompt),
              width: "128",
              height: "128",
              decoding: "async",
            }),
          ]
        : [];
    });
    byId("newest-pictures").replaceChildren(...images.slice(0, images.length - (images.length % 3)));
    tell(byId("newest-words"), `Drawn at step ${words.count(newest.step)}`);
  }

  private show(): void {
    const checkpoint = this.checkpoints[Number(this.slider.value)];
    if (!checkpoint) return;
    const step = `Step ${words.count(checkpoint.step)}`;
    tell(
      byId("samples-step"),
      checkpoint.heldout_loss === null ? step : `${step} · held-out loss ${words.loss(checkpoint.heldout_loss)}`,
    );
    this.slider.setAttribute("aria-valuetext", step);
    const list = byId("pictures");
    const shown = [...list.children];
    const items = checkpoint.pictures.slice(0, 24).map((picture, index) => {
      const prompt = plain(picture.prompt, 120);
      const old = shown[index];
      const item =
        old ??
        make(
          "li",
          {},
          make(
            "figure",
            {},
            isText(picture.url)
              ? make("blockquote", {})
              : make("img", { alt: "", width: "256", height: "256", decoding: "async" }),
            make("figcaption", {}),
          ),
        );
      const image = item.querySelector("img");
      const address = ownPicture(picture.url);
      if (address && image && image.src !== address) image.src = address;
      if (image) image.alt = `Drawn for “${prompt}” at step ${words.count(checkpoint.step)}`;
      const text = item.querySelector("blockquote");
      if (address && text) void this.write(text, address, prompt);
      tell(item.querySelector("figcaption")!, image ? prompt : "");
      return item;
    });
    if (items.length !== shown.length || items.some((item, index) => item !== shown[index]))
      list.replaceChildren(...items);
  }

  /** Show a text, with its beginning set apart; the last one that was asked for counts. */
  private async write(place: HTMLElement, address: string, prompt: string): Promise<void> {
    if (place.dataset.at === address) return;
    place.dataset.at = address;
    const answer = await fetch(address).catch(() => null);
    const text = answer?.ok ? plain((await answer.text()).replace(/\s+/g, " "), 1000) : "–";
    if (place.dataset.at !== address) return;
    const begun = text.startsWith(prompt) ? prompt.length : 0;
    place.replaceChildren(make("strong", {}, text.slice(0, begun)), text.slice(begun));
  }

  private play(): void {
    if (Number(this.slider.value) >= this.checkpoints.length - 1) this.slider.value = "0";
    tell(byId("samples-play"), "Stop");
    this.show();
    this.playing = window.setInterval(() => {
      this.slider.value = String(Number(this.slider.value) + 1);
      this.show();
      if (Number(this.slider.value) >= this.checkpoints.length - 1) this.stop();
    }, FRAME_MS);
  }

  private stop(): void {
    clearInterval(this.playing);
    this.playing = 0;
    tell(byId("samples-play"), "Play");
  }
}

const isText = (address: string): boolean => address.endsWith(".txt");
