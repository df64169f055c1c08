/** What the page shows, and where it comes from: a server's /api, or data inside the page. */

export interface Run {
  id: string;
  name: string;
  folder: string;
  project: string;
  step: number;
  total_steps: number | null;
  state: string;
  has_rollouts: boolean;
}

export interface Runs {
  runs: Run[];
  differing: { key: string; values: string[] }[];
}

export type Column = (number | null)[];

export interface Metrics {
  steps: number[];
  /** Unix seconds. */
  times: number[];
  /** Points stand for so many steps in a row. */
  steps_per_point?: number;
  columns: Record<string, Column>;
  described: Record<string, string>;
}

export interface Finding {
  step: number;
  level: string;
  title: string;
  text: string;
}

/** Names a sample of a run. */
export interface Key {
  step: number;
  uid: string;
  /** The prompt's place in the step, which can have it twice. */
  group: number;
  sample: number;
}

export interface Row extends Key {
  source: string;
  reward: number | null;
  status: string;
  stop_reason: string;
  tokens: number;
  turns: number;
  preview: string;
}

export interface Rows {
  total: number;
  rows: Row[];
  facets: { steps: number[]; sources: string[]; statuses: string[]; stop_reasons: string[] };
}

export type Message = Record<string, unknown>;

export interface Turn {
  start: number;
  stop: number;
  reward: number | null;
  stop_reason: string;
  min_version: number;
  max_version: number;
  running_s: number | null;
  environment_s?: number | null;
  /** The calls that the environment read from its text: name, arguments as text, and error if it failed. */
  tool_calls?: Message[];
  /** Tokens between start and stop that were not sampled. */
  observation_tokens?: number | null;
}

/** Columns over the tokens of prompt and response; null where there is no number. */
export interface Tokens {
  /** Where the model saw another prompt from then on. */
  restarts?: { start: number }[];
  ids: number[];
  texts: string[];
  /** So many of them are the prompt's. */
  prompt: number;
  trained: boolean[];
  logprobs: Column;
  old_logprobs: Column;
  advantages: Column;
  ref_logprobs?: Column;
  rewards?: Column;
}

export interface Sample extends Omit<Row, "tokens" | "turns"> {
  prompt_tokens: number;
  response_tokens: number;
  raw_reward?: number | null;
  error?: string | null;
  detail?: string;
  temperature?: number;
  env_metrics: Record<string, unknown>;
  /** What else the environment was given, such as the right answer. */
  env_extras?: Record<string, unknown>;
  messages: Message[];
  /** The response, where there are no messages. */
  text?: string;
  turns: Turn[];
  /** Not of every sample of a report. */
  tokens: Tokens | null;
}

export interface Group {
  rows: Row[];
  prompt: Message[];
}

/** The names of the query of /api/rollouts; all values as text, "" for no limit. */
export interface Query {
  step_from: string;
  step_to: string;
  source: string;
  status: string;
  stop_reason: string;
  reward_min: string;
  reward_max: string;
  tokens_min: string;
  tokens_max: string;
  text: string;
  order: string;
  offset: string;
}

export const PAGE_ROWS = 50;
const TOKEN = "skyrl-watch-token";

export const isSame = (one: Key, other: Key): boolean =>
  one.step === other.step && one.uid === other.uid && one.group === other.group && one.sample === other.sample;

export interface Source {
  /** Whether it can have more the next time it is asked. */
  live: boolean;
  runs(): Promise<Runs>;
  metrics(run: string): Promise<Metrics>;
  diagnosis(run: string): Promise<Finding[]>;
  rollouts(run: string, query: Query): Promise<Rows>;
  rollout(run: string, key: Key): Promise<Sample>;
  group(run: string, key: Key): Promise<Group>;
}

/** Data inside the page, if there is any; else the server that sent the page. */
export function openSource(): Source {
  const inside = document.getElementById("data")?.textContent?.trim();
  return inside ? embedded(JSON.parse(inside) as Embedded) : served();
}

// -- from a server -----------------------------------------------------------------------------------------------------

function served(): Source {
  keepToken();
  addEventListener("hashchange", () => keepToken() && location.reload()); // a new address, pasted over an old one
  const get = async <T>(what: string, query: Record<string, string> = {}): Promise<T> => {
    const given = Object.entries(query).filter(([, value]) => value !== "");
    const headers = { Authorization: `Bearer ${localStorage.getItem(TOKEN) ?? ""}` };
    const answer = await fetch(`/api/${what}?${new URLSearchParams(given)}`, { credentials: "omit", headers });
    if (!answer.ok) throw new Error(`${what}: ${answer.status} ${(await answer.text()).slice(0, 300)}`);
    return (await answer.json()) as T;
  };
  const prompt = ({ step, uid, group }: Key) => ({ step: String(step), uid, group: String(group) });
  return {
    live: true,
    runs: () => get("runs"),
    metrics: (run) => get("metrics", { run }),
    diagnosis: (run) => get("diagnosis", { run }),
    rollouts: (run, query) => get("rollouts", { run, ...query, limit: String(PAGE_ROWS) }),
    rollout: (run, key) => get("rollout", { run, ...prompt(key), sample: String(key.sample) }),
    group: (run, key) => get("group", { run, ...prompt(key) }),
  };
}

/**
 * Keep the token of the printed address for all tabs at this host and port, and out of the address: links are copied
 * from there. It is worth nothing once its server has ended; the next one at this port has another.
 */
function keepToken(): boolean {
  const view = new URLSearchParams(location.hash.slice(1));
  const given = view.get("access_token");
  if (!given) return false;
  localStorage.setItem(TOKEN, given);
  view.delete("access_token");
  history.replaceState(null, "", view.size ? `#${view}` : "/");
  return true;
}

// -- inside the page ---------------------------------------------------------------------------------------------------

/** By run's id what the server would answer, and of rollouts all that it would show one by one. */
interface Embedded {
  runs: Runs;
  metrics: Record<string, Metrics>;
  diagnosis: Record<string, Finding[]>;
  rollouts: Record<string, Sample[]>;
}

function embedded(data: Embedded): Source {
  const samples = (run: string) => data.rollouts[run] ?? [];
  const one = async <T>(table: Record<string, T>, run: string): Promise<T> => {
    const found = table[run];
    if (found === undefined) throw new Error(`this report has no run ${run}`);
    return found;
  };
  return {
    live: false,
    runs: async () => data.runs,
    metrics: (run) => one(data.metrics, run),
    diagnosis: (run) => one(data.diagnosis, run),
    rollouts: async (run, query) => choose(samples(run), query),
    rollout: async (run, key) => {
      const found = samples(run).find((sample) => isSame(sample, key));
      if (!found) throw new Error(`this report has no sample ${key.sample} of row ${key.uid} at step ${key.step}`);
      return found;
    },
    group: async (run, key) => {
      const found = samples(run).filter((sample) => isSame(sample, { ...key, sample: sample.sample }));
      found.sort((a, b) => a.sample - b.sample);
      return { rows: found.map(rowOf), prompt: commonStart(found.map((sample) => sample.messages)) };
    },
  };
}

/** The number of tokens that the model sampled in these turns. */
export const sampledTokens = (...turns: Turn[]): number =>
  turns.reduce((sum, turn) => sum + turn.stop - turn.start - (turn.observation_tokens ?? 0), 0);

const rowOf = (sample: Sample): Row => ({
  ...sample,
  tokens: sampledTokens(...sample.turns),
  turns: sample.turns.length,
});

/** The messages before the first answer that all conversations begin with: as the server's, also if all answer alike. */
export function commonStart(conversations: Message[][]): Message[] {
  const [first = [], ...others] = conversations.map((messages) => messages.map((one) => JSON.stringify(one)));
  let length = 0;
  while (length < first.length && others.every((one) => one[length] === first[length])) length++;
  const answer = conversations[0]?.findIndex((message) => message.role === "assistant") ?? -1;
  return conversations[0]?.slice(0, answer < 0 ? length : Math.min(length, answer)) ?? [];
}

function choose(samples: Sample[], query: Query): Rows {
  const within = (value: number | null, least: string, most: string) =>
    (least === "" || (value !== null && value >= Number(least))) &&
    (most === "" || (value !== null && value <= Number(most)));
  const same = (value: string, wanted: string) => wanted === "" || value === wanted;
  const text = query.text.toLowerCase();
  const rows = samples
    .filter((sample) => text === "" || textOf(sample).includes(text))
    .map(rowOf)
    .filter(
      (row) =>
        within(row.step, query.step_from, query.step_to) &&
        within(row.reward, query.reward_min, query.reward_max) &&
        within(row.tokens, query.tokens_min, query.tokens_max) &&
        same(row.source, query.source) &&
        same(row.status, query.status) &&
        same(row.stop_reason, query.stop_reason),
    );
  sort(rows, query.order);
  const offset = Number(query.offset) || 0;
  const all = <T>(pick: (sample: Sample) => T) => [...new Set(samples.map(pick))];
  return {
    total: rows.length,
    rows: rows.slice(offset, offset + PAGE_ROWS),
    facets: {
      steps: all((sample) => sample.step).sort((a, b) => a - b),
      sources: all((sample) => sample.source).sort(),
      statuses: all((sample) => sample.status).sort(),
      stop_reasons: all((sample) => sample.stop_reason).sort(),
    },
  };
}

function sort(rows: Row[], order: string): void {
  const sign = order.startsWith("-") ? -1 : 1;
  const by = order.replace("-", "") as "step" | "reward" | "tokens";
  const value = (row: Row) => row[by] ?? sign * Infinity; // those without a number come last, either way
  rows.sort((a, b) => sign * (value(a) - value(b)) || a.step - b.step || a.group - b.group || a.sample - b.sample);
}

const textOf = (sample: Sample): string => [...said(sample.messages), sample.text ?? ""].join("\n").toLowerCase();

/** The texts in the JSON of a conversation, without names: answers, and also calls and reasoning. */
function said(value: unknown): string[] {
  if (typeof value === "string") return [value];
  if (typeof value !== "object" || value === null) return [];
  return Object.entries(value).flatMap(([name, one]) => (name === "role" ? [] : said(one)));
}
