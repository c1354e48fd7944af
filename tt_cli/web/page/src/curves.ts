// Arithmetic of the plots' curves.

type Values = (number | null)[];

/** Round numbers for a log scale, also within one decade. */
export function decades(low: number, high: number): number[] {
  const spread = high / low;
  const steps = spread > 20 ? [1] : spread > 4 ? [1, 2, 3, 5] : [1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9];
  const ticks: number[] = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    ticks.push(...steps.map((step) => step * 10 ** power).filter((value) => value >= low && value <= high));
  return ticks.length >= 2 ? ticks : [low, high];
}

/** A centred mean over 2 reach + 1 points, fewer at the ends; gaps are left out. */
export function smoothed(values: Values, reach: number): Values {
  if (reach < 1) return values;
  const sums = [0],
    counts = [0];
  values.forEach((value, index) => {
    sums.push(sums[index]! + (value ?? 0));
    counts.push(counts[index]! + (value === null ? 0 : 1));
  });
  return values.map((_, index) => {
    const near = Math.min(reach, index, values.length - 1 - index);
    const from = index - near,
      to = index + near + 1;
    const number = counts[to]! - counts[from]!;
    return number ? (sums[to]! - sums[from]!) / number : null;
  });
}

/** The height at x of the line through the points of two rising columns, that are not empty; its ends lead on level. */
export function between(xs: number[], ys: number[], x: number): number {
  const next = xs.findIndex((value) => value >= x);
  if (next <= 0) return ys.at(next)!; // -1, beyond the end: the last
  const [before, after] = [xs[next - 1]!, xs[next]!];
  return ys[next - 1]! + ((ys[next]! - ys[next - 1]!) * (x - before)) / (after - before);
}
