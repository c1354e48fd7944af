// What the server answers, and how it is asked. All addresses are relative: the page may lie under any path.

import type * as described from "./openapi";

export type * from "./openapi";

export const COLUMNS = ["step", "time", "loss", "peers", "samples_per_second"] as const;

/** A step as it is made: a row of the history. */
export type Step = { [Column in (typeof COLUMNS)[number]]: number };

/** block: of an exported page; so many steps are in each file of a closer look. */
export type History = described.Steps & { block?: number };

interface Answers {
  run: described.Run;
  snapshot: described.Snapshot;
  history: History;
  activity: described.Activity;
  leaderboard: described.Leaderboard;
  checkpoints: described.Checkpoints;
  rounds: described.Rounds;
  figures: described.Figures;
  calculator: described.Table;
}

let files = document.querySelector('meta[name="tt-static"]') !== null;

/** Whether the answers are files, which nobody renews while one looks. */
export const isStatic = (): boolean => files;

const WAIT_MS = 10_000;

async function fetched<T>(address: string): Promise<T> {
  const answer = await fetch(address, { cache: "no-cache", signal: AbortSignal.timeout(WAIT_MS) });
  if (!answer.ok) throw new Missing(answer.status);
  return (await answer.json()) as T;
}

/** The server is there and says that it has no such answer (yet). */
export class Missing extends Error {
  constructor(readonly status: number) {
    super(`the server answers ${status}`);
  }
}

/** One answer; `which` names the file of an exported page where a parameter chooses between answers. */
export async function ask<Name extends keyof Answers>(
  name: Name,
  parameters: Record<string, string | number> = {},
  which = "",
): Promise<Answers[Name]> {
  const file = `api/${name}${which && `-${which}`}.json`;
  if (files) return fetched(file);
  const query = new URLSearchParams(Object.entries(parameters).map(([key, value]) => [key, String(value)])).toString();
  try {
    return await fetched(`api/${name}${query && `?${query}`}`);
  } catch (error) {
    if (!(error instanceof Missing) || error.status !== 404) throw error;
    const answer = await fetched<Answers[Name]>(file);
    files = true;
    return answer;
  }
}
