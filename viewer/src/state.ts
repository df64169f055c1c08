/** The page's state. Components read these signals, and change them through `updateView` and the functions here. */
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
import { escapeInvisible } from "./invisibleCharacters";
import { asView, updateView, openKey, queryOf, view } from "./view";

const POLL_MS = 3000;
const source = openSource();

export const live = source.live;
export const runs = signal<Runs>({ runs: [], differing: [] });
/** The error message of each kind of request; "" if its last response was successful. */
const errorSignals: Signal<string>[] = [];
export const problem = computed(() => errorSignals.find((error) => error.value !== "")?.value ?? "");
/** Time of the server's last response, Unix milliseconds; 0 before the first. */
export const lastResponseMs = signal(0);
export const helpShown = signal(false);

effect(() => {
  document.title = runs.value.runs.map((run) => escapeInvisible(run.name)).join(" · ") || "skyrl-train";
});

export const hiddenRuns = computed(() => new Set(view.value.hidden.split(",")));
export const shownRuns = computed(() => runs.value.runs.filter((run) => !hiddenRuns.value.has(run.id)));
/** The run whose rollouts are shown: the one in the view, else the first with rollouts. */
export const viewedRun = computed(() => {
  const all = runs.value.runs;
  return all.find((run) => run.id === view.value.run) ?? all.find((run) => run.has_rollouts) ?? all[0];
});

// -- fetched data -----------------------------------------------------------------------------------------------------

const progress = computed(() => runs.value.runs.map((run) => `${run.id}:${run.step}:${run.state}`).join());

/** Metrics by run, fetched again when a run advances. */
export const metrics = fetchForAllRuns<Metrics>(source.metrics);
export const findings = fetchForAllRuns<Finding[]>(source.diagnosis);

const query = computed(() => JSON.stringify(queryOf(view.value)));
const onRollouts = computed(() => view.value.tab === "rollouts");
const viewedId = computed(() => viewedRun.value?.id);
const opened = computed(() => JSON.stringify(openKey(view.value)));
/** Key of the open group, without a sample, so that selecting another sample of the group fetches nothing. */
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

/** The samples of the open sample's group, with all details. */
export const group = latest<(Group & { samples: Sample[] }) | null>(null, () => {
  const [run, key] = [viewedId.value, JSON.parse(openedGroup.value)];
  if (run === undefined || !key || !onRollouts.value) return undefined;
  return source.group(run, key).then(async (response) => ({
    ...response,
    samples: await Promise.all(response.rows.map((row) => source.rollout(run, row))),
  }));
});

/**
 * A signal with the response to the latest request. `fetch` runs again when a signal that it reads changes. Responses to
 * earlier requests are dropped. If it returns undefined, nothing is requested, and the signal keeps its value.
 */
function latest<T>(initial: T, fetch: () => Promise<T> | undefined): ReadonlySignal<T> {
  const result = signal(initial);
  const error = newErrorSignal();
  let lastRequest = 0;
  effect(() => {
    const request = ++lastRequest;
    const response = fetch();
    if (!response) error.value = "";
    response?.then(
      (value) => {
        if (request !== lastRequest) return;
        result.value = value;
        error.value = "";
      },
      (reason: unknown) => {
        if (request === lastRequest) error.value = String(reason);
      },
    );
  });
  return result;
}

/** Responses by run id, fetched again when a run advances. A run whose request fails is missing and sets the error. */
function fetchForAllRuns<T>(fetch: (run: string) => Promise<T>): ReadonlySignal<Record<string, T>> {
  const error = newErrorSignal();
  return latest<Record<string, T>>({}, async () => {
    const ids = progress.value === "" ? [] : runs.peek().runs.map((run) => run.id);
    const responses: Record<string, T> = {};
    const failures: string[] = [];
    const fetchRun = async (id: string) => {
      try {
        responses[id] = await fetch(id);
      } catch (reason) {
        failures.push(String(reason));
      }
    };
    await Promise.all(ids.map(fetchRun));
    error.value = failures[0] ?? "";
    return responses;
  });
}

function newErrorSignal(): Signal<string> {
  const error = signal("");
  errorSignals.push(error);
  return error;
}

const connectionError = newErrorSignal();

/** Fetch the runs now and, from a server, every POLL_MS while the page is visible. */
export async function pollRuns(): Promise<void> {
  if (!document.hidden) {
    try {
      const response = await source.runs();
      if (JSON.stringify(response) !== JSON.stringify(runs.value)) runs.value = response;
      lastResponseMs.value = Date.now();
      connectionError.value = "";
    } catch (error) {
      connectionError.value = String(error);
    }
  }
  if (live) setTimeout(pollRuns, POLL_MS);
}

// -- navigation in the list -------------------------------------------------------------------------------------------

/** Open the next sample of the list (+1) or the previous one (-1), also across the ends of pages. */
export async function moveSelection(by: 1 | -1): Promise<void> {
  const [run, list, key] = [viewedRun.value, rows.value, openKey(view.value)];
  if (!run || !list) return;
  const index = key ? list.rows.findIndex((row) => isSame(row, key)) : -1;
  const next = index < 0 ? 0 : index + by;
  const offset = Number(view.value.offset) || 0;
  if (list.rows[next]) return updateView(asView(list.rows[next]), true);
  const nextOffset = offset + by * PAGE_ROWS;
  if (nextOffset < 0 || nextOffset >= list.total) return;
  const page = await source.rollouts(run.id, { ...queryOf(view.value), offset: String(nextOffset) });
  const row = page.rows.at(by > 0 ? 0 : -1);
  if (row) updateView({ ...asView(row), offset: nextOffset ? String(nextOffset) : "" }, true);
}
