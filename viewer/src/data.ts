/** Types of the page's data, and its two sources: the API of a server, or data embedded in the page. */

export interface Run {
  id: string;
  name: string;
  folder: string;
  project: string;
  step: number;
  total_steps: number | null;
  state: string;
  has_rollouts: boolean;
  /** null if the run cannot be read. */
  details: Details | null;
}

/** What a run trains, on what, how long, and how well. */
export interface Details {
  /** "sft", "evaluation" or "rl". */
  kind: string;
  model: string;
  train_data: string[];
  eval_data: string[];
  /** Configuration key -> value as text. */
  settings: Record<string, string>;
  /** Unix seconds. */
  started: number | null;
  seconds: number | null;
  /** 0 if unknown. */
  attempts: number;
  failure: string;
  hardware: { device?: string; slots?: number; nodes?: number; accelerators?: string[] };
  best: { source: string; score: number; step: number; first: number } | null;
  /** Steps. */
  checkpoints: number[];
  /** Steps after which the run was resumed. */
  resumes: number[];
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
  /** Number of consecutive steps that a point stands for. */
  steps_per_point?: number;
  columns: Record<string, Column>;
  described: Record<string, string>;
}

export interface Finding {
  step: number;
  /** Last step; null if it still holds. */
  until: number | null;
  level: string;
  title: string;
  text: string;
}

/** Identifies a sample of a run. */
export interface Key {
  step: number;
  uid: string;
  /** Index of the group in the step, which can have a prompt more than once. */
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
  /** Calls that the environment parsed from the text: name, arguments as text, and error if the call failed. */
  tool_calls?: Message[];
  /** Number of tokens between start and stop that were not sampled. */
  observation_tokens?: number | null;
}

/** Columns over the tokens of prompt and response; null for a token without a value. */
export interface Tokens {
  /** Tokens from which on the model saw a different prompt. */
  restarts?: { start: number }[];
  ids: number[];
  texts: string[];
  /** Number of prompt tokens. */
  prompt: number;
  trained: boolean[];
  logprobs: Column;
  old_logprobs: Column;
  advantages: Column;
  ref_logprobs?: Column;
  rewards?: Column;
}

/** A call of a program to a chat API. */
export interface Call {
  /** Index of the call whose tokens it continues; null if it read all tokens anew. */
  parent: number | null;
  /** Index of the call whose messages and answer its messages begin with; null if there is none. */
  previous: number | null;
  /** The messages after those. */
  messages: Message[];
  content: string;
  reasoning: string;
  /** Tool calls of the answer: id, name and arguments. */
  tool_calls: Message[];
  /** What was wrong with tool calls that could not be parsed. */
  errors: string[];
  /** Response tokens that it sampled. */
  start: number;
  stop: number;
  stop_reason: string;
  prompt_tokens: number;
  retokenized_messages: number;
  /** Number of its tokens in the loss. */
  trained_tokens: number;
  /** Smallest and largest advantage of these tokens; null if unknown. */
  advantage: [number, number] | null;
}

export interface Session {
  /** In the order in which the program made them. */
  calls: Call[];
  /** Counters by name. */
  statistics: Record<string, number>;
}

export interface Sample extends Omit<Row, "tokens" | "turns"> {
  prompt_tokens: number;
  response_tokens: number;
  raw_reward?: number | null;
  error?: string | null;
  detail?: string;
  temperature?: number;
  env_metrics: Record<string, unknown>;
  /** Further inputs of the environment, such as the correct answer. */
  env_extras?: Record<string, unknown>;
  messages: Message[];
  /** Text of the response; missing in a report if there are messages. */
  text?: string;
  turns: Turn[];
  /** The calls of a program, if the sample is one of environment `agent`. */
  session?: Session | null;
  /** null for some samples of a report, to limit its size. */
  tokens: Tokens | null;
}

export interface Group {
  rows: Row[];
  prompt: Message[];
}

/** Query parameters of /api/rollouts as text; "" for no restriction. */
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

export const isSame = (a: Key, b: Key): boolean =>
  a.step === b.step && a.uid === b.uid && a.group === b.group && a.sample === b.sample;

export interface Source {
  /** True if the data can change: it comes from a server. */
  live: boolean;
  runs(): Promise<Runs>;
  metrics(run: string): Promise<Metrics>;
  diagnosis(run: string): Promise<Finding[]>;
  rollouts(run: string, query: Query): Promise<Rows>;
  rollout(run: string, key: Key): Promise<Sample>;
  group(run: string, key: Key): Promise<Group>;
}

/** The data embedded in the page, if any; else the server that sent the page. */
export function openSource(): Source {
  const embeddedJson = document.getElementById("data")?.textContent?.trim();
  return embeddedJson ? embeddedSource(JSON.parse(embeddedJson) as Embedded) : serverSource();
}

// -- from a server ----------------------------------------------------------------------------------------------------

function serverSource(): Source {
  storeToken();
  addEventListener("hashchange", () => storeToken() && location.reload()); // the user pasted the URL of a new server
  const get = async <T>(endpoint: string, query: Record<string, string> = {}): Promise<T> => {
    const params = Object.entries(query).filter(([, value]) => value !== "");
    const headers = { Authorization: `Bearer ${localStorage.getItem(TOKEN) ?? ""}` };
    const response = await fetch(`/api/${endpoint}?${new URLSearchParams(params)}`, { credentials: "omit", headers });
    if (!response.ok) throw new Error(`${endpoint}: ${response.status} ${(await response.text()).slice(0, 300)}`);
    return (await response.json()) as T;
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
 * Store the token in the URL for all tabs of this host and port, and remove it from the URL, because users copy links
 * from there. Returns false if the URL has no token. A token is valid until its server ends.
 */
function storeToken(): boolean {
  const view = new URLSearchParams(location.hash.slice(1));
  const token = view.get("access_token");
  if (!token) return false;
  localStorage.setItem(TOKEN, token);
  view.delete("access_token");
  history.replaceState(null, "", view.size ? `#${view}` : "/");
  return true;
}

// -- embedded in the page ---------------------------------------------------------------------------------------------

/** The server's responses by run id, and the rollouts of a run with all details. */
interface Embedded {
  runs: Runs;
  metrics: Record<string, Metrics>;
  diagnosis: Record<string, Finding[]>;
  rollouts: Record<string, Sample[]>;
}

function embeddedSource(data: Embedded): Source {
  const samples = (run: string) => data.rollouts[run] ?? [];
  const dataOf = async <T>(table: Record<string, T>, run: string): Promise<T> => {
    const data = table[run];
    if (data === undefined) throw new Error(`this report has no run ${run}`);
    return data;
  };
  return {
    live: false,
    runs: async () => data.runs,
    metrics: (run) => dataOf(data.metrics, run),
    diagnosis: (run) => dataOf(data.diagnosis, run),
    rollouts: async (run, query) => search(samples(run), query),
    rollout: async (run, key) => {
      const match = samples(run).find((sample) => isSame(sample, key));
      if (!match) throw new Error(`this report has no sample ${key.sample} of row ${key.uid} at step ${key.step}`);
      return match;
    },
    group: async (run, key) => {
      const group = samples(run).filter((sample) => isSame(sample, { ...key, sample: sample.sample }));
      group.sort((a, b) => a.sample - b.sample);
      return { rows: group.map(rowOf), prompt: commonStart(group.map((sample) => sample.messages)) };
    },
  };
}

/** Number of tokens that the model sampled in these turns. */
export const sampledTokens = (...turns: Turn[]): number =>
  turns.reduce((sum, turn) => sum + turn.stop - turn.start - (turn.observation_tokens ?? 0), 0);

const rowOf = (sample: Sample): Row => ({
  ...sample,
  tokens: sampledTokens(...sample.turns),
  turns: sample.turns.length,
});

/** The prompt of a group: the messages that all conversations begin with, up to the first one of the assistant. */
export function commonStart(conversations: Message[][]): Message[] {
  const [first = [], ...others] = conversations.map((messages) => messages.map((message) => JSON.stringify(message)));
  let length = 0;
  while (length < first.length && others.every((other) => other[length] === first[length])) length++;
  const answer = conversations[0]?.findIndex((message) => message.role === "assistant") ?? -1;
  return conversations[0]?.slice(0, answer < 0 ? length : Math.min(length, answer)) ?? [];
}

function search(samples: Sample[], query: Query): Rows {
  const within = (value: number | null, min: string, max: string) =>
    (min === "" || (value !== null && value >= Number(min))) &&
    (max === "" || (value !== null && value <= Number(max)));
  const matches = (value: string, filter: string) => filter === "" || value === filter;
  const text = query.text.toLowerCase();
  const rows = samples
    .filter((sample) => text === "" || textOf(sample).includes(text))
    .map(rowOf)
    .filter(
      (row) =>
        within(row.step, query.step_from, query.step_to) &&
        within(row.reward, query.reward_min, query.reward_max) &&
        within(row.tokens, query.tokens_min, query.tokens_max) &&
        matches(row.source, query.source) &&
        matches(row.status, query.status) &&
        matches(row.stop_reason, query.stop_reason),
    );
  sort(rows, query.order);
  const offset = Number(query.offset) || 0;
  const distinct = <T>(pick: (sample: Sample) => T) => [...new Set(samples.map(pick))];
  return {
    total: rows.length,
    rows: rows.slice(offset, offset + PAGE_ROWS),
    facets: {
      steps: distinct((sample) => sample.step).sort((a, b) => a - b),
      sources: distinct((sample) => sample.source).sort(),
      statuses: distinct((sample) => sample.status).sort(),
      stop_reasons: distinct((sample) => sample.stop_reason).sort(),
    },
  };
}

function sort(rows: Row[], order: string): void {
  const sign = order.startsWith("-") ? -1 : 1;
  const by = order.replace("-", "") as "step" | "reward" | "tokens";
  const value = (row: Row) => row[by] ?? sign * Infinity; // rows without a value come last in both orders
  rows.sort((a, b) => sign * (value(a) - value(b)) || a.step - b.step || a.group - b.group || a.sample - b.sample);
}

const textOf = (sample: Sample): string =>
  [...contentTexts(sample.messages), sample.text ?? ""].join("\n").toLowerCase();

/** All texts in the JSON of a conversation, including calls and reasoning, without keys and roles. */
function contentTexts(value: unknown): string[] {
  if (typeof value === "string") return [value];
  if (typeof value !== "object" || value === null) return [];
  return Object.entries(value).flatMap(([name, item]) => (name === "role" ? [] : contentTexts(item)));
}
