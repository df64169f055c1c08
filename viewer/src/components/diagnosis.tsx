import { mentioned } from "../curves";
import type { Finding, Run } from "../data";
import { count } from "../format";
import { findings, metrics, runs } from "../state";
import { DEFAULT_FILTERS, NO_SAMPLE, updateView } from "../view";
import { InlineMarkdown, SafeText } from "./text";

/** A configuration key in a sentence. */
const KEY = /(?<![`\w./=-])(?:trainer|generator|environment|data)\.[\w.]*\w/g;

/** The findings of the diagnosis, by run, with links to their curves and rollouts. */
export function Diagnosis() {
  return (
    <>
      {runs.value.runs.map((run) => {
        const runFindings = findings.value[run.id] ?? [];
        return (
          <section key={run.id} class="diagnosis" aria-label={`Diagnosis of ${run.name}`}>
            <h2>{runs.value.runs.length > 1 ? <SafeText value={run.name} /> : "Findings"}</h2>
            {runFindings.length === 0 && (
              <p class="empty">
                No findings. The rules check rewards, entropy, KL, gradients, truncation and failures.
              </p>
            )}
            <ul class="findings">
              {runFindings.map((finding, index) => (
                <FindingCard key={index} run={run} finding={finding} />
              ))}
            </ul>
          </section>
        );
      })}
    </>
  );
}

function FindingCard({ run, finding }: { run: Run; finding: Finding }) {
  const isPast = finding.level === "past";
  const charts = mentioned(finding.text, Object.keys(metrics.value[run.id]?.columns ?? {}));
  return (
    <li class={`finding ${isPast ? "past" : "holds"}`}>
      <h3>
        <SafeText value={finding.title} />
      </h3>
      <span class="muted">
        {finding.until === null
          ? `since step ${count(finding.step)}`
          : `steps ${count(finding.step)} to ${count(finding.until)}`}{" "}
        · <SafeText value={finding.level} />
      </span>
      <p>
        <InlineMarkdown value={finding.text.replace(KEY, "`$&`")} />
      </p>
      <p class="actions">
        {charts.map((name) => (
          <button key={name} type="button" onClick={() => updateView({ tab: "curves", find: name })}>
            Curve of <SafeText value={name} />
          </button>
        ))}
        {run.has_rollouts && (
          <button type="button" onClick={() => updateView(rolloutsOf(run, finding))}>
            Rollouts of these steps
          </button>
        )}
      </p>
    </li>
  );
}

/** The view of the rollouts of a finding's steps, and of those that show it where a filter finds them. */
const rolloutsOf = (run: Run, { step, until, title }: Finding) => ({
  ...DEFAULT_FILTERS,
  ...NO_SAMPLE,
  tab: "rollouts",
  run: run.id,
  step_from: String(step),
  step_to: until === null ? "" : String(until),
  ...(title === "truncated" && { stop_reason: "length" }),
  ...(title === "episodes fail" && { status: "failed" }),
});
