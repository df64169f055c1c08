import { isSame } from "../data";
import { sample, viewedRun } from "../state";
import { openKey, view } from "../view";
import { Filters } from "./filters";
import { List } from "./list";
import { SampleView } from "./sample";

/** The list of samples, and the open sample. */
export function Rollouts() {
  const [run, key] = [viewedRun.value, openKey(view.value)];
  if (run && !run.has_rollouts)
    return (
      <p>
        This run saved no rollouts. trainer.keep_rollouts=sample saves some rollouts of every step,
        trainer.keep_rollouts=all saves all of them.
      </p>
    );
  return (
    <div class="rollouts">
      <section class="browse" aria-label="Samples">
        <Filters />
        <List />
      </section>
      <section class="sample" aria-label="Sample">
        {!key && <p class="muted">Choose a sample, or press j.</p>}
        {key && sample.value && isSame(sample.value, key) && <SampleView sample={sample.value} />}
      </section>
    </div>
  );
}
