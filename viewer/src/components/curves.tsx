import { useMemo, useState } from "preact/hooks";
import { type ChartPlan, type Section, sectionsOf } from "../curves";
import { hiddenRuns, metrics, runs, shownRuns } from "../state";
import { colorOf } from "../theme";
import { go, view } from "../view";
import { CurveChart, PartsChart } from "./charts";
import { Text } from "./text";

/** Curves of all runs, by what stands before the slash in their names. */
export function Curves() {
  const { find } = view.value;
  const ids = shownRuns.value.map((run) => run.id);
  const known = ids.flatMap((id) => metrics.value[id] ?? []);
  const names = [...new Set(known.flatMap((one) => Object.keys(one.columns)))];
  const sections = useMemo(() => sectionsOf(names, ids, find), [names.join(), ids.join(), find]);
  return (
    <>
      <Controls />
      {names.length === 0 && <p>There are no numbers yet.</p>}
      {names.length > 0 && sections.length === 0 && <p>No metric has “{find}” in its name.</p>}
      {sections.map((section) => (
        <Charts key={section.title} section={section} first={section.title === "main" || find !== ""} />
      ))}
    </>
  );
}

function Controls() {
  const { smooth, axis, find, zoom } = view.value;
  const perPoint = Math.max(...Object.values(metrics.value).map((one) => one.steps_per_point ?? 1), 1);
  return (
    <div class="controls" role="group" aria-label="Curves">
      <label>
        Find{" "}
        <input
          type="search"
          value={find}
          placeholder="metric"
          onInput={(e) => go({ find: e.currentTarget.value }, true)}
        />
      </label>
      <label>
        Smoothing{" "}
        <input
          type="range"
          min="0"
          max="0.99"
          step="0.01"
          value={smooth}
          onInput={(e) => go({ smooth: e.currentTarget.value }, true)}
        />
        <output>{smooth}</output>
      </label>
      <label>
        Over{" "}
        <select value={axis} onChange={(e) => go({ axis: e.currentTarget.value, zoom: "" })}>
          <option value="step">steps</option>
          <option value="hours">hours</option>
        </select>
      </label>
      {perPoint > 1 && <span class="muted">a point is {perPoint} steps</span>}
      {zoom && (
        <button type="button" onClick={() => go({ zoom: "" })}>
          Show all steps
        </button>
      )}
      <RunSwitches />
    </div>
  );
}

/** The legend of all charts. */
function RunSwitches() {
  const hidden = hiddenRuns.value;
  if (runs.value.runs.length < 2) return null;
  const turn = (id: string) => {
    const left = hidden.has(id) ? [...hidden].filter((one) => one !== id) : [...hidden, id];
    go({ hidden: left.filter(Boolean).join() });
  };
  return (
    <fieldset class="legend">
      <legend>Runs</legend>
      {runs.value.runs.map((run, index) => (
        <label key={run.id}>
          <input type="checkbox" checked={!hidden.has(run.id)} onChange={() => turn(run.id)} />
          <span class="swatch" style={{ background: colorOf(index) }} />
          <Text value={run.name} />
        </label>
      ))}
    </fieldset>
  );
}

/** A section is drawn once it is open. */
function Charts({ section, first }: { section: Section; first: boolean }) {
  const [chosen, choose] = useState<boolean | null>(null);
  const open = chosen ?? first;
  return (
    <details
      class="section"
      open={open}
      onToggle={(event) => event.currentTarget.open !== open && choose(event.currentTarget.open)}
    >
      <summary>
        <h2>
          <Text value={section.title} />
        </h2>{" "}
        <span class="muted">{section.charts.length}</span>
      </summary>
      {open && (
        <div class="charts">
          {section.charts.map((plan) => (
            <Chart key={`${plan.kind} ${plan.title} ${plan.kind === "parts" ? plan.run : ""}`} plan={plan} />
          ))}
        </div>
      )}
    </details>
  );
}

const Chart = ({ plan }: { plan: ChartPlan }) =>
  plan.kind === "parts" ? <PartsChart plan={plan} /> : <CurveChart plan={plan} />;
