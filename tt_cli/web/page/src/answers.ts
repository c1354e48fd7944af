// What the server answers, and how it is asked. All addresses are relative: the page may lie under any path.

export interface Run {
  name: string;
  identity: string;
  title: string;
  story: string[];
  version: string;
  total_steps: number;
  target_batch_size: number;
  model: Record<string, number>;
  data: Record<string, unknown>;
  membership: { kind: string; organisation?: string | null; authority?: string | null };
  join: { commands: string[]; peers: string[]; notebooks: string[] };
  run_file: string;
  checkpoints_at: string | null;
}
export interface Peer {
  peer_id: string;
  user: string;
  role: string;
  device: string;
  client_mode: boolean;
  epoch: number;
  lag: number;
  samples_per_second: number;
  share: number;
  samples: number;
  total_samples: number;
  loss: number | null;
  round: string;
  in_agreement: boolean;
  digest: string;
  age_s: number;
}
export interface Snapshot {
  run: string;
  identity: string;
  time: number;
  age_s?: number;
  epoch: number;
  total_steps: number;
  target_batch_size: number;
  samples: number;
  samples_per_second: number;
  eta_s: number | null;
  loss: number | null;
  holders: number;
  agreeing: number;
  trainers: number;
  peers: Peer[];
}
export interface Step {
  step: number;
  time: number;
  loss: number;
  peers: number;
  samples_per_second: number;
}
export interface History {
  step: number[];
  time: number[];
  loss: (number | null)[];
  peers: number[];
  samples_per_second: number[];
  last_step: number;
  total: number;
  block?: number; // of an exported page: so many steps are in each file of a closer look
}
export interface Activity {
  time: number[];
  trainers: number[];
  samples_per_second: number[];
}
export interface Leader {
  user: string;
  samples: number;
  seconds: number;
  peers: number;
  share: number;
  last_seen: number;
}
export interface Checkpoint {
  step: number;
  time: number;
  digest: string;
  bytes: number;
  url: string | null;
  heldout_loss: number | null;
  pictures: { prompt: string; url: string }[];
}
export interface Round {
  step: number;
  time: number;
  words: string;
}
export interface KnownPeer {
  peer_id: string;
  user: string;
}
export interface Figure {
  label: string;
  value: number | string;
  unit: string;
}
export interface Rows<T> {
  rows: T[];
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
export async function ask<T>(path: string, parameters: Record<string, string | number> = {}, which = ""): Promise<T> {
  const file = `api/${path}${which && `-${which}`}.json`;
  if (files) return fetched<T>(file);
  const query = new URLSearchParams(Object.entries(parameters).map(([key, value]) => [key, String(value)])).toString();
  try {
    return await fetched<T>(`api/${path}${query && `?${query}`}`);
  } catch (error) {
    if (!(error instanceof Missing) || error.status !== 404) throw error;
    const answer = await fetched<T>(file);
    files = true;
    return answer;
  }
}
