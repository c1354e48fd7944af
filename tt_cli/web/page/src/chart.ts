// uPlot in the colours and type of the page.

import uPlot from "uplot";

const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";

export const narrow = (): boolean => innerWidth < 600;

const ink = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** An axis beside the plot, whose marks are written as `text` has it. */
export function axis(text: (value: number) => string, more: uPlot.Axis = {}): uPlot.Axis {
  return {
    stroke: () => ink("--muted"),
    font: FONT,
    gap: 6,
    size: narrow() ? 40 : 52,
    ticks: { show: false },
    grid: { stroke: () => ink("--line"), width: 1 },
    border: { show: false },
    values: (_plot, splits) => splits.map(text),
    ...more,
  };
}

/** A line in one of the page's inks; `wash` fills the area below it. */
export function line(name: string, width: number, more: uPlot.Series = {}, wash = ""): uPlot.Series {
  return { stroke: () => ink(name), width, ...(wash ? { fill: () => ink(wash) } : {}), ...more };
}
