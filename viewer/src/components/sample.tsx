import type { ComponentChildren } from "preact";
import { type Sample, sampledTokens } from "../data";
import { count, short } from "../format";
import { go, view } from "../view";
import { Conversation } from "./conversation";
import { GroupView } from "./group";
import { Reward } from "./list";
import { Text, TextBlock } from "./text";
import { TokenView } from "./tokens";

const NO_TOKENS = <p>The report has no room for the tokens of this sample: skyrl-train watch shows those of all.</p>;
const WAYS: Record<string, { name: string; show: (sample: Sample) => ComponentChildren }> = {
  conversation: { name: "Conversation", show: (sample) => <Conversation sample={sample} /> },
  tokens: {
    name: "Tokens",
    show: (sample) => (sample.tokens ? <TokenView tokens={sample.tokens} turns={sample.turns} /> : NO_TOKENS),
  },
  group: { name: "Group", show: () => <GroupView /> },
};

export function SampleView({ sample }: { sample: Sample }) {
  const how = Object.hasOwn(WAYS, view.value.how) ? view.value.how : "conversation";
  return (
    <>
      <h2>
        <Reward row={sample} /> step {sample.step} · row <Text value={sample.uid} /> · sample {sample.sample}
      </h2>
      <Facts sample={sample} />
      <nav class="ways" aria-label="Ways to see it">
        {Object.entries(WAYS).map(([name, way]) => (
          <button
            key={name}
            type="button"
            aria-current={name === how ? "true" : undefined}
            onClick={() => go({ how: name })}
          >
            {way.name}
          </button>
        ))}
      </nav>
      {WAYS[how]?.show(sample)}
    </>
  );
}

/** The tokens of a sample: sampled, read between turns (tool results, headers of messages), and those of the prompt. */
function tokensOf({ turns, response_tokens, prompt_tokens }: Sample): string {
  const sampled = sampledTokens(...turns);
  const read = response_tokens - sampled;
  return `${count(sampled)} sampled, ${read ? `${count(read)} between turns, ` : ""}${count(prompt_tokens)} of the prompt`;
}

function Facts({ sample }: { sample: Sample }) {
  const { turns } = sample;
  const versions = turns.flatMap((turn) => [turn.min_version, turn.max_version]);
  const [oldest, newest] = [Math.min(...versions), Math.max(...versions)];
  const facts: [string, ComponentChildren][] = [
    ["source", <Text value={sample.source} />],
    ["stop", <Text value={sample.stop_reason} />],
    ["tokens", tokensOf(sample)],
    ["turns", String(turns.length)],
  ];
  if (versions.length) facts.push(["weights of step", oldest === newest ? String(oldest) : `${oldest} to ${newest}`]);
  if (sample.temperature != null) facts.push(["temperature", short(sample.temperature)]);
  if (sample.raw_reward != null && sample.raw_reward !== sample.reward)
    facts.push(["before penalties", short(sample.raw_reward)]);
  for (const [name, value] of Object.entries(sample.env_metrics))
    facts.push([name, typeof value === "number" ? short(value) : <Text value={JSON.stringify(value)} />]);
  return (
    <>
      <dl class="facts-of-sample">
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>
              <Text value={name} />
            </dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {Object.keys(sample.env_extras ?? {}).length > 0 && (
        <details>
          <summary class="muted">what the environment was given</summary>
          <TextBlock value={JSON.stringify(sample.env_extras, null, 2)} />
        </details>
      )}
      {sample.error && (
        <div class="failure">
          <b>
            <Text value={sample.error} />
          </b>
          <TextBlock value={sample.detail ?? ""} />
        </div>
      )}
    </>
  );
}
