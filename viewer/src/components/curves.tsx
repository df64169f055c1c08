import { useMemo, useState } from "preact/hooks";
import { type ChartPlan, constantMetrics, type Section, sectionsOf } from "../curves";
import { short } from "../format";
import { findings, hiddenRuns, metrics, runs, shownRuns } from "../state";
import { colorOf } from "../theme";
import { updateView, view } from "../view";
import { CurveChart, PartsChart } from "./charts";
import { Overview } from "./overview";
import { SafeText } from "./text";

/** The curves of all runs, in sections by metric prefix. */
export function Curves() {
  const { find } = view.value;
  const ids = shownRuns.value.map((run) => run.id);
  const tables = ids.flatMap((id) => metrics.value[id] ?? []);
  const names = [...new Set(tables.flatMap(({ columns }) => Object.keys(columns)))];
  const constant = useMemo(() => constantMetrics(tables), [metrics.value, ids.join()]);
  const sections = useMemo(() => sectionsOf(names, ids, find, constant), [names.join(), ids.join(), find, constant]);
  return (
    <>
      <Overview />
      <Controls />
      {names.length === 0 && (
        <p class="empty">There are no metrics yet. They appear when the first step or evaluation is done.</p>
      )}
      {names.length > 0 && sections.length === 0 && <p class="empty">No metric has “{find}” in its name.</p>}
      <div class="sections">
        {sections.map((section) =>
          section.constant ? (
            <Constants key="constant" section={section} />
          ) : (
            <Charts key={section.title} section={section} openByDefault={section.title === "main" || find !== ""} />
          ),
        )}
      </div>
    </>
  );
}

function Controls() {
  const { smooth, axis, find, zoom } = view.value;
  const perPoint = Math.max(...Object.values(metrics.value).map(({ steps_per_point = 1 }) => steps_per_point), 1);
  return (
    <div class="controls" role="group" aria-label="Curves">
      <label class="grow">
        Find
        <input
          type="search"
          value={find}
          placeholder="a metric's name"
          onInput={(e) => updateView({ find: e.currentTarget.value }, true)}
        />
      </label>
      <label>
        Smoothing
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
        Over
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
      <MarkerLegend />
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

/** What the signs in the charts stand for, as far as there are any. */
function MarkerLegend() {
  const shown = shownRuns.value;
  const has = (steps: "checkpoints" | "resumes") =>
    shown.some(({ details }) => (details?.[steps] ?? []).some((n) => n));
  const hasFindings = shown.some(({ id }) => findings.value[id]?.length);
  if (!has("checkpoints") && !has("resumes") && !hasFindings) return null;
  return (
    <span class="marker-legend">
      {has("checkpoints") && (
        <span>
          <i class="sign checkpoint" /> checkpoint
        </span>
      )}
      {has("resumes") && (
        <span>
          <i class="sign resume" /> resumed
        </span>
      )}
      {hasFindings && (
        <span>
          <i class="sign finding-sign" /> finding
        </span>
      )}
    </span>
  );
}

/** The metrics that never change, as a table. */
function Constants({ section }: { section: Section }) {
  const tables = shownRuns.value.flatMap(({ id }) => metrics.value[id] ?? []);
  const rowOf = (name: string) => {
    const values = tables.flatMap(({ columns }) => (Object.hasOwn(columns, name) ? (columns[name] ?? []) : []));
    const value = values.find((item) => item !== null);
    const described = tables.find((table) => Object.hasOwn(table.described, name))?.described[name] ?? "";
    return { value: value == null || Math.abs(value) < 1e-6 ? 0 : value, described };
  };
  return (
    <details class="section">
      <summary>
        <h2>constant</h2> <span class="muted">{section.charts.length} that did not change</span>
      </summary>
      <div class="scroll">
        <table class="constants">
          <thead>
            <tr>
              <th scope="col">Metric</th>
              <th scope="col">Value</th>
              <th scope="col">Meaning</th>
            </tr>
          </thead>
          <tbody>
            {section.charts.map(({ title }) => {
              const { value, described } = rowOf(title);
              return (
                <tr key={title}>
                  <th scope="row">
                    <SafeText value={title} />
                  </th>
                  <td class="number">{short(value)}</td>
                  <td class="muted">
                    <SafeText value={described} />
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </details>
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
