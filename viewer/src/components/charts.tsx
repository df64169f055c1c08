import { useMemo } from "preact/hooks";
import { type ChartPlan, isEvaluation, partsOf, type Points, pointsOf, shortName, smoothed } from "../curves";
import { metrics, runs, shownRuns } from "../state";
import { colorOf } from "../theme";
import { view } from "../view";
import { type Line, Plot } from "./plot";

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
  const descriptions = shown.map((run) => table[run.id]?.described);
  const described = descriptions.find((texts) => texts && Object.hasOwn(texts, plan.title))?.[plan.title];
  return <Plot title={plan.title} described={described ?? ""} lines={lines} axis={axis} />;

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
      ...(several || shown.length === 1 ? [shortName(column)] : []),
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
      described="parts of timing/step_s"
      lines={lines}
      axis={axis}
    />
  );
}
