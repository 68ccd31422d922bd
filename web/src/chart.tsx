// One chart: curves with bands and shaded stretches, on uPlot. Cursors of charts with the same `sync` move together.
import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import { short } from "./format";

export type Line = {
  label: string; x: number[]; y: (number | null)[]; colour: string; width?: number; alpha?: number; dash?: number[];
  dots?: boolean; low?: number[]; high?: number[];
};
export type Stretch = { from: number; to: number; label: string; colour: string };

export const DARK = matchMedia("(prefers-color-scheme: dark)");

const css = (text: string) => {
  const name = /^var\((--\w+)\)$/.exec(text);
  return name ? getComputedStyle(document.documentElement).getPropertyValue(name[1]).trim() || "#888" : text;
};

const faded = (text: string, alpha: number) => {
  const hex = css(text);
  return /^#[0-9a-f]{6}$/i.test(hex) ? hex + Math.round(alpha * 255).toString(16).padStart(2, "0") : hex;
};

export function Chart(props: {
  lines: Line[]; height?: number; stretches?: Stretch[]; sync?: string; label: string; xLabel?: string; marks?: number[];
  legend?: boolean; onPick?: (x: number) => void; cursorAt?: number | null; log?: boolean;
}) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const state = useRef(props);
  state.current = props;
  const theme = `${document.documentElement.dataset.theme} ${DARK.matches}`; // colours are read when a chart is made
  const shape = props.lines
    .map((line) => [line.label, line.colour, line.width, line.alpha, line.dots, line.low ? 1 : 0].join("|"))
    .join(";");
  const data = useMemo(() => joined(props.lines), [props.lines]);

  useEffect(() => {
    const own = place.current!;
    const options = optionsFor(state, own);
    const created = new uPlot(options, data, own);
    plot.current = created;
    const resize = new ResizeObserver(() => {
      if (own.clientWidth) created.setSize({ width: own.clientWidth, height: props.height ?? 180 });
    });
    resize.observe(own);
    return () => {
      resize.disconnect();
      created.destroy();
      plot.current = null;
    };
  }, [shape, props.height, props.sync, theme, props.log, props.xLabel]);

  useEffect(() => plot.current?.setData(data), [data, JSON.stringify(props.stretches), JSON.stringify(props.marks)]);
  useEffect(() => {
    const own = plot.current;
    if (own && props.cursorAt !== undefined) own.redraw(false);
  }, [props.cursorAt]);

  return <div class="plot" ref={place} role="img" aria-label={describe(props.label, props.lines)} />;
}

/** A sentence for those who cannot see the curve. */
function describe(label: string, lines: Line[]): string {
  const parts = lines.filter((line) => line.label && line.x.length).slice(0, 4).map((line) => {
    const known = line.y.filter((value): value is number => value !== null);
    if (!known.length) return `${line.label}: no values`;
    const low = known.reduce((least, value) => Math.min(least, value), Infinity);
    const high = known.reduce((most, value) => Math.max(most, value), -Infinity);
    return `${line.label}: ${known.length} values from ${short(low)} to ${short(high)}, the last is ${short(known.at(-1))}`;
  });
  return `${label}. ${parts.join(". ")}`;
}

/** uPlot wants one x for all curves. A curve with a band takes three columns: middle, low, high. */
function joined(lines: Line[]): uPlot.AlignedData {
  const tables: uPlot.AlignedData[] = lines.map((line) =>
    line.low && line.high ? [line.x, line.y, line.low, line.high] : [line.x, line.y]) as uPlot.AlignedData[];
  return tables.length ? uPlot.join(tables) : [[], []];
}

function optionsFor(state: { current: Parameters<typeof Chart>[0] }, own: HTMLElement): uPlot.Options {
  const props = state.current;
  const series: uPlot.Series[] = [{ label: props.xLabel ?? "x", value: (_, value) => short(value, 6) }];
  const bands: uPlot.Band[] = [];
  for (const line of props.lines) {
    const stroke = faded(line.colour, line.alpha ?? 1);
    series.push({
      label: line.label, stroke, width: line.dots ? 0 : line.width ?? 1.6, dash: line.dash, spanGaps: true,
      points: { show: line.dots ?? false, size: 7, fill: stroke }, value: (_, value) => short(value),
    });
    if (line.low && line.high) {
      const at = series.length;
      const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      series.push({ ...hidden, label: `${line.label} low` }, { ...hidden, label: `${line.label} high` });
      bands.push({ series: [at + 1, at], fill: faded(line.colour, 0.18) });
    }
  }
  const ink = css("var(--quiet)");
  const grid = { stroke: faded("var(--line)", 1), width: 1 };
  const axis = { stroke: ink, grid, ticks: grid, font: "11px system-ui, sans-serif" };
  return {
    width: own.clientWidth || 300,
    height: props.height ?? 180,
    series,
    bands,
    legend: { show: props.legend ?? false, live: true },
    cursor: { sync: props.sync ? { key: props.sync } : undefined, drag: { x: !props.onPick, y: false }, points: { size: 7 } },
    scales: { x: { time: false, distr: props.log ? 3 : 1 } },
    axes: [
      { ...axis, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))), size: 28, label: props.xLabel,
        labelSize: props.xLabel ? 16 : 0, labelFont: "11px system-ui, sans-serif" },
      { ...axis, values: (_, ticks) => labels(ticks), size: 52 },
    ],
    hooks: {
      drawClear: [(chart) => shade(chart, state.current.stretches ?? [])],
      draw: [(chart) => mark(chart, state.current.marks ?? [], state.current.cursorAt)],
      ready: [(chart) => {
        // The edges of a band have no line, and no entry among the names.
        const edges = series.flatMap((one, index) => (one.stroke === "transparent" ? [index] : []));
        const names = chart.root.querySelectorAll<HTMLElement>(".u-legend .u-series");
        for (const edge of edges) names[edge]?.classList.add("hidden");
        const pick = (event: MouseEvent) => state.current.onPick?.(chart.posToVal(event.offsetX, "x"));
        if (props.onPick) {
          chart.over.addEventListener("click", pick);
          chart.over.addEventListener("pointermove", (event) => event.buttons === 1 && pick(event));
        }
      }],
    },
  };
}

/** Tick labels with as many digits as it takes to tell them apart. */
function labels(ticks: number[]): string[] {
  const step = Math.abs((ticks[1] ?? 1) - (ticks[0] ?? 0));
  const decimals = Math.min(6, Math.max(0, Math.ceil(-Math.log10(step || 1) - 1e-9)));
  return ticks.map((tick) => (Math.abs(tick) >= 1e4 || (step < 1e-6 && tick) ? short(tick, 3) : tick.toFixed(decimals)));
}

function shade(chart: uPlot, stretches: Stretch[]) {
  const { ctx, bbox } = chart;
  ctx.save();
  for (const stretch of stretches) {
    const from = Math.max(chart.valToPos(stretch.from, "x", true), bbox.left);
    const to = Math.min(chart.valToPos(stretch.to, "x", true), bbox.left + bbox.width);
    if (to <= from) continue;
    ctx.fillStyle = faded(stretch.colour, 0.09);
    ctx.fillRect(from, bbox.top, to - from, bbox.height);
    if (to - from > 60 * devicePixelRatio) {
      ctx.fillStyle = css("var(--quiet)");
      ctx.font = `${10 * devicePixelRatio}px system-ui`;
      ctx.textAlign = "left";
      ctx.fillText(stretch.label, from + 4 * devicePixelRatio, bbox.top + 11 * devicePixelRatio, to - from);
    }
  }
  ctx.restore();
}

function mark(chart: uPlot, marks: number[], cursor: number | null | undefined) {
  const { ctx, bbox } = chart;
  const line = (x: number, style: string, width: number, dash: number[]) => {
    const at = Math.round(chart.valToPos(x, "x", true));
    if (!(at >= bbox.left && at <= bbox.left + bbox.width)) return;
    ctx.beginPath();
    ctx.setLineDash(dash);
    ctx.lineWidth = width * devicePixelRatio;
    ctx.strokeStyle = style;
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
  };
  ctx.save();
  for (const x of marks) line(x, css("var(--bad)"), 1.5, [4, 3]);
  if (cursor !== null && cursor !== undefined) line(cursor, css("var(--ink)"), 1.2, []);
  ctx.restore();
}
