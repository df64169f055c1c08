/** All that the page knows. Components read these signals, and change them through `go` and the functions here. */
import { computed, effect, type ReadonlySignal, type Signal, signal } from "@preact/signals";
import {
  type Finding,
  type Group,
  isSame,
  type Metrics,
  openSource,
  PAGE_ROWS,
  type Rows,
  type Runs,
  type Sample,
} from "./data";
import { plain } from "./visible";
import { asView, go, openKey, queryOf, view } from "./view";

const POLL_MS = 3000;
const source = openSource();

export const live = source.live;
export const runs = signal<Runs>({ runs: [], differing: [] });
/** In words, of everything that is asked; "" where the last answer came. */
const troubles: Signal<string>[] = [];
export const problem = computed(() => troubles.find((trouble) => trouble.value !== "")?.value ?? "");
/** When the server last answered, Unix milliseconds. */
export const heard = signal(0);
export const helpShown = signal(false);

effect(() => {
  document.title = runs.value.runs.map((run) => plain(run.name)).join(" · ") || "skyrl-train";
});

export const hiddenRuns = computed(() => new Set(view.value.hidden.split(",")));
export const shownRuns = computed(() => runs.value.runs.filter((run) => !hiddenRuns.value.has(run.id)));
/** The run whose rollouts are shown. */
export const viewedRun = computed(() => {
  const all = runs.value.runs;
  return all.find((run) => run.id === view.value.run) ?? all.find((run) => run.has_rollouts) ?? all[0];
});

// -- what is fetched ---------------------------------------------------------------------------------------------------

const progress = computed(() => runs.value.runs.map((run) => `${run.id}:${run.step}:${run.state}`).join());

/** Of every run; asked for again as runs go on. */
export const metrics = ofEveryRun<Metrics>(source.metrics);
export const findings = ofEveryRun<Finding[]>(source.diagnosis);

const query = computed(() => JSON.stringify(queryOf(view.value)));
const onRollouts = computed(() => view.value.tab === "rollouts");
const viewedId = computed(() => viewedRun.value?.id);
const opened = computed(() => JSON.stringify(openKey(view.value)));
/** Any sample of it stands for a group. */
const openedGroup = computed(() => {
  const key = view.value.how === "group" ? openKey(view.value) : null;
  return JSON.stringify(key && { ...key, sample: 0 });
});

export const rows = latest<Rows | null>(null, () => {
  void progress.value;
  const [run, asked] = [viewedId.value, query.value];
  return run !== undefined && onRollouts.value ? source.rollouts(run, JSON.parse(asked)) : undefined;
});

export const sample = latest<Sample | null>(null, () => {
  const [run, key] = [viewedId.value, JSON.parse(opened.value)];
  return run !== undefined && key && onRollouts.value ? source.rollout(run, key) : undefined;
});

/** The samples beside the open one, in full. */
export const group = latest<(Group & { samples: Sample[] }) | null>(null, () => {
  const [run, key] = [viewedId.value, JSON.parse(openedGroup.value)];
  if (run === undefined || !key || !onRollouts.value) return undefined;
  return source.group(run, key).then(async (found) => ({
    ...found,
    samples: await Promise.all(found.rows.map((row) => source.rollout(run, row))),
  }));
});

/** The answer to what was asked last; answers to older questions are dropped. undefined: nothing is asked now. */
function latest<T>(first: T, ask: () => Promise<T> | undefined): ReadonlySignal<T> {
  const found = signal(first);
  const trouble = newTrouble();
  let asked = 0;
  effect(() => {
    const mine = ++asked;
    const answer = ask();
    if (!answer) trouble.value = "";
    answer?.then(
      (value) => {
        if (mine !== asked) return;
        found.value = value;
        trouble.value = "";
      },
      (error: unknown) => {
        if (mine === asked) trouble.value = String(error);
      },
    );
  });
  return found;
}

/** By the ids of runs, without those whose files cannot be read: they hide no others. */
function ofEveryRun<T>(ask: (run: string) => Promise<T>): ReadonlySignal<Record<string, T>> {
  const trouble = newTrouble();
  return latest<Record<string, T>>({}, async () => {
    const ids = progress.value === "" ? [] : runs.peek().runs.map((run) => run.id);
    const answers: Record<string, T> = {};
    const failed: string[] = [];
    const one = (id: string) => ask(id).then((answer) => void (answers[id] = answer), (error) => failed.push(String(error)));
    await Promise.all(ids.map(one));
    trouble.value = failed[0] ?? "";
    return answers;
  });
}

function newTrouble(): Signal<string> {
  const trouble = signal("");
  troubles.push(trouble);
  return trouble;
}

const lost = newTrouble();

/** Ask for the runs, and again every few seconds if they can go on. */
export async function follow(): Promise<void> {
  if (!document.hidden) {
    try {
      const found = await source.runs();
      if (JSON.stringify(found) !== JSON.stringify(runs.value)) runs.value = found;
      heard.value = Date.now();
      lost.value = "";
    } catch (error) {
      lost.value = String(error);
    }
  }
  if (live) setTimeout(follow, POLL_MS);
}

// -- moving through the list -------------------------------------------------------------------------------------------

/** Open the next sample of the list (+1) or the one before (-1), over the ends of its pages. */
export async function move(by: 1 | -1): Promise<void> {
  const [run, list, key] = [viewedRun.value, rows.value, openKey(view.value)];
  if (!run || !list) return;
  const at = key ? list.rows.findIndex((row) => isSame(row, key)) : -1;
  const next = at < 0 ? 0 : at + by;
  const offset = Number(view.value.offset) || 0;
  if (list.rows[next]) return go(asView(list.rows[next]), true);
  const turned = offset + by * PAGE_ROWS;
  if (turned < 0 || turned >= list.total) return;
  const page = await source.rollouts(run.id, { ...queryOf(view.value), offset: String(turned) });
  const row = page.rows.at(by > 0 ? 0 : -1);
  if (row) go({ ...asView(row), offset: turned ? String(turned) : "" }, true);
}
