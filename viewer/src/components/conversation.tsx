import { type Message, type Sample, sampledTokens, type Turn } from "../data";
import { count, rough, short } from "../format";
import { answeredBy, contentOf, otherFields, type ToolCall, toolCallsOf, turnsOf } from "../messages";
import { SafeText, TextBlock } from "./text";

/** The messages of a sample from index `from` on, with facts about the turn below each message of the assistant. */
export function Conversation({
  sample,
  from = 0,
  dimmed = 0,
}: {
  sample: Sample;
  from?: number;
  /** Number of characters of the first shown message that are dimmed. */
  dimmed?: number;
}) {
  const turns = turnsOf(sample);
  const answered = answeredBy(sample);
  if (!sample.messages.length) return <TextBlock value={sample.text ?? ""} markdown dimmed={dimmed} />;
  return (
    <ol class="conversation">
      {sample.messages.slice(from).map((message, index) => (
        <MessageCard
          key={index}
          message={message}
          turn={sample.turns[turns.get(from + index) ?? -1]}
          answers={answered.get(from + index)}
          dimmed={index === 0 ? dimmed : 0}
        />
      ))}
    </ol>
  );
}

export function MessageCard({
  message,
  turn,
  answers = [],
  dimmed = 0,
}: {
  message: Message;
  turn?: Turn | undefined;
  /** Names of the calls whose results the message holds. */
  answers?: string[] | undefined;
  dimmed?: number;
}) {
  const role = String(message.role ?? "");
  const known = ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
  return (
    <li class={`message ${known}`}>
      <h3>
        <SafeText value={role} />
      </h3>
      {answers.length > 0 && (
        <p class="answers">
          <span class="muted">answer to</span>{" "}
          <b>
            <SafeText value={answers.join(", ")} />
          </b>
        </p>
      )}
      {otherFields(message).map(([name, value]) => (
        <div key={name} class="field">
          <span class="muted">
            <SafeText value={name} />
          </span>
          <TextBlock value={value} />
        </div>
      ))}
      <TextBlock value={contentOf(message)} markdown={known !== "tool" && known !== "other"} dimmed={dimmed} />
      {toolCallsOf(message, turn).map((call, index) => (
        <ToolCallCard key={index} call={call} />
      ))}
      {turn && <TurnFacts turn={turn} />}
    </li>
  );
}

export function ToolCallCard({ call }: { call: ToolCall }) {
  return (
    <div class="tool-call">
      <span class="muted">call to</span>{" "}
      <b>
        <SafeText value={call.name || "unreadable"} />
      </b>
      {call.error && (
        <span class="call-error">
          {" "}
          <SafeText value={call.error} />
        </span>
      )}
      {call.arguments.map(([name, value]) => (
        <div key={name}>
          <span class="muted">
            <SafeText value={name} />
          </span>
          <TextBlock value={value} />
        </div>
      ))}
    </div>
  );
}

export function TurnFacts({ turn }: { turn: Turn }) {
  const versions =
    turn.min_version === turn.max_version ? `${turn.min_version}` : `${turn.min_version} to ${turn.max_version}`;
  return (
    <p class="turn muted">
      reward {short(turn.reward)} · {count(sampledTokens(turn))} tokens · <SafeText value={turn.stop_reason} /> ·
      weights of step {versions}
      {turn.running_s ? ` · sampled in ${rough(turn.running_s)} s` : ""}
      {turn.environment_s ? ` · environment ${rough(turn.environment_s)} s` : ""}
    </p>
  );
}
