import { sample, viewedRun } from "../state";
import { view } from "../view";
import { Filters } from "./filters";
import { List } from "./list";
import { SampleView } from "./sample";

/** The list of samples, and the one that is open. */
export function Rollouts() {
  const run = viewedRun.value;
  if (run && !run.has_rollouts)
    return <p>This run kept no rollouts. trainer.keep_rollouts=sample keeps some of every step, all keeps all.</p>;
  return (
    <div class="rollouts">
      <section class="browse" aria-label="Samples">
        <Filters />
        <List />
      </section>
      <section class="sample" aria-label="Sample">
        {view.value.sample === "" && <p class="muted">Choose a sample, or press j.</p>}
        {view.value.sample !== "" && sample.value && <SampleView sample={sample.value} />}
      </section>
    </div>
  );
}
