import { commonStart, isSame, sampledTokens } from "../data";
import { group } from "../state";
import { count } from "../format";
import { asView, go, openKey, view } from "../view";
import { Conversation, MessageCard } from "./conversation";
import { Reward } from "./list";
import { Text } from "./text";

/** All samples of a prompt side by side, the prompt once above them. */
export function GroupView() {
  const [found, key] = [group.value, openKey(view.value)];
  if (!found?.rows.some((row) => key && isSame(row, key))) return <p class="muted">reading…</p>;
  return (
    <>
      <ol class="conversation">
        {found.prompt.map((message, index) => (
          <MessageCard key={index} message={message} />
        ))}
      </ol>
      <div class="group" role="group" aria-label="Samples side by side" tabIndex={0}>
        {found.samples.map((sample) => (
          <article
            key={sample.sample}
            aria-label={`sample ${sample.sample}`}
            aria-current={String(sample.sample) === view.value.sample ? "true" : undefined}
          >
            <h3>
              <button type="button" onClick={() => go({ ...asView(sample), how: "conversation" })}>
                sample {sample.sample}
              </button>{" "}
              <Reward row={sample} />{" "}
              <span class="muted">
                {count(sampledTokens(...sample.turns))} tokens · <Text value={sample.stop_reason} />
              </span>
            </h3>
            <Conversation sample={sample} from={commonStart([found.prompt, sample.messages]).length} />
          </article>
        ))}
      </div>
    </>
  );
}
