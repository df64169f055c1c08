import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { short } from "../format";
import { dark } from "../theme";
import { go, view } from "../view";
import { plain } from "../visible";
import { Text } from "./text";

/** A line of a chart; x rises. `raw`: the numbers to tell at a point, if they are not y. */
export interface Line {
  label: string;
  color: string;
  x: number[];
  y: number[];
  raw?: number[];
  dash?: number[] | undefined;
  /** faint: behind another; low and high follow each other and are the edges of a band; area: filled to the axis. */
  kind?: "line" | "faint" | "low" | "high" | "area";
}

const HEIGHT = 190;

/** A chart with what it says at the pointer, or at the end, below. */
export function Plot({
  title,
  described,
  lines,
  axis,
}: {
  title: string;
  described: string;
  lines: Line[];
  axis: string;
}) {
  const place = useRef<HTMLDivElement>(null);
  const [at, setAt] = useState<number | null>(null);
  const { zoom } = view.value;
  const isDark = dark.value;
  useEffect(() => {
    const target = place.current;
    if (!target || !lines.length) return;
    const plot = new uPlot(options(target, lines, zoom, isDark, setAt), joined(lines), target);
    const watch = new ResizeObserver(() => plot.setSize({ width: target.clientWidth, height: HEIGHT }));
    watch.observe(target);
    return () => {
      watch.disconnect();
      plot.destroy();
    };
  }, [lines, zoom, isDark]);
  const told = (lines[0]?.kind === "area" ? lines.toReversed() : lines)
    .filter(({ kind = "line" }) => kind === "line" || kind === "area")
    .map((line) => ({ line, value: valueAt(line, at) }));
  const spoken = told.map(({ line, value }) => `${line.label} ${short(value)}`).join(", ");
  return (
    <figure class="chart">
      <figcaption title={plain(described)}>
        <Text value={title} />
      </figcaption>
      <div ref={place} role="img" aria-label={plain(`${title}: ${spoken}`)} onDblClick={() => go({ zoom: "" })} />
      <ul class="values">
        {at !== null && <li class="muted">{axis === "hours" ? `${short(at)} h` : `step ${at}`}</li>}
        {told.map(({ line, value }, index) => (
          <li key={index}>
            <span class="swatch" style={{ background: line.color }} />
            <Text value={line.label} /> <b>{short(value)}</b>
          </li>
        ))}
      </ul>
    </figure>
  );
}

/** The last number up to a step; without one, the last of all. */
function valueAt(line: Line, at: number | null): number | null {
  const row = at === null ? line.x.length - 1 : line.x.findLastIndex((x) => x <= at);
  return (line.raw ?? line.y)[row] ?? null;
}

/** uPlot's tables share one x. */
const joined = (lines: Line[]): uPlot.AlignedData =>
  uPlot.join(lines.map((line) => [line.x, line.y] as uPlot.AlignedData));

function options(
  target: HTMLElement,
  lines: Line[],
  zoom: string,
  isDark: boolean,
  tell: (at: number | null) => void,
): uPlot.Options {
  const style = getComputedStyle(target);
  const axis: uPlot.Axis = {
    stroke: style.getPropertyValue("--muted"),
    grid: { stroke: style.getPropertyValue("--grid"), width: 1 },
    ticks: { show: false },
    font: `11px ${style.fontFamily}`,
  };
  const [from, to] = zoom.split("~").map(Number);
  const range: uPlot.Range.Function = (_, least, most) =>
    from !== undefined && to !== undefined ? [from, to] : least === most ? [least - 1, most + 1] : [least, most];
  return {
    width: target.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { sync: { key: "curves" }, drag: { x: true, y: false, setScale: false }, points: { size: 5 } },
    scales: {
      x: { time: false, range },
      ...(lines[0]?.kind === "area" && { y: { range: (_, __, most) => [0, most * 1.05 || 1] } }),
    },
    padding: [6, 10, 0, 0],
    axes: [
      { ...axis, size: 26 },
      { ...axis, size: 60, values: (_, ticks) => ticks.map(short) },
    ],
    series: [{}, ...lines.map((line) => seriesOf(line, isDark))],
    bands: lines.flatMap((line, index) =>
      line.kind === "high" ? [{ series: [index + 1, index] as [number, number], fill: `${line.color}22` }] : [],
    ),
    hooks: {
      setCursor: [(plot) => tell(plot.cursor.idx == null ? null : (plot.data[0][plot.cursor.idx] ?? null))],
      setSelect: [
        (plot) => {
          if (plot.select.width < 5) return;
          const ends = [plot.select.left, plot.select.left + plot.select.width].map((px) => plot.posToVal(px, "x"));
          go({ zoom: ends.map((end) => Number(end.toPrecision(6))).join("~") });
        },
      ],
    },
  };
}

function seriesOf({ kind = "line", color, dash = [], x }: Line, isDark: boolean): uPlot.Series {
  const points = { show: kind === "line" && x.length < 25, size: 4 };
  if (kind === "area")
    return { stroke: color, width: 1, fill: tint(color, isDark ? 0 : 255), points: { show: false }, spanGaps: true };
  if (kind === "low" || kind === "high") return { width: 0, points: { show: false }, spanGaps: true };
  return {
    stroke: kind === "faint" ? `${color}55` : color,
    width: kind === "faint" ? 1 : 1.75,
    dash,
    points,
    spanGaps: true,
  };
}

/** Opaque, so that areas cover each other: half of the way to black or white. */
function tint(color: string, towards: 0 | 255): string {
  const parts = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return `rgb(${parts.map((part) => Math.round((part + towards) / 2)).join(" ")})`;
}
