import type { ComponentChildren } from "preact";
import { type Sample, sampledTokens } from "../data";
import { count, short } from "../format";
import { toggleMarkdown } from "../keyboard";
import { asView, updateView, view } from "../view";
import { Conversation } from "./conversation";
import { GroupView } from "./group";
import { Reward } from "./list";
import { SessionView } from "./session";
import { SafeText, TextBlock } from "./text";
import { TokenView } from "./tokens";

const NO_TOKENS = (
  <p class="empty">
    The report omits the tokens of this sample to limit its size. skyrl-train watch shows the tokens of all.
  </p>
);
interface SampleViewOption {
  name: string;
  render: (sample: Sample) => ComponentChildren;
}
const SAMPLE_VIEWS: Record<string, SampleViewOption> = {
  conversation: { name: "Conversation", render: (sample) => <Conversation sample={sample} /> },
  session: {
    name: "Session",
    render: (sample) =>
      sample.session && <SessionView key={JSON.stringify(asView(sample))} sample={sample} session={sample.session} />,
  },
  tokens: {
    name: "Tokens",
    render: (sample) => (sample.tokens ? <TokenView sample={sample} tokens={sample.tokens} /> : NO_TOKENS),
  },
  group: { name: "Group", render: () => <GroupView /> },
};

export function SampleView({ sample }: { sample: Sample }) {
  const views = Object.entries(SAMPLE_VIEWS).filter(([name]) => name !== "session" || sample.session);
  const how = views.some(([name]) => name === view.value.how) ? view.value.how : "conversation";
  return (
    <>
      <h2 class="sample-title">
        <Reward row={sample} /> step {sample.step} · row <SafeText value={sample.uid} /> · sample {sample.sample}
      </h2>
      <Facts sample={sample} />
      <div class="toolbar">
        <nav class="segmented" aria-label="Views of the sample">
          {views.map(([name, sampleView]) => (
            <button
              key={name}
              type="button"
              aria-current={name === how ? "true" : undefined}
              onClick={() => updateView({ how: name })}
            >
              {sampleView.name}
            </button>
          ))}
        </nav>
        {how !== "tokens" && (
          <label class="toggle" title="Key m">
            <input type="checkbox" checked={view.value.markdown !== "off"} onChange={toggleMarkdown} />
            Markdown
          </label>
        )}
      </div>
      {SAMPLE_VIEWS[how]?.render(sample)}
    </>
  );
}

/** The numbers of sampled tokens, of tokens between turns (tool results, message headers) and of prompt tokens. */
function tokensOf({ turns, response_tokens, prompt_tokens }: Sample): string {
  const sampled = sampledTokens(...turns);
  const between = response_tokens - sampled;
  const parts = [
    `${count(sampled)} sampled`,
    ...(between ? [`${count(between)} between turns`] : []),
    `${count(prompt_tokens)} in the prompt`,
  ];
  return parts.join(", ");
}

function Facts({ sample }: { sample: Sample }) {
  const { turns } = sample;
  const versions = turns.flatMap((turn) => [turn.min_version, turn.max_version]);
  const [oldest, newest] = [Math.min(...versions), Math.max(...versions)];
  const facts: [string, ComponentChildren][] = [
    ["source", <SafeText value={sample.source} />],
    ["stop reason", <SafeText value={sample.stop_reason} />],
    ["tokens", tokensOf(sample)],
    ["turns", String(turns.length)],
  ];
  if (versions.length) facts.push(["weights of step", oldest === newest ? String(oldest) : `${oldest} to ${newest}`]);
  if (sample.temperature != null) facts.push(["temperature", short(sample.temperature)]);
  if (sample.raw_reward != null && sample.raw_reward !== sample.reward)
    facts.push(["reward before penalties", short(sample.raw_reward)]);
  for (const [name, value] of Object.entries(sample.env_metrics))
    facts.push([name, typeof value === "number" ? short(value) : <SafeText value={JSON.stringify(value)} />]);
  return (
    <>
      <dl class="facts-of-sample">
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>
              <SafeText value={name} />
            </dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {Object.keys(sample.env_extras ?? {}).length > 0 && (
        <details>
          <summary class="muted">inputs of the environment</summary>
          <TextBlock value={JSON.stringify(sample.env_extras, null, 2)} />
        </details>
      )}
      {sample.error && (
        <div class="failure">
          <b>
            <SafeText value={sample.error} />
          </b>
          <TextBlock value={sample.detail ?? ""} />
        </div>
      )}
    </>
  );
}
