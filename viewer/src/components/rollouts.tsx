import { isSame } from "../data";
import { sample, viewedRun } from "../state";
import { NO_SAMPLE, openKey, updateView, view } from "../view";
import { Filters } from "./filters";
import { List } from "./list";
import { SampleView } from "./sample";

/** The list of samples, and the open sample. */
export function Rollouts() {
  const [run, key] = [viewedRun.value, openKey(view.value)];
  if (run && !run.has_rollouts)
    return (
      <p class="empty">
        This run saved no rollouts. trainer.keep_rollouts=sample saves some rollouts of every step,
        trainer.keep_rollouts=all saves all of them.
      </p>
    );
  return (
    <div class={key ? "rollouts opened" : "rollouts"}>
      <section class="browse" aria-label="Samples">
        <Filters />
        <List />
      </section>
      <section class="sample" aria-label="Sample">
        {!key && (
          <div class="empty choose">
            <p>Choose a sample, or press j.</p>
            <p>
              <kbd>j</kbd> <kbd>k</kbd> next and previous · <kbd>c</kbd> conversation · <kbd>t</kbd> tokens ·{" "}
              <kbd>g</kbd> all samples of the prompt
            </p>
          </div>
        )}
        {key && (
          <button type="button" class="back" onClick={() => updateView(NO_SAMPLE)}>
            ‹ All samples
          </button>
        )}
        {key && sample.value && isSame(sample.value, key) && <SampleView sample={sample.value} />}
      </section>
    </div>
  );
}
