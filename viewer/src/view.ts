/** What is shown, as it stands behind the # of the address: a link reopens the same view. */
import { signal } from "@preact/signals";
import type { Key, Query } from "./data";

export const FIRST_FILTERS = {
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

const FIRST = {
  tab: "curves", // or rollouts, diagnosis, runs
  /** Ids of runs whose curves are off, with commas. */
  hidden: "",
  smooth: "0.6",
  axis: "step", // or hours
  /** Part of metrics' names. */
  find: "",
  /** Steps or hours from-to. */
  zoom: "",
  /** The run whose rollouts are shown. */
  run: "",
  ...FIRST_FILTERS,
  /** The sample that is open. */
  step: "",
  uid: "",
  group: "",
  sample: "",
  how: "conversation", // or tokens, group
  shade: "logprob", // or gap, advantage
  /** The token whose numbers are shown. */
  token: "",
};

export type View = typeof FIRST;

export const view = signal<View>(read(location.hash));
addEventListener("popstate", () => (view.value = read(location.hash)));

/** Show something else. `still`: the way back leads past it, as for every move of a slider. */
export function go(change: Partial<View>, still = false): void {
  const next = { ...view.value, ...change };
  const written = new URLSearchParams(
    Object.entries(next).filter(([name, value]) => value !== FIRST[name as keyof View]),
  );
  history[still ? "replaceState" : "pushState"](null, "", `#${written}`);
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
  const names = Object.keys(FIRST_FILTERS) as (keyof Query)[];
  return Object.fromEntries(names.map((name) => [name, shown[name]])) as unknown as Query;
}

function read(hash: string): View {
  const given = new URLSearchParams(hash.slice(1));
  const known = Object.keys(FIRST).filter((name) => given.has(name));
  return { ...FIRST, ...Object.fromEntries(known.map((name) => [name, given.get(name) ?? ""])) };
}
