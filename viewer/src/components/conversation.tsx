import type { Message, Sample, Turn } from "../data";
import { count, short } from "../format";
import { contentOf, otherFields, toolCallsOf, turnsOf } from "../messages";
import { Text, TextBlock } from "./text";

/** The messages in their order, from the `from`-th on; below answers, what is known of their turns. */
export function Conversation({ sample, from = 0 }: { sample: Sample; from?: number }) {
  const turns = turnsOf(sample);
  if (!sample.messages.length) return <TextBlock value={sample.text ?? ""} />;
  return (
    <ol class="conversation">
      {sample.messages.slice(from).map((message, index) => (
        <MessageCard key={index} message={message} turn={sample.turns[turns.get(from + index) ?? -1]} />
      ))}
    </ol>
  );
}

export function MessageCard({ message, turn }: { message: Message; turn?: Turn | undefined }) {
  const role = String(message.role ?? "");
  const known = ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
  return (
    <li class={`message ${known}`}>
      <h3>
        <Text value={role} />
      </h3>
      {otherFields(message).map(([name, value]) => (
        <div key={name} class="field">
          <span class="muted">
            <Text value={name} />
          </span>
          <TextBlock value={value} />
        </div>
      ))}
      <TextBlock value={contentOf(message)} />
      {toolCallsOf(message).map((call, index) => (
        <div key={index} class="tool-call">
          <span class="muted">call of</span>{" "}
          <b>
            <Text value={call.name} />
          </b>
          <TextBlock value={call.arguments} />
        </div>
      ))}
      {turn && <TurnFacts turn={turn} />}
    </li>
  );
}

function TurnFacts({ turn }: { turn: Turn }) {
  const versions =
    turn.min_version === turn.max_version ? `${turn.min_version}` : `${turn.min_version} to ${turn.max_version}`;
  return (
    <p class="turn muted">
      reward {short(turn.reward)} · {count(turn.stop - turn.start)} tokens · <Text value={turn.stop_reason} /> · weights
      of step {versions}
      {turn.running_s ? ` · ${short(turn.running_s)} s` : ""}
    </p>
  );
}
