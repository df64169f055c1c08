import { isSame } from "../data";
import { sample, viewedRun } from "../state";
import { openKey, view } from "../view";
import { Filters } from "./filters";
import { List } from "./list";
import { SampleView } from "./sample";

/** The list of samples, and the one that is open. */
export function Rollouts() {
  const [run, key] = [viewedRun.value, openKey(view.value)];
  if (run && !run.has_rollouts)
    return <p>This run kept no rollouts. trainer.keep_rollouts=sample keeps some of every step, all keeps all.</p>;
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
