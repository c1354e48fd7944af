// Arithmetic of the plots' curves.

export type Values = (number | null)[];

/** Round numbers for a log scale, also within one decade. */
export function decades(low: number, high: number): number[] {
  const found: number[] = [];
  const spread = high / low;
  const steps = spread > 20 ? [1] : spread > 4 ? [1, 2, 3, 5] : [1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const step of steps) found.push(step * 10 ** power);
  }
  const within = found.filter((value) => value >= low && value <= high);
  return within.length >= 2 ? within : [low, high];
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

/** Where in a rising column `value` would stand closest. */
export function nearest(column: number[], value: number): number {
  let low = 0,
    high = column.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle]! < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - column[low - 1]! < column[low]! - value ? low - 1 : low;
}
