import { findings, runs } from "../state";
import { Text } from "./text";

/** What the rules found, by run. */
export function Diagnosis() {
  return (
    <>
      {runs.value.runs.map((run) => {
        const found = findings.value[run.id] ?? [];
        return (
          <section key={run.id} aria-label={`Diagnosis of ${run.name}`}>
            <h2>
              <Text value={run.name} />
            </h2>
            {found.length === 0 && <p>Nothing was found.</p>}
            <ul class="findings">
              {found.map((finding, index) => (
                <li key={index} class={`finding ${finding.level === "past" ? "past" : "holds"}`}>
                  <h3>
                    <Text value={finding.title} />
                  </h3>
                  <span class="muted">
                    since step {finding.step} · <Text value={finding.level} />
                  </span>
                  <p>
                    <Text value={finding.text} />
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
