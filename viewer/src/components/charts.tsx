import { useMemo } from "preact/hooks";
import { type ChartPlan, isEvaluation, partsOf, type Points, pointsOf, shortName, smoothed } from "../curves";
import { metrics, runs, shownRuns } from "../state";
import { colorOf } from "../theme";
import { view } from "../view";
import { type Line, Plot } from "./plot";

type Plan<Kind> = Extract<ChartPlan, { kind: Kind }>;

/** A metric, or those that belong together, of every run: the smoothed line before the raw one. */
export function CurveChart({ plan }: { plan: Plan<"curve"> }) {
  const { axis, smooth } = view.value;
  const shown = shownRuns.value;
  const table = metrics.value;
  const lines = useMemo(
    () => shown.flatMap((run) => plan.columns.flatMap((column, dash) => linesOf(run.id, column, dash))),
    [plan, axis, smooth, table, shown],
  );
  const described = shown.map((run) => table[run.id]?.described).find((one) => one && Object.hasOwn(one, plan.title))?.[
    plan.title
  ];
  return <Plot title={plan.title} described={described ?? ""} lines={lines} axis={axis} />;

  function linesOf(run: string, column: string, dash: number): Line[] {
    const of = table[run];
    if (!of) return [];
    const points = pointsOf(of, column, axis);
    if (!points.x.length) return [];
    const several = plan.columns.length > 1;
    const index = runs.value.runs.findIndex((one) => one.id === run);
    const color = colorOf(several && shown.length === 1 ? dash : index);
    const dashes = several && shown.length > 1 ? [[], [6, 4], [2, 3], [10, 4, 2, 4]][dash % 4] : [];
    const names = [
      ...(shown.length > 1 ? [runs.value.runs[index]?.name ?? run] : []),
      ...(several || shown.length === 1 ? [shortName(column)] : []),
    ];
    const line = (values: Points, more: Partial<Line> = {}): Line => ({
      label: names.join(" · "),
      color,
      ...values,
      ...more,
    });
    const weight = isEvaluation(column) ? 0 : Number(smooth); // few points, each of many samples
    const main = line({ x: points.x, y: smoothed(points.y, weight) }, { raw: points.y, dash: dashes });
    const bands = plan.bands.flatMap(([low, high]) => [
      line(pointsOf(of, low, axis), { kind: "low" }),
      line(pointsOf(of, high, axis), { kind: "high" }),
    ]);
    return [...bands, ...(weight > 0 ? [line(points, { kind: "faint" })] : []), main];
  }
}

/** How a run's steps spent their time: areas on each other. */
export function PartsChart({ plan }: { plan: Plan<"parts"> }) {
  const { axis } = view.value;
  const of = metrics.value[plan.run];
  const lines = useMemo(() => {
    if (!of) return [];
    const { x, parts } = partsOf(of, axis);
    let below = x.map(() => 0);
    const stacked = parts.map(({ label, values }, index): Line => {
      below = below.map((sum, row) => sum + (values[row] ?? 0));
      return { label, color: colorOf(index), x, y: below, raw: values, kind: "area" };
    });
    return stacked.reverse(); // the highest first: each covers what is below it of the ones before
  }, [of, axis]);
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
