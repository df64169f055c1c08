/** Which metrics are drawn where, and how they are smoothed. */
import type { Column, Metrics } from "./data";

/** What a first look needs, in this order; names may end in *. */
const MAIN = [
  "reward/mean",
  "eval/*/avg_score",
  "response/mean_tokens",
  "response/truncated_fraction",
  "policy/entropy",
  "policy/kl",
  "mismatch/kl",
  "policy/grad_norm",
  "async/staleness_max",
  "rollouts/max_staleness",
  "throughput/tokens_per_s",
  "memory/learner_peak_rss_gib",
  "memory/learner_peak_gib",
];

/** Parts of timing/step_s that follow each other. */
const STEP_PARTS = ["generate", "score", "update", "publish", "offload"];
const QUANTILE = /^(.*\/)p(\d+)$/;
const EVALUATION = /^eval\/(.+)\/avg_score$/;

export interface Section {
  title: string;
  charts: ChartPlan[];
}

export type ChartPlan =
  | { kind: "curve"; title: string; columns: string[]; bands: [string, string][] }
  | { kind: "parts"; title: string; run: string };

/** Sections of charts: the main ones, then all by what stands before the slash; `find` keeps those with it in their name. */
export function sectionsOf(names: string[], runs: string[], find: string): Section[] {
  const wanted = names.filter((name) => name.toLowerCase().includes(find.toLowerCase()));
  const main: ChartPlan[] = MAIN.flatMap((pattern) => mainChart(pattern, wanted, names));
  if ("timing/step_s".includes(find.toLowerCase()) && names.includes("timing/step_s"))
    main.push(...runs.map((run) => ({ kind: "parts" as const, title: "time of a step by part, s", run })));
  const prefixes = [...new Set(wanted.map(prefixOf))].sort();
  const rest = prefixes.map((prefix) => ({
    title: prefix,
    charts: wanted
      .filter((name) => prefixOf(name) === prefix && !QUANTILE.test(name))
      .sort()
      .map((name) => curve(name, names)),
  }));
  return [{ title: "main", charts: main }, ...rest].filter((section) => section.charts.length);
}

function mainChart(pattern: string, wanted: string[], names: string[]): ChartPlan[] {
  if (!pattern.includes("*")) return wanted.includes(pattern) ? [curve(pattern, names)] : [];
  const columns = wanted.filter((name) => EVALUATION.test(name)).sort();
  return columns.length ? [{ kind: "curve", title: "evaluation by source", columns, bands: [] }] : [];
}

/** A metric; around a mean the quantiles beside it: reward/p10 to reward/p90 around reward/mean. */
function curve(name: string, names: string[]): ChartPlan {
  const quantiles = name.endsWith("/mean")
    ? names
        .filter((other) => QUANTILE.test(other) && other.startsWith(name.replace(/mean$/, "p")))
        .sort((a, b) => percent(a) - percent(b))
    : [];
  const pairs = Math.floor(quantiles.length / 2);
  const bands = Array.from({ length: pairs }, (_, i) => [quantiles[i], quantiles.at(-1 - i)] as [string, string]);
  return { kind: "curve", title: name, columns: [name], bands };
}

const percent = (name: string): number => Number(QUANTILE.exec(name)?.[2]);
const prefixOf = (name: string): string => (name.includes("/") ? name.slice(0, name.indexOf("/")) : "others");

/** What a line is called beside the run's name: the source of an evaluation. */
export const shortName = (column: string): string => EVALUATION.exec(column)?.[1] ?? column;

export const isEvaluation = (column: string): boolean => EVALUATION.test(column);

export interface Points {
  x: number[];
  y: number[];
}

/** Where a column has numbers. Hours are those since the run's first row. */
export function pointsOf(metrics: Metrics, column: string, axis: string): Points {
  const values: Column = Object.hasOwn(metrics.columns, column) ? (metrics.columns[column] ?? []) : [];
  const start = metrics.times[0] ?? 0;
  const points: Points = { x: [], y: [] };
  values.forEach((value, row) => {
    if (value === null) return;
    points.x.push(axis === "hours" ? ((metrics.times[row] ?? start) - start) / 3600 : (metrics.steps[row] ?? row));
    points.y.push(value);
  });
  return points;
}

/** Exponential moving average, corrected for its start, as TensorBoard's; weight 0 leaves the numbers as they are. */
export function smoothed(values: number[], weight: number): number[] {
  let [sum, scale] = [0, 0];
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    scale = weight * scale + (1 - weight);
    return sum / scale;
  });
}

/** The parts of every step's time, s, and what is left of it as "other". */
export function partsOf(metrics: Metrics, axis: string): { x: number[]; parts: { label: string; values: number[] }[] } {
  const whole = pointsOf(metrics, "timing/step_s", axis);
  const at = new Map(whole.x.map((x, index) => [x, index]));
  const parts = STEP_PARTS.map((label) => {
    const values = whole.x.map(() => 0);
    const points = pointsOf(metrics, `timing/${label}_s`, axis);
    points.x.forEach((x, index) => {
      const row = at.get(x);
      if (row !== undefined) values[row] = points.y[index] ?? 0;
    });
    return { label, values };
  }).filter(({ values }) => values.some((value) => value > 0));
  const other = whole.y.map((total, row) =>
    Math.max(0, total - parts.reduce((sum, part) => sum + (part.values[row] ?? 0), 0)),
  );
  return { x: whole.x, parts: [...parts, { label: "other", values: other }] };
}
