// What is new: server-sent events, and asking again and again where they do not come through. Says who was last heard when.

import { ask, isStatic, Missing, type Snapshot, type Step } from "./answers";

export type Link = "starting" | "live" | "asking" | "gone" | "file";

const SILENT_MS = 15_000; // events come only when something changed; after so long the server is asked whether it is there
const ASK_MS = 4_000; // … and so often where there are no events
const GONE_MS = 6_000;
const EVENTS_AGAIN_MS = 30_000;

interface Listeners {
  snapshot(snapshot: Snapshot): void;
  step(step: Step): void;
  /** Told every second: the link's state and how long ago the server was heard, in seconds. */
  state(link: Link, silentSeconds: number): void;
  /** After it was gone, or the run was taken back: all that was shown may be old. */
  back(): void;
}

export class Live {
  private link: Link = "starting";
  private heardAt = Date.now();
  private askedAt = 0;
  private asking = false;
  private eventsAt = 0;
  private events: EventSource | null = null;
  private open = false;
  private newest = 0;
  private seen = 0; // when the newest snapshot was taken
  private era: string | null = null; // of the steps that are told: another one is of a run that was taken back

  constructor(private readonly on: Listeners) {}

  start(): void {
    void this.ask();
    setInterval(() => this.tick(), 1000);
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.tick();
    });
  }

  private tick(): void {
    const now = Date.now();
    if (isStatic()) {
      this.say("file");
      return;
    }
    if (!this.events && now - this.eventsAt > EVENTS_AGAIN_MS && this.link !== "starting") this.listen();
    const silent = now - this.heardAt;
    if (!this.asking && now - this.askedAt > ASK_MS && silent > (this.open ? SILENT_MS : ASK_MS)) void this.ask();
    if (this.link !== "starting" && silent > GONE_MS && !this.open) this.say("gone");
    else this.say(this.link);
  }

  private listen(): void {
    this.eventsAt = Date.now();
    const events = new EventSource("api/events");
    this.events = events;
    events.onerror = () => {
      this.open = false;
      if (events.readyState === EventSource.CLOSED) {
        this.events = null;
      }
      if (!this.asking) void this.ask();
    };
    events.addEventListener("snapshot", (event) => {
      this.told();
      this.take(JSON.parse((event as MessageEvent<string>).data) as Snapshot);
    });
    events.addEventListener("step", (event) => {
      this.told();
      const { era, ...step } = JSON.parse((event as MessageEvent<string>).data) as Step & { era: string };
      const back = this.era !== null && era !== this.era;
      this.era = era;
      this.newest = back ? step.step : Math.max(this.newest, step.step);
      if (back) this.on.back();
      this.on.step(step);
    });
  }

  /** An event came: that a connection is open says nothing, what is on the way may hold up all that comes after. */
  private told(): void {
    const again = !this.open && this.era !== null; // steps may have been made meanwhile
    this.open = true;
    this.heard(again);
  }

  private async ask(): Promise<void> {
    this.asking = true;
    this.askedAt = Date.now();
    const told = this.open ? this.seen : Infinity;
    try {
      const snapshot = await ask("snapshot");
      if (this.seen === told && snapshot.time > told) this.close(); // the events ought to have told it
      this.take(snapshot);
      if (!this.events && !isStatic() && this.eventsAt === 0) this.listen();
    } catch (error) {
      if (error instanceof Missing && (error.status === 404 || error.status === 503))
        this.heard(); // nothing to tell yet
      else if (this.link === "starting" || Date.now() - this.heardAt > GONE_MS) this.say("gone");
    } finally {
      this.asking = false;
    }
  }

  private take(snapshot: Snapshot): void {
    this.seen = snapshot.time;
    // Without events nobody tells of a step, or of a way back; the snapshot does, once.
    const back = !this.open && snapshot.epoch < this.newest;
    this.heard(back);
    this.on.snapshot(snapshot);
    if (!this.open && this.newest && snapshot.epoch > this.newest && snapshot.loss !== null) {
      const { epoch: step, time, loss, trainers: peers, samples_per_second } = snapshot;
      this.on.step({ step, time, loss, peers, samples_per_second });
    }
    this.newest = back ? snapshot.epoch : Math.max(this.newest, snapshot.epoch);
  }

  /** Ask again and again instead, for a while: something on the way holds the events up, or lost the connection. */
  private close(): void {
    this.events?.close();
    this.events = null;
    this.open = false;
    this.eventsAt = Date.now();
  }

  private heard(missed = false): void {
    const wasGone = this.link === "gone";
    this.heardAt = Date.now();
    this.say(isStatic() ? "file" : this.open ? "live" : "asking");
    if (!wasGone && !missed) return;
    this.era = null; // all is asked for anew: not once more when the events are back
    this.on.back();
  }

  private say(link: Link): void {
    this.link = link;
    this.on.state(link, (Date.now() - this.heardAt) / 1000);
  }
}
