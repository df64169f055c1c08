import { memo } from "preact/compat";
import { useCallback, useMemo, useState } from "preact/hooks";
import { type Place, placesOf } from "../callTree";
import type { Call, Sample, Session, Turn } from "../data";
import { count, rough } from "../format";
import { toolCallsOf, toolNamesOf } from "../messages";
import { updateView } from "../view";
import { MessageCard, ToolCallCard, TurnFacts } from "./conversation";
import { SafeText, TextBlock } from "./text";

const MAX_PREVIEW_CHARS = 200;
const STATISTICS: Record<string, string> = {
  calls: "calls",
  branches: "branches",
  retokenized_messages: "retokenized messages",
  sampled_tokens: "tokens sampled",
  read_tokens: "tokens read",
  malformed_calls: "malformed tool calls",
  overridden_parameters: "ignored sampling parameters",
};

/** The calls of a session in their order. They are collapsed, because a session may have hundreds. */
export function SessionView({ sample, session }: { sample: Sample; session: Session }) {
  const { calls } = session;
  const [opened, setOpened] = useState<ReadonlySet<number>>(new Set());
  const places = useMemo(() => placesOf(calls), [calls]);
  const turns = useMemo(() => new Map(sample.turns.map((turn) => [`${turn.start}-${turn.stop}`, turn])), [sample]);
  const toolNames = useMemo(() => toolNamesOf(calls), [calls]);
  const onToggle = useCallback((number: number, isOpen: boolean) => {
    setOpened((before) => {
      if (before.has(number) === isOpen) return before;
      const after = new Set(before);
      if (isOpen) after.add(number);
      else after.delete(number);
      return after;
    });
  }, []);
  return (
    <section aria-label="Session">
      <dl class="facts-of-sample session-facts">
        {Object.entries(STATISTICS).map(([name, title]) => (
          <div key={name}>
            <dt>{title}</dt>
            <dd>{count(session.statistics[name] ?? 0)}</dd>
          </div>
        ))}
      </dl>
      {calls.length === 0 ? (
        <p class="empty">The program made no call.</p>
      ) : (
        <p class="session-buttons">
          <button type="button" onClick={() => setOpened(new Set(calls.keys()))}>
            Expand all
          </button>
          <button type="button" onClick={() => setOpened(new Set())}>
            Collapse all
          </button>
        </p>
      )}
      <ol class="calls" aria-label="Calls; arrow keys move through them" onKeyDown={moveFocus}>
        {calls.map((call, number) => (
          <CallItem
            key={number}
            number={number}
            call={call}
            place={places[number] as Place}
            turn={turns.get(`${call.start}-${call.stop}`)}
            toolNames={toolNames}
            firstToken={sample.tokens && sample.tokens.prompt + call.start}
            isOpen={opened.has(number)}
            onToggle={onToggle}
          />
        ))}
      </ol>
    </section>
  );
}

interface CallProps {
  number: number;
  call: Call;
  place: Place;
  turn: Turn | undefined;
  /** Names of tools by the ids of their calls. */
  toolNames: Map<string, string>;
  /** Index of its first token in the token view; null if there are no tokens. */
  firstToken: number | null;
  isOpen: boolean;
  onToggle: (number: number, isOpen: boolean) => void;
}

const CallItem = memo(({ isOpen, onToggle, ...rest }: CallProps) => {
  const { number, call, place } = rest;
  return (
    <li class="call" style={place.depth ? { "--depth": Math.min(place.depth, 8) } : undefined}>
      <details open={isOpen} onToggle={(event) => onToggle(number, event.currentTarget.open)}>
        <summary>
          <span class="facts">
            <b>Call {number + 1}</b>
            <span class={place.isBranch ? "chip branch" : "muted"}>{place.label}</span>
            {call.errors.length > 0 && <span class="chip bad">malformed tool call</span>}
            {call.stop_reason === "length" && <span class="chip bad">truncated</span>}
            <span class="muted">
              {count(call.prompt_tokens)} read · {count(call.stop - call.start)} sampled · {lossOf(call)}
            </span>
          </span>
          <span class="preview">
            <SafeText value={previewOf(call)} />
          </span>
        </summary>
        {isOpen && <CallDetails {...rest} />}
      </details>
    </li>
  );
});

function CallDetails({ call, place, turn, toolNames, firstToken }: Omit<CallProps, "isOpen" | "onToggle">) {
  return (
    <>
      {place.explanation && <p class="muted">{place.explanation}</p>}
      {call.retokenized_messages > 0 && (
        <p class="call-error">
          Messages of the assistant whose sampled tokens were not reused: {count(call.retokenized_messages)}.
        </p>
      )}
      <ol class="conversation">
        {call.messages.map((message, index) => {
          const name = toolNames.get(String(message.tool_call_id ?? ""));
          return <MessageCard key={index} message={message} answers={name ? [name] : []} />;
        })}
        <li class="message assistant">
          <h3>answer</h3>
          {call.reasoning && (
            <details class="reasoning">
              <summary class="muted">reasoning, {count(call.reasoning.length)} characters</summary>
              <TextBlock value={call.reasoning} markdown />
            </details>
          )}
          <TextBlock value={call.content} markdown />
          {toolCallsOf({ tool_calls: call.tool_calls }).map((toolCall, index) => (
            <ToolCallCard key={index} call={toolCall} />
          ))}
          {call.errors.map((error, index) => (
            <div key={index} class="tool-call">
              <span class="muted">malformed tool call</span>{" "}
              <span class="call-error">
                <SafeText value={error} />
              </span>
            </div>
          ))}
          {turn ? (
            <TurnFacts turn={turn} />
          ) : (
            <p class="turn muted">
              <SafeText value={call.stop_reason} />
            </p>
          )}
          <p class="turn muted">
            {count(call.prompt_tokens)} tokens read · {lossOf(call)}{" "}
            {firstToken !== null && call.stop > call.start && (
              <button type="button" onClick={() => updateView({ how: "tokens", token: String(firstToken) })}>
                Show tokens
              </button>
            )}
          </p>
        </li>
      </ol>
    </>
  );
}

/** Whether the tokens of a call were trained on, and with which advantage. */
function lossOf({ start, stop, trained_tokens, advantage }: Call): string {
  if (trained_tokens === 0) return "not in the loss";
  const sampled = stop - start;
  const part = trained_tokens < sampled ? `${count(trained_tokens)} of ${count(sampled)} in the loss` : "in the loss";
  if (!advantage) return part;
  const [low, high] = advantage.map(rough);
  return `${part} · advantage ${low === high ? low : `${low} to ${high}`}`;
}

/** The beginning of the tool calls, or of the text if there are none. */
function previewOf({ content, tool_calls }: Call): string {
  const texts = tool_calls.map((call) => `${String(call.name ?? "")} ${JSON.stringify(call.arguments) ?? ""}`);
  return (texts.join(", ") || content.trimStart()).slice(0, MAX_PREVIEW_CHARS);
}

function moveFocus(event: KeyboardEvent & { currentTarget: HTMLElement }): void {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const summaries = [...event.currentTarget.querySelectorAll<HTMLElement>(".call > details > summary")];
  const index = summaries.indexOf(event.target as HTMLElement);
  if (by === undefined || index < 0) return;
  event.preventDefault();
  summaries[index + by]?.focus();
}
