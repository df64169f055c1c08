/** Texts and tool calls of chat messages. */
import type { Call, Message, Sample, Turn } from "./data";

/** The content of a message as text; other parts than text are JSON. */
export function contentOf(message: Message): string {
  const { content } = message;
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return asJson(content);
  return content.map((part) => (isTextPart(part) ? part.text : asJson(part))).join("\n");
}

export interface ToolCall {
  name: string;
  /** Names and values; one value without a name if the arguments are not an object. */
  arguments: [string, string][];
  /** Kind of the call's failure; "" if it succeeded. */
  error: string;
}

/**
 * The tool calls of a message, in the forms of chat templates: {"function": {"name", "arguments"}} or {"name",
 * "arguments"}. If the message has none, the calls that the environment parsed from its text.
 */
export function toolCallsOf(message: Message, turn?: Turn): ToolCall[] {
  const messageCalls = Array.isArray(message.tool_calls) ? (message.tool_calls as Message[]) : [];
  return (messageCalls.length ? messageCalls : (turn?.tool_calls ?? [])).map((call) => {
    const { name, arguments: args, error } = (call?.function ?? call ?? {}) as Message;
    return { name: String(name ?? ""), arguments: argumentsOf(args), error: String(error ?? "") };
  });
}

/**
 * Index of a message -> names of the calls whose results it holds. If there are as many messages as calls, each holds
 * one result; otherwise each is listed with all calls. Programs refer to calls by id.
 */
export function answeredBy(sample: Sample): Map<number, string[]> {
  const callNames = new Map<number, string[]>();
  if (sample.session) {
    const names = toolNamesOf(sample.session.calls);
    sample.messages.forEach(({ tool_call_id }, index) => {
      const name = names.get(String(tool_call_id ?? ""));
      if (name) callNames.set(index, [name]);
    });
    return callNames;
  }
  for (const [index, turn] of turnsOf(sample)) {
    const names = toolCallsOf(sample.messages[index] ?? {}, sample.turns[turn]).map(({ name }) => name || "unreadable");
    const after = sample.messages.slice(index + 1);
    const next = after.findIndex((message) => message.role === "assistant");
    const results = next < 0 ? after.length : next;
    for (let i = 0; names.length && i < results; i++)
      callNames.set(index + 1 + i, results === names.length ? names.slice(i, i + 1) : names);
  }
  return callNames;
}

/** Names of the tools that the answers of a session call, by the ids of the calls. */
export function toolNamesOf(calls: Call[]): Map<string, string> {
  const toolCalls = calls.flatMap((call) => call.tool_calls).filter(({ id }) => id);
  return new Map(toolCalls.map(({ id, name }) => [String(id), String(name ?? "")]));
}

/** All other fields of a message, such as reasoning_content, a tool's name or the id of a call. */
export function otherFields(message: Message): [string, string][] {
  return Object.entries(message)
    .filter(([name, value]) => !["role", "content", "tool_calls"].includes(name) && value !== null && value !== "")
    .map(([name, value]) => [name, typeof value === "string" ? value : asJson(value)]);
}

/**
 * Index of an assistant message -> index of its turn. The last assistant messages are those of the turns; earlier ones
 * are examples in the prompt. The conversation of a session is that of its last call, without other branches.
 */
export function turnsOf(sample: Sample): Map<number, number> {
  if (sample.session) return turnsOfLastCall(sample, sample.session.calls);
  const answers = sample.messages.flatMap((message, index) => (message.role === "assistant" ? [index] : []));
  const first = answers.length - sample.turns.length;
  return new Map(answers.flatMap((index, count) => (count >= first ? [[index, count - first] as const] : [])));
}

function turnsOfLastCall(sample: Sample, calls: Call[]): Map<number, number> {
  const history: Call[] = [];
  for (let call = calls.at(-1); call; call = calls[call.previous ?? -1]) history.unshift(call);
  const turns = new Map<number, number>();
  let answer = -1;
  for (const { messages, start, stop } of history) {
    answer += messages.length + 1;
    const turn = sample.turns.findIndex((turn) => turn.start === start && turn.stop === stop);
    if (turn >= 0 && sample.messages[answer]?.role === "assistant") turns.set(answer, turn);
  }
  return turns;
}

function isTextPart(part: unknown): part is { text: string } {
  return typeof part === "object" && part !== null && typeof (part as { text?: unknown }).text === "string";
}

function argumentsOf(value: unknown): [string, string][] {
  let parsed = value;
  try {
    if (typeof value === "string") parsed = JSON.parse(value); // engines return arguments as the model's text
  } catch {
    // not JSON: shown as text
  }
  if (typeof parsed !== "object" || parsed === null || Array.isArray(parsed))
    return [["", typeof value === "string" ? value : asJson(value)]];
  return Object.entries(parsed).map(([name, item]) => [name, typeof item === "string" ? item : asJson(item)]);
}

const asJson = (value: unknown): string => JSON.stringify(value, null, 2) ?? "";
