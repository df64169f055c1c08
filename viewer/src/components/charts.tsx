import { useMemo } from "preact/hooks";
import {
  type ChartPlan,
  isEvaluation,
  mentioned,
  partsOf,
  type Points,
  pointsOf,
  positionOf,
  shortName,
  smoothed,
  unitOf,
} from "../curves";
import type { Run } from "../data";
import { findings, metrics, runs, shownRuns } from "../state";
import { colorOf } from "../theme";
import { view } from "../view";
import { type Line, type Marker, Plot } from "./plot";

const NO_MARKERS: Marker[] = [];

type Plan<Kind> = Extract<ChartPlan, { kind: Kind }>;

/** The chart of one or several metrics with a line per run: smoothed, in front of the raw values. */
export function CurveChart({ plan }: { plan: Plan<"curve"> }) {
  const { axis, smooth } = view.value;
  const shown = shownRuns.value;
  const table = metrics.value;
  const lines = useMemo(
    () => shown.flatMap((run) => plan.columns.flatMap((column, dash) => linesOf(run.id, column, dash))),
    [plan, axis, smooth, table, shown],
  );
  const found = findings.value;
  const markers = useMemo(
    () => shown.flatMap((run) => markersOf(run, plan.columns, axis)),
    [plan, axis, table, shown, found],
  );
  const descriptions = shown.map((run) => table[run.id]?.described);
  const name = plan.columns[0] ?? "";
  const described = descriptions.find((texts) => texts && Object.hasOwn(texts, name))?.[name] ?? "";
  return (
    <Plot
      title={plan.title}
      described={described}
      unit={unitOf(described)}
      lines={lines}
      axis={axis}
      markers={markers}
    />
  );

  function linesOf(run: string, column: string, dash: number): Line[] {
    const runMetrics = table[run];
    if (!runMetrics) return [];
    const points = pointsOf(runMetrics, column, axis);
    if (!points.x.length) return [];
    const several = plan.columns.length > 1;
    const index = runs.value.runs.findIndex(({ id }) => id === run);
    const color = colorOf(several && shown.length === 1 ? dash : index);
    const dashes = several && shown.length > 1 ? [[], [6, 4], [2, 3], [10, 4, 2, 4]][dash % 4] : [];
    const names = [
      ...(shown.length > 1 ? [runs.value.runs[index]?.name ?? run] : []),
      ...(several || shown.length === 1 ? [shortName(column)].filter((short) => short !== plan.title) : []),
    ];
    const line = (values: Points, options: Partial<Line> = {}): Line => ({
      label: names.join(" · "),
      color,
      ...values,
      ...options,
    });
    const weight = isEvaluation(column) ? 0 : Number(smooth); // not smoothed: few points, each the mean of many samples
    const main = line({ x: points.x, y: smoothed(points.y, weight) }, { raw: points.y, dash: dashes });
    const bands = plan.bands.flatMap(([low, high]) => [
      line(pointsOf(runMetrics, low, axis), { kind: "low" }),
      line(pointsOf(runMetrics, high, axis), { kind: "high" }),
    ]);
    return [...bands, ...(weight > 0 ? [line(points, { kind: "faint" })] : []), main];
  }
}

/** The checkpoints and resumes of a run, and its findings about these metrics. */
function markersOf(run: Run, columns: string[], axis: string): Marker[] {
  const table = metrics.value[run.id];
  if (!table) return [];
  const color = runs.value.runs.length > 1 ? colorOf(runs.value.runs.findIndex(({ id }) => id === run.id)) : undefined;
  const at = (step: number) => positionOf(table, step, axis);
  const end = at(table.steps.at(-1) ?? 0) ?? 0;
  const marks = (kind: "checkpoint" | "resume", steps: number[]): Marker[] =>
    steps.flatMap((step) => {
      const x = at(step);
      return x === null || step === 0 ? [] : [{ kind, from: x, to: x, title: "", color }];
    });
  const periods = (findings.value[run.id] ?? [])
    .filter(({ text }) => mentioned(text, columns).length)
    .flatMap(({ step, until, title, level }): Marker[] => {
      const from = at(step);
      const to = until === null ? end : (at(until) ?? end);
      return from === null ? [] : [{ kind: "finding", from, to, title, past: level === "past" }];
    });
  const { checkpoints = [], resumes = [] } = run.details ?? {};
  return [...periods, ...marks("resume", resumes), ...marks("checkpoint", checkpoints)];
}

/** The time of a run's steps by part, as stacked areas. */
export function PartsChart({ plan }: { plan: Plan<"parts"> }) {
  const { axis } = view.value;
  const runMetrics = metrics.value[plan.run];
  const lines = useMemo(() => {
    if (!runMetrics) return [];
    const { x, parts } = partsOf(runMetrics, axis);
    let top = x.map(() => 0);
    const stacked = parts.map(({ label, values }, index): Line => {
      top = top.map((sum, row) => sum + (values[row] ?? 0));
      return { label, color: colorOf(index), x, y: top, raw: values, kind: "area" };
    });
    return stacked.reverse(); // drawn from the highest to the lowest: each area covers the one before
  }, [runMetrics, axis]);
  const name = runs.value.runs.length > 1 ? runs.value.runs.find((run) => run.id === plan.run)?.name : "";
  return (
    <Plot
      title={[plan.title, name].filter(Boolean).join(" · ")}
      described="where the time of a step goes: parts of timing/step_s"
      unit="s"
      markers={NO_MARKERS}
      lines={lines}
      axis={axis}
    />
  );
}
