import { commonStart, isSame, sampledTokens } from "../data";
import { group } from "../state";
import { count } from "../format";
import { asView, updateView, openKey, view } from "../view";
import { Conversation, MessageCard } from "./conversation";
import { Reward } from "./list";
import { SafeText } from "./text";

/** All samples of a prompt side by side, below the prompt. */
export function GroupView() {
  const [loaded, key] = [group.value, openKey(view.value)];
  if (!loaded?.rows.some((row) => key && isSame(row, key))) return <p class="muted">loading…</p>;
  return (
    <>
      <ol class="conversation">
        {loaded.prompt.map((message, index) => (
          <MessageCard key={index} message={message} />
        ))}
      </ol>
      <div class="group" role="group" aria-label="Samples side by side" tabIndex={0}>
        {loaded.samples.map((sample) => (
          <article
            key={sample.sample}
            aria-label={`sample ${sample.sample}`}
            aria-current={String(sample.sample) === view.value.sample ? "true" : undefined}
          >
            <h3>
              <button type="button" onClick={() => updateView({ ...asView(sample), how: "conversation" })}>
                sample {sample.sample}
              </button>{" "}
              <Reward row={sample} />{" "}
              <span class="muted">
                {count(sampledTokens(...sample.turns))} tokens · <SafeText value={sample.stop_reason} />
              </span>
            </h3>
            <Conversation sample={sample} from={commonStart([loaded.prompt, sample.messages]).length} />
          </article>
        ))}
      </div>
    </>
  );
}
