import { commonStart, type Group, isSame, type Sample, sampledTokens } from "../data";
import { group } from "../state";
import { count, rough } from "../format";
import { contentOf } from "../messages";
import { asView, updateView, openKey, view } from "../view";
import { Conversation, MessageCard } from "./conversation";
import { Reward } from "./list";
import { SafeText } from "./text";

const MIN_COMMON_CHARS = 8;

/** All samples of a prompt: what they have in numbers, and their texts side by side below the prompt. */
export function GroupView() {
  const [loaded, key] = [group.value, openKey(view.value)];
  if (!loaded?.rows.some((row) => key && isSame(row, key))) return <p class="empty">loading…</p>;
  const begins = loaded.samples.map((sample) => commonStart([loaded.prompt, sample.messages]).length);
  const texts = loaded.samples.map((sample, index) => answerOf(sample, begins[index] ?? 0));
  const firstEqual = equalTo(
    loaded.samples.map(({ messages, text }, index) =>
      JSON.stringify(messages.length ? messages.slice(begins[index]) : text),
    ),
  );
  const dimmed = commonPrefix(texts);
  return (
    <>
      <ol class="conversation">
        {loaded.prompt.map((message, index) => (
          <MessageCard key={index} message={message} />
        ))}
      </ol>
      <Comparison loaded={loaded} firstEqual={firstEqual} />
      <div class="group" role="group" aria-label="Samples side by side" tabIndex={0}>
        {loaded.samples.map((sample, index) => (
          <article
            key={sample.sample}
            class={firstEqual[index] === index ? "" : "same"}
            aria-label={`sample ${sample.sample}`}
            aria-current={String(sample.sample) === view.value.sample ? "true" : undefined}
          >
            <h3>
              <button type="button" onClick={() => updateView({ ...asView(sample), how: "conversation" })}>
                Sample {sample.sample}
              </button>{" "}
              <Reward row={sample} />{" "}
              <span class="muted">
                {count(sampledTokens(...sample.turns))} tokens · <SafeText value={sample.stop_reason} />
              </span>
            </h3>
            {firstEqual[index] === index ? (
              <Conversation sample={sample} from={begins[index] ?? 0} dimmed={dimmed} />
            ) : (
              <details>
                <summary class="muted">same text as sample {loaded.samples[firstEqual[index] ?? 0]?.sample}</summary>
                <Conversation sample={sample} from={begins[index] ?? 0} />
              </details>
            )}
          </article>
        ))}
      </div>
    </>
  );
}

/** The rewards, advantages and lengths of the samples as a table. */
function Comparison({ loaded, firstEqual }: { loaded: Group & { samples: Sample[] }; firstEqual: number[] }) {
  const { samples } = loaded;
  const rewards = samples.flatMap(({ status, reward }) => (status === "ok" && reward !== null ? [reward] : []));
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const longest = Math.max(...samples.map((sample) => sampledTokens(...sample.turns)), 1);
  const isEqual = rewards.length > 1 && Math.max(...rewards) === Math.min(...rewards);
  return (
    <div class="scroll comparison">
      <table aria-label="Comparison of the samples">
        <caption>
          {count(samples.length)} samples
          {rewards.length > 0 && ` · mean reward ${rough(mean)}`}
          {isEqual && " · all rewards are equal"}
        </caption>
        <thead>
          <tr>
            {["Sample", "Reward", "Advantage", "Tokens", "Stop reason", "Last line"].map((name) => (
              <th key={name} scope="col">
                {name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {samples.map((sample, index) => {
            const tokens = sampledTokens(...sample.turns);
            const same = firstEqual[index] ?? index;
            return (
              <tr key={sample.sample} class={String(sample.sample) === view.value.sample ? "current" : ""}>
                <th scope="row">{sample.sample}</th>
                <td class="number">
                  <Reward row={sample} />
                </td>
                <td class="number">{rough(meanAdvantage(sample))}</td>
                <td class="number">
                  <span class="bar" style={{ "--share": (tokens / longest).toFixed(3) }}>
                    {count(tokens)}
                  </span>
                </td>
                <td>
                  <SafeText value={sample.stop_reason} />
                </td>
                <td class="last-line">
                  {same < index ? (
                    <span class="muted">same text as sample {samples[same]?.sample}</span>
                  ) : (
                    <SafeText value={lastLine(sample)} />
                  )}
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

/** The mean advantage of the tokens in the loss; null if the sample has none. */
function meanAdvantage({ tokens }: Sample): number | null {
  const values = tokens?.advantages.filter((value, index) => value !== null && tokens.trained[index]) ?? [];
  return values.length ? values.reduce((sum: number, value) => sum + (value ?? 0), 0) / values.length : null;
}

/** For each text, the index of the first one that equals it. */
const equalTo = (texts: string[]): number[] => texts.map((text) => texts.indexOf(text));

const MAX_LINE_CHARS = 200;

/** The last line of the sample's last message of the assistant. */
function lastLine(sample: Sample): string {
  const message = sample.messages.findLast(({ role }) => role === "assistant");
  const text = message ? contentOf(message) : (sample.text ?? "");
  const line = text.trimEnd().split("\n").at(-1) ?? "";
  return line.length > MAX_LINE_CHARS ? `…${line.slice(-MAX_LINE_CHARS)}` : line;
}

/** The text of the first message after the prompt. */
const answerOf = (sample: Sample, from: number): string =>
  sample.messages.length ? contentOf(sample.messages[from] ?? {}) : (sample.text ?? "");

/** Number of characters, up to the end of a word, with which all texts begin; 0 if they are few. */
function commonPrefix([first = "", ...others]: string[]): number {
  if (!others.length || others.every((other) => other === first)) return 0;
  let length = 0;
  while (length < first.length && others.every((other) => other[length] === first[length])) length++;
  while (length > 0 && !/\s/.test(first[length - 1] ?? "")) length--;
  return length >= MIN_COMMON_CHARS ? length : 0;
}
