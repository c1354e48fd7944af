// Numbers, times and sizes as a person reads them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const dayAndTime = new Intl.DateTimeFormat("en-GB", {
  day: "numeric",
  month: "short",
  hour: "2-digit",
  minute: "2-digit",
});
const fullDay = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "short" });

const finite = (value: unknown): value is number => typeof value === "number" && Number.isFinite(value);

export const count = (value: number | null | undefined): string => (finite(value) ? whole.format(value) : "–");
export const short = (value: number | null | undefined): string => (finite(value) ? compact.format(value) : "–");
export const loss = (value: number | null | undefined): string =>
  finite(value) ? value.toFixed(value < 10 ? 3 : 1) : "–";
export const percent = (value: number): string =>
  finite(value) ? `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %` : "–";

export function speed(value: number | null | undefined): string {
  if (!finite(value)) return "–";
  return value >= 10_000 ? short(value) : value >= 100 ? whole.format(value) : value.toFixed(value < 10 ? 2 : 1);
}

export const plural = (value: number, one: string, many = `${one}s`): string =>
  `${count(value)} ${value === 1 ? one : many}`;

/** "3 min", "5 h 20 min", "12 days": the two largest parts at most. */
export function duration(seconds: number | null | undefined): string {
  if (!finite(seconds) || seconds < 0) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = minutes / 60;
  if (hours < 10) return minutes % 60 ? `${Math.floor(hours)} h ${minutes % 60} min` : `${Math.floor(hours)} h`;
  if (hours < 48) return `${Math.round(hours)} h`;
  const days = hours / 24;
  return days < 730 ? `${whole.format(Math.round(days))} days` : `${(days / 365.25).toFixed(1)} years`;
}

/** "7 of 20 inner steps": of those that make a global one. */
export const innerSteps = (made: number, due: number | null | undefined): string =>
  finite(due) ? `${count(made)} of ${plural(due, "inner step")}` : plural(made, "inner step");

export const ago = (seconds: number): string => (seconds < 2 ? "just now" : `${duration(seconds)} ago`);
export const when = (unix: number): string => (finite(unix) && unix > 0 ? dayAndTime.format(unix * 1000) : "–");
export const date = (unix: number): string => (finite(unix) && unix > 0 ? fullDay.format(unix * 1000) : "–");

export function bytes(value: number | null | undefined): string {
  if (!finite(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let left = value;
  while (left >= 1000 && unit < units.length - 1) {
    left /= 1000;
    unit += 1;
  }
  return `${unit && left < 100 ? left.toFixed(1) : whole.format(left)} ${units[unit]}`;
}
