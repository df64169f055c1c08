import { findings, runs } from "../state";
import { SafeText } from "./text";

/** The findings of the diagnosis, by run. */
export function Diagnosis() {
  return (
    <>
      {runs.value.runs.map((run) => {
        const runFindings = findings.value[run.id] ?? [];
        return (
          <section key={run.id} aria-label={`Diagnosis of ${run.name}`}>
            <h2>
              <SafeText value={run.name} />
            </h2>
            {runFindings.length === 0 && <p>No findings.</p>}
            <ul class="findings">
              {runFindings.map((finding, index) => (
                <li key={index} class={`finding ${finding.level === "past" ? "past" : "holds"}`}>
                  <h3>
                    <SafeText value={finding.title} />
                  </h3>
                  <span class="muted">
                    since step {finding.step} · <SafeText value={finding.level} />
                  </span>
                  <p>
                    <SafeText value={finding.text} />
                  </p>
                </li>
              ))}
            </ul>
          </section>
        );
      })}
    </>
  );
}
