/** The charts of the page and the data of their lines. */
import type { Column, Metrics } from "./data";

/** Metrics of the main section of a run of supervised fine-tuning, before those of all runs. */
const SUPERVISED = ["sft/loss"];
/** Metrics of the main section, in this order; "*" stands for any data source. */
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

/** Consecutive parts of timing/step_s. */
const STEP_PARTS = ["generate", "score", "update", "publish", "offload"];
const QUANTILE = /^(.*\/)p(\d+)$/;
const EVALUATION = /^eval\/(.+)\/avg_score$/;

/** Metrics whose chart is shown even if it is constant: that they do not change is what a reader has to know. */
const ALWAYS_SHOWN = /^reward\/mean$|^eval\/|^sft\//;
/** Smaller values are float noise, except of learning rates. */
const NOISE = 1e-6;
const LEARNING_RATE = /(^|[/_])lr(_|$)/;

export interface Section {
  title: string;
  charts: ChartPlan[];
  /** True for the section of metrics that never change. */
  constant?: boolean;
}

export type ChartPlan =
  | { kind: "curve"; title: string; columns: string[]; bands: [string, string][] }
  | { kind: "parts"; title: string; run: string };

/**
 * Sections of charts: the main section, one for each prefix before the slash, and one of the metrics that never change.
 * With a search, names must contain `find`, and constant metrics are shown like others.
 */
export function sectionsOf(names: string[], runs: string[], find: string, constant: Set<string>): Section[] {
  const sections = allSections(names, runs, find);
  if (find !== "") return sections;
  const isConstant = (plan: ChartPlan) => plan.kind === "curve" && plan.columns.every((name) => constant.has(name));
  const varying = sections.map(({ title, charts }) => ({ title, charts: charts.filter((plan) => !isConstant(plan)) }));
  const constants = new Map(
    sections.flatMap(({ charts }) => charts.filter(isConstant)).map((plan) => [plan.title, plan]),
  );
  return [
    ...varying,
    { title: "constant", charts: [...constants.values()].sort((a, b) => (a.title < b.title ? -1 : 1)), constant: true },
  ].filter((section) => section.charts.length);
}

function allSections(names: string[], runs: string[], find: string): Section[] {
  const matching = names.filter((name) => name.toLowerCase().includes(find.toLowerCase()));
  const main: ChartPlan[] = [...SUPERVISED, ...MAIN].flatMap((pattern) => mainChart(pattern, matching, names));
  if ("timing/step_s".includes(find.toLowerCase()) && names.includes("timing/step_s"))
    main.push(...runs.map((run) => ({ kind: "parts" as const, title: "time of a step by part, s", run })));
  const prefixes = [...new Set(matching.map(prefixOf))].sort();
  const rest = prefixes.map((prefix) => ({
    title: prefix,
    charts: matching
      .filter((name) => prefixOf(name) === prefix && !QUANTILE.test(name))
      .sort()
      .map((name) => curve(name, names)),
  }));
  return [{ title: "main", charts: main }, ...rest].filter((section) => section.charts.length);
}

function mainChart(pattern: string, matching: string[], names: string[]): ChartPlan[] {
  if (!pattern.includes("*")) return matching.includes(pattern) ? [curve(pattern, names)] : [];
  const columns = matching.filter((name) => EVALUATION.test(name)).sort();
  return columns.length ? [{ kind: "curve", title: "evaluation by source", columns, bands: [] }] : [];
}

/** The chart of a metric. A mean has its quantiles as bands: reward/p10 to reward/p90 around reward/mean. */
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

/** The name of a line beside the run's name: the data source of an evaluation, else the metric. */
export const shortName = (column: string): string => EVALUATION.exec(column)?.[1] ?? column;

export const isEvaluation = (column: string): boolean => EVALUATION.test(column);

/** Names of the metrics that have the same value, up to float noise, at all steps of all these runs. */
export function constantMetrics(tables: Metrics[]): Set<string> {
  const names = new Set(tables.flatMap(({ columns }) => Object.keys(columns)));
  return new Set([...names].filter((name) => !ALWAYS_SHOWN.test(name) && isConstant(tables, name)));
}

function isConstant(tables: Metrics[], name: string): boolean {
  let [low, high, number] = [Infinity, -Infinity, 0];
  for (const { columns } of tables)
    for (const value of Object.hasOwn(columns, name) ? (columns[name] ?? []) : []) {
      if (value === null) continue;
      [low, high, number] = [Math.min(low, value), Math.max(high, value), number + 1];
    }
  if (LEARNING_RATE.test(name)) return number > 1 && low === high;
  return number > 1 && high - low <= NOISE * Math.max(1, Math.abs(high), Math.abs(low));
}

/** The value with float noise removed. */
const withoutNoise = (name: string, value: number): number =>
  Math.abs(value) < NOISE && !LEARNING_RATE.test(name) ? 0 : value;

/** The position of a step on the axis of charts; null if the run has no row of that step or a later one. */
export function positionOf({ steps, times }: Metrics, step: number, axis: string): number | null {
  const row = steps.findIndex((other) => other >= step);
  if (row < 0) return null;
  return axis === "hours" ? ((times[row] ?? 0) - (times[0] ?? 0)) / 3600 : step;
}

/** The names among `names` that a text mentions, such as the metrics that a finding is about. */
export const mentioned = (text: string, names: string[]): string[] => {
  const words = new Set(text.match(/[A-Za-z0-9_]+(?:\/[A-Za-z0-9_.-]*[A-Za-z0-9_])+/g));
  return names.filter((name) => words.has(name));
};

/** The unit in a metric's description: "mean reward (reward); healthy: ..." -> "reward". */
export const unitOf = (described: string): string => /\(([^()]{1,24})\)(?:; healthy|$)/.exec(described)?.[1] ?? "";

export interface Points {
  x: number[];
  y: number[];
}

/** The points at which a column has a value. x is the step or the hours since the run's first row. */
export function pointsOf(metrics: Metrics, column: string, axis: string): Points {
  const values: Column = Object.hasOwn(metrics.columns, column) ? (metrics.columns[column] ?? []) : [];
  const start = metrics.times[0] ?? 0;
  const points: Points = { x: [], y: [] };
  values.forEach((value, row) => {
    if (value === null) return;
    points.x.push(axis === "hours" ? ((metrics.times[row] ?? start) - start) / 3600 : (metrics.steps[row] ?? row));
    points.y.push(withoutNoise(column, value));
  });
  return points;
}

/** Exponential moving average with bias correction, like TensorBoard's. Weight 0 leaves the values unchanged. */
export function smoothed(values: number[], weight: number): number[] {
  let [sum, scale] = [0, 0];
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    scale = weight * scale + (1 - weight);
    return sum / scale;
  });
}

/** The parts of each step's time in seconds, with the rest as "other". */
export function partsOf(metrics: Metrics, axis: string): { x: number[]; parts: { label: string; values: number[] }[] } {
  const total = pointsOf(metrics, "timing/step_s", axis);
  const rows = new Map(total.x.map((x, index) => [x, index]));
  const parts = STEP_PARTS.map((label) => {
    const values = total.x.map(() => 0);
    const points = pointsOf(metrics, `timing/${label}_s`, axis);
    points.x.forEach((x, index) => {
      const row = rows.get(x);
      if (row !== undefined) values[row] = points.y[index] ?? 0;
    });
    return { label, values };
  }).filter(({ values }) => values.some((value) => value > 0));
  const other = total.y.map((seconds, row) =>
    Math.max(0, seconds - parts.reduce((sum, part) => sum + (part.values[row] ?? 0), 0)),
  );
  return { x: total.x, parts: [...parts, { label: "other", values: other }] };
}
