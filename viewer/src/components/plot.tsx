import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { rough, short } from "../format";
import { dark } from "../theme";
import { updateView, view } from "../view";
import { escapeInvisible } from "../invisibleCharacters";
import { SafeText } from "./text";

/** A line of a chart. x is ascending. `raw` has the values to display, if they are not y. */
export interface Line {
  label: string;
  color: string;
  x: number[];
  y: number[];
  raw?: number[];
  dash?: number[] | undefined;
  /** faint: behind another line; low, followed by high: the edges of a band; area: filled down to the axis. */
  kind?: "line" | "faint" | "low" | "high" | "area";
}

/** Something that happened at a step, or in a period. */
export interface Marker {
  kind: "checkpoint" | "resume" | "finding";
  from: number;
  to: number;
  title: string;
  /** Color of the run; none if there is only one. */
  color?: string | undefined;
  past?: boolean;
}

const HEIGHT = 210;

/** A chart with the values at the pointer, or else the last values, below it. */
export function Plot({
  title,
  described,
  unit,
  lines,
  axis,
  markers,
}: {
  title: string;
  described: string;
  unit: string;
  lines: Line[];
  axis: string;
  markers: Marker[];
}) {
  const container = useRef<HTMLDivElement>(null);
  const [at, setAt] = useState<number | null>(null);
  const { zoom } = view.value;
  const isDark = dark.value;
  useEffect(() => {
    const target = container.current;
    if (!target || !lines.length) return;
    const plot = new uPlot(options(target, { lines, zoom, isDark, axis, unit, markers }, setAt), joined(lines), target);
    const watch = new ResizeObserver(() => plot.setSize({ width: target.clientWidth, height: HEIGHT }));
    watch.observe(target);
    return () => {
      watch.disconnect();
      plot.destroy();
    };
  }, [lines, zoom, isDark, axis, unit, markers]);
  const values = (lines[0]?.kind === "area" ? lines.toReversed() : lines)
    .filter(({ kind = "line" }) => kind === "line" || kind === "area")
    .map((line) => ({ line, value: valueAt(line, at) }));
  const description = values.map(({ line, value }) => `${line.label || "latest"} ${short(value)}`).join(", ");
  const findings = markers.filter(({ kind }) => kind === "finding");
  const atMarkers = markers.filter(({ kind, from }) => kind !== "finding" && from === at).map(({ kind }) => kind);
  return (
    <figure class="chart">
      <div class="chart-head">
        <figcaption>
          <SafeText value={title} />
        </figcaption>
        {findings.length > 0 && (
          <p class="chart-findings">
            {[...new Set(findings.map((finding) => finding.title))].map((name) => (
              <button
                key={name}
                type="button"
                class={`chip ${findings.some((finding) => finding.title === name && !finding.past) ? "bad" : ""}`}
                onClick={() => updateView({ tab: "diagnosis" })}
              >
                <SafeText value={name} />
              </button>
            ))}
          </p>
        )}
      </div>
      <p class="described" title={escapeInvisible(described)}>
        <SafeText value={described.replace(/ \([^()]{1,24}\)(; healthy.*)?$/, "").replace(/; .*/, "")} />
      </p>
      <div
        ref={container}
        role="img"
        aria-label={escapeInvisible(`${title}: ${description}`)}
        onDblClick={() => updateView({ zoom: "" })}
      />
      <ul class="values">
        {at !== null && (
          <li class="muted">{[axis === "hours" ? `${short(at)} h` : `step ${at}`, ...atMarkers].join(" · ")}</li>
        )}
        {values.map(({ line, value }, index) => (
          <li key={index}>
            <span class="swatch" style={{ background: line.color }} />
            <SafeText value={line.label || (at === null ? "latest" : "value")} />{" "}
            <b>{line.kind === "area" ? rough(value) : short(value)}</b>
          </li>
        ))}
      </ul>
    </figure>
  );
}

/** The last value up to a step or hour; the last value of the line if `at` is null. */
function valueAt(line: Line, at: number | null): number | null {
  const row = at === null ? line.x.length - 1 : line.x.findLastIndex((x) => x <= at);
  return (line.raw ?? line.y)[row] ?? null;
}

/** Join lines into one table, because uPlot's series share their x values. */
const joined = (lines: Line[]): uPlot.AlignedData =>
  uPlot.join(lines.map((line) => [line.x, line.y] as uPlot.AlignedData));

interface Drawn {
  lines: Line[];
  zoom: string;
  isDark: boolean;
  axis: string;
  unit: string;
  markers: Marker[];
}

function options(
  target: HTMLElement,
  { lines, zoom, isDark, axis, unit, markers }: Drawn,
  onPoint: (at: number | null) => void,
): uPlot.Options {
  const style = getComputedStyle(target);
  const common: uPlot.Axis = {
    stroke: style.getPropertyValue("--muted"),
    grid: { stroke: style.getPropertyValue("--grid"), width: 1 },
    ticks: { show: false },
    font: `11px ${style.fontFamily}`,
    labelFont: `11px ${style.fontFamily}`,
    labelSize: 16,
    labelGap: 0,
  };
  const colors = { bad: style.getPropertyValue("--bad"), muted: style.getPropertyValue("--muted") };
  const [from, to] = zoom.split("~").map(Number);
  const range: uPlot.Range.Function = (_, min, max) =>
    from !== undefined && to !== undefined ? [from, to] : min === max ? [min - 1, max + 1] : [min, max];
  return {
    width: target.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { sync: { key: "curves" }, drag: { x: true, y: false, setScale: false }, points: { size: 5 } },
    scales: {
      x: { time: false, range },
      ...(lines[0]?.kind === "area" && { y: { range: (_, __, max) => [0, max * 1.05 || 1] } }),
    },
    padding: [8, 12, 0, 0],
    axes: [
      { ...common, size: 24, label: axis === "hours" ? "hours" : "training step" },
      { ...common, size: 50, values: (_, ticks) => ticks.map(short), label: labelOf(unit) },
    ],
    series: [{}, ...lines.map((line) => seriesOf(line, isDark))],
    bands: lines.flatMap((line, index) =>
      line.kind === "high" ? [{ series: [index + 1, index] as [number, number], fill: `${line.color}22` }] : [],
    ),
    hooks: {
      drawAxes: [(plot) => drawMarkers(plot, markers, colors)],
      setCursor: [(plot) => onPoint(plot.cursor.idx == null ? null : (plot.data[0][plot.cursor.idx] ?? null))],
      setSelect: [
        (plot) => {
          if (plot.select.width < 5) return;
          const ends = [plot.select.left, plot.select.left + plot.select.width].map((px) => plot.posToVal(px, "x"));
          updateView({ zoom: ends.map((end) => Number(end.toPrecision(6))).join("~") });
        },
      ],
    },
  };
}

/** The label of the y axis. Without a unit it is a space, so that all plots are equally wide. */
function labelOf(unit: string): string {
  if (unit === "0 to 1") return "fraction";
  return unit === "" || unit === "ratio" ? " " : escapeInvisible(unit);
}

/** Draw periods of findings as shaded areas, resumes as dashed lines, and checkpoints as signs on the axis. */
function drawMarkers(plot: uPlot, markers: Marker[], colors: { bad: string; muted: string }): void {
  const { ctx, bbox } = plot;
  const [ratio, bottom, right] = [devicePixelRatio, bbox.top + bbox.height, bbox.left + bbox.width];
  const clamp = (px: number) => Math.min(right, Math.max(bbox.left, px));
  let lastSign = -Infinity;
  ctx.save();
  for (const { kind, from, to, past, color } of markers) {
    const x = plot.valToPos(from, "x", true);
    if (kind === "finding") {
      const end = plot.valToPos(to, "x", true);
      if (end < bbox.left || x > right) continue;
      ctx.fillStyle = past ? colors.muted : colors.bad;
      ctx.globalAlpha = 0.12;
      ctx.fillRect(clamp(x), bbox.top, Math.max(2 * ratio, clamp(end) - clamp(x)), bbox.height);
      ctx.globalAlpha = 0.8;
      if (x >= bbox.left) ctx.fillRect(x, bbox.top, ratio, bbox.height);
      ctx.globalAlpha = 1;
      continue;
    }
    if (x < bbox.left || x > right) continue;
    ctx.fillStyle = ctx.strokeStyle = color ?? colors.muted;
    if (kind === "resume") {
      ctx.lineWidth = ratio;
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
    } else if (x - lastSign >= 7 * ratio) {
      lastSign = x;
      ctx.beginPath();
      ctx.moveTo(x, bottom - 6 * ratio);
      ctx.lineTo(x + 4 * ratio, bottom);
      ctx.lineTo(x - 4 * ratio, bottom);
      ctx.fill();
    }
  }
  ctx.restore();
}

function seriesOf({ kind = "line", color, dash = [], x }: Line, isDark: boolean): uPlot.Series {
  const points = { show: kind === "line" && x.length < 12, size: 4 };
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

/** An opaque color half way to black or white, so that areas cover each other. */
function tint(color: string, towards: 0 | 255): string {
  const parts = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return `rgb(${parts.map((part) => Math.round((part + towards) / 2)).join(" ")})`;
}
