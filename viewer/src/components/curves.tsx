import { useMemo, useState } from "preact/hooks";
import { type ChartPlan, type Section, sectionsOf } from "../curves";
import { hiddenRuns, metrics, runs, shownRuns } from "../state";
import { colorOf } from "../theme";
import { updateView, view } from "../view";
import { CurveChart, PartsChart } from "./charts";
import { SafeText } from "./text";

/** The curves of all runs, in sections by metric prefix. */
export function Curves() {
  const { find } = view.value;
  const ids = shownRuns.value.map((run) => run.id);
  const tables = ids.flatMap((id) => metrics.value[id] ?? []);
  const names = [...new Set(tables.flatMap(({ columns }) => Object.keys(columns)))];
  const sections = useMemo(() => sectionsOf(names, ids, find), [names.join(), ids.join(), find]);
  return (
    <>
      <Controls />
      {names.length === 0 && <p>There are no metrics yet.</p>}
      {names.length > 0 && sections.length === 0 && <p>No metric has “{find}” in its name.</p>}
      {sections.map((section) => (
        <Charts key={section.title} section={section} openByDefault={section.title === "main" || find !== ""} />
      ))}
    </>
  );
}

function Controls() {
  const { smooth, axis, find, zoom } = view.value;
  const perPoint = Math.max(...Object.values(metrics.value).map(({ steps_per_point = 1 }) => steps_per_point), 1);
  return (
    <div class="controls" role="group" aria-label="Curves">
      <label>
        Find{" "}
        <input
          type="search"
          value={find}
          placeholder="metric"
          onInput={(e) => updateView({ find: e.currentTarget.value }, true)}
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
          onInput={(e) => updateView({ smooth: e.currentTarget.value }, true)}
        />
        <output>{smooth}</output>
      </label>
      <label>
        Over{" "}
        <select value={axis} onChange={(e) => updateView({ axis: e.currentTarget.value, zoom: "" })}>
          <option value="step">steps</option>
          <option value="hours">hours</option>
        </select>
      </label>
      {perPoint > 1 && <span class="muted">one point per {perPoint} steps</span>}
      {zoom && (
        <button type="button" onClick={() => updateView({ zoom: "" })}>
          Show all steps
        </button>
      )}
      <RunLegend />
    </div>
  );
}

/** The legend of all charts, with a checkbox per run. */
function RunLegend() {
  const hidden = hiddenRuns.value;
  if (runs.value.runs.length < 2) return null;
  const toggle = (id: string) => {
    const ids = hidden.has(id) ? [...hidden].filter((other) => other !== id) : [...hidden, id];
    updateView({ hidden: ids.filter(Boolean).join() });
  };
  return (
    <fieldset class="legend">
      <legend>Runs</legend>
      {runs.value.runs.map((run, index) => (
        <label key={run.id}>
          <input type="checkbox" checked={!hidden.has(run.id)} onChange={() => toggle(run.id)} />
          <span class="swatch" style={{ background: colorOf(index) }} />
          <SafeText value={run.name} />
        </label>
      ))}
    </fieldset>
  );
}

/** A section of charts, which are only drawn while it is open. */
function Charts({ section, openByDefault }: { section: Section; openByDefault: boolean }) {
  const [chosen, choose] = useState<boolean | null>(null);
  const open = chosen ?? openByDefault;
  return (
    <details
      class="section"
      open={open}
      onToggle={(event) => event.currentTarget.open !== open && choose(event.currentTarget.open)}
    >
      <summary>
        <h2>
          <SafeText value={section.title} />
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
