/** Chat messages as text. */
import type { Message, Sample } from "./data";

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
  arguments: string;
}

/** Calls in the form of chat templates: {"function": {"name", "arguments"}}, or name and arguments by themselves. */
export function toolCallsOf(message: Message): ToolCall[] {
  const calls = Array.isArray(message.tool_calls) ? (message.tool_calls as Message[]) : [];
  return calls.map((call) => {
    const made = (call?.function ?? call ?? {}) as Message;
    return { name: String(made.name ?? ""), arguments: argumentsOf(made.arguments) };
  });
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

function argumentsOf(value: unknown): string {
  if (typeof value !== "string") return asJson(value);
  try {
    return asJson(JSON.parse(value)); // engines hand them on as the text that the model wrote
  } catch {
    return value;
  }
}

const asJson = (value: unknown): string => JSON.stringify(value, null, 2) ?? "";
