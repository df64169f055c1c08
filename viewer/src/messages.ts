/** Chat messages as text. */
import type { Message, Sample, Turn } from "./data";

/** The content as text; parts that are no text as JSON. */
export function contentOf(message: Message): string {
  const { content } = message;
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return asJson(content);
  return content.map((part) => (isTextPart(part) ? part.text : asJson(part))).join("\n");
}

export interface ToolCall {
  name: string;
  /** Names and values; of what is no object the whole, without a name. */
  arguments: [string, string][];
  /** The kind of its failure, or nothing. */
  error: string;
}

/**
 * A message's calls, in the form of chat templates: {"function": {"name", "arguments"}}, or name and arguments by
 * themselves; without any, those that the environment read from its text.
 */
export function toolCallsOf(message: Message, turn?: Turn): ToolCall[] {
  const own = Array.isArray(message.tool_calls) ? (message.tool_calls as Message[]) : [];
  return (own.length ? own : (turn?.tool_calls ?? [])).map((call) => {
    const made = (call?.function ?? call ?? {}) as Message;
    return { name: String(made.name ?? ""), arguments: argumentsOf(made.arguments), error: String(made.error ?? "") };
  });
}

/** By the index of a message the names of the calls that it answers: one each, or all where their numbers differ. */
export function answeredBy(sample: Sample): Map<number, string[]> {
  const found = new Map<number, string[]>();
  for (const [index, turn] of turnsOf(sample)) {
    const names = toolCallsOf(sample.messages[index] ?? {}, sample.turns[turn]).map(({ name }) => name || "unreadable");
    const after = sample.messages.slice(index + 1);
    const next = after.findIndex((message) => message.role === "assistant");
    const answers = next < 0 ? after.length : next;
    for (let place = 0; names.length && place < answers; place++)
      found.set(index + 1 + place, answers === names.length ? names.slice(place, place + 1) : names);
  }
  return found;
}

/** Whatever else a message has, such as reasoning_content, a tool's name or the id of the call that it answers. */
export function otherFields(message: Message): [string, string][] {
  return Object.entries(message)
    .filter(([name, value]) => !["role", "content", "tool_calls"].includes(name) && value !== null && value !== "")
    .map(([name, value]) => [name, typeof value === "string" ? value : asJson(value)]);
}

/** The index of the turn that a message is the answer of; the last answers are the turns', earlier ones examples. */
export function turnsOf(sample: Sample): Map<number, number> {
  const answers = sample.messages.flatMap((message, index) => (message.role === "assistant" ? [index] : []));
  const first = answers.length - sample.turns.length;
  return new Map(answers.flatMap((index, count) => (count >= first ? [[index, count - first] as const] : [])));
}

function isTextPart(part: unknown): part is { text: string } {
  return typeof part === "object" && part !== null && typeof (part as { text?: unknown }).text === "string";
}

function argumentsOf(value: unknown): [string, string][] {
  let known = value;
  try {
    if (typeof value === "string") known = JSON.parse(value); // engines hand them on as the text that the model wrote
  } catch {
    // it is text
  }
  if (typeof known !== "object" || known === null || Array.isArray(known))
    return [["", typeof value === "string" ? value : asJson(value)]];
  return Object.entries(known).map(([name, one]) => [name, typeof one === "string" ? one : asJson(one)]);
}

const asJson = (value: unknown): string => JSON.stringify(value, null, 2) ?? "";
