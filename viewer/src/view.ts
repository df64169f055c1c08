/** The current view, which the fragment of the URL stores: a link opens the same view. */
import { signal } from "@preact/signals";
import type { Key, Query } from "./data";

export const DEFAULT_FILTERS = {
  step_from: "",
  step_to: "",
  source: "",
  status: "",
  stop_reason: "",
  reward_min: "",
  reward_max: "",
  tokens_min: "",
  tokens_max: "",
  text: "",
  order: "-step",
  offset: "",
} satisfies Query;

const DEFAULT_VIEW = {
  tab: "curves", // or rollouts, diagnosis, runs
  /** Ids of runs whose curves are hidden, separated by commas. */
  hidden: "",
  smooth: "0.6",
  axis: "step", // or hours
  /** Text that metric names must contain. */
  find: "",
  /** Range of steps or hours, "from~to". */
  zoom: "",
  /** The run whose rollouts are shown. */
  run: "",
  ...DEFAULT_FILTERS,
  /** Key of the open sample; `sample` is "" if none is open. */
  step: "",
  uid: "",
  group: "",
  sample: "",
  how: "conversation", // or session, tokens, group
  markdown: "on", // or off: texts as the model wrote them
  shade: "logprob", // or gap, advantage
  /** Index of the selected token. */
  token: "",
};

export type View = typeof DEFAULT_VIEW;

export const view = signal<View>(read(location.hash));
addEventListener("popstate", () => (view.value = read(location.hash)));

/** Change the view and the URL. With `replaceHistory` the browser's back button skips the change. */
export function updateView(change: Partial<View>, replaceHistory = false): void {
  const next = { ...view.value, ...change };
  const params = new URLSearchParams(
    Object.entries(next).filter(([name, value]) => value !== DEFAULT_VIEW[name as keyof View]),
  );
  history[replaceHistory ? "replaceState" : "pushState"](null, "", `#${params}`);
  view.value = next;
}

export function openKey({ step, uid, group, sample }: View): Key | null {
  return sample === "" ? null : { step: Number(step), uid, group: Number(group), sample: Number(sample) };
}

export const asView = ({ step, uid, group, sample }: Key) => ({
  step: String(step),
  uid,
  group: String(group),
  sample: String(sample),
  token: "",
});

export const NO_SAMPLE = { step: "", uid: "", group: "", sample: "", token: "" };

export function queryOf(shown: View): Query {
  const names = Object.keys(DEFAULT_FILTERS) as (keyof Query)[];
  return Object.fromEntries(names.map((name) => [name, shown[name]])) as unknown as Query;
}

function read(hash: string): View {
  const params = new URLSearchParams(hash.slice(1));
  const names = Object.keys(DEFAULT_VIEW).filter((name) => params.has(name));
  return { ...DEFAULT_VIEW, ...Object.fromEntries(names.map((name) => [name, params.get(name) ?? ""])) };
}
