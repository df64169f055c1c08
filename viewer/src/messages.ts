/** Texts and tool calls of chat messages. */
import type { Message, Sample, Turn } from "./data";

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
 * one result; otherwise each is listed with all calls.
 */
export function answeredBy(sample: Sample): Map<number, string[]> {
  const callNames = new Map<number, string[]>();
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

/** All other fields of a message, such as reasoning_content, a tool's name or the id of a call. */
export function otherFields(message: Message): [string, string][] {
  return Object.entries(message)
    .filter(([name, value]) => !["role", "content", "tool_calls"].includes(name) && value !== null && value !== "")
    .map(([name, value]) => [name, typeof value === "string" ? value : asJson(value)]);
}

/**
 * Index of an assistant message -> index of its turn. The last assistant messages are those of the turns; earlier ones
 * are examples in the prompt.
 */
export function turnsOf(sample: Sample): Map<number, number> {
  const answers = sample.messages.flatMap((message, index) => (message.role === "assistant" ? [index] : []));
  const first = answers.length - sample.turns.length;
  return new Map(answers.flatMap((index, count) => (count >= first ? [[index, count - first] as const] : [])));
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
