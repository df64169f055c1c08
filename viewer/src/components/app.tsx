import type { ComponentChildren } from "preact";
import { time } from "../format";
import { findings, heard, helpShown, live, problem, runs } from "../state";
import { choose, theme, THEMES, type Theme } from "../theme";
import { go, view } from "../view";
import { Curves } from "./curves";
import { Diagnosis } from "./diagnosis";
import { Help } from "./help";
import { Rollouts } from "./rollouts";
import { RunTables } from "./runs";
import { Text } from "./text";

const TABS: Record<string, { name: string; show: () => ComponentChildren }> = {
  curves: { name: "Curves", show: () => <Curves /> },
  rollouts: { name: "Rollouts", show: () => <Rollouts /> },
  diagnosis: { name: "Diagnosis", show: () => <Diagnosis /> },
  runs: { name: "Runs", show: () => <RunTables /> },
};

export function App() {
  const open = Object.hasOwn(TABS, view.value.tab) ? view.value.tab : "curves";
  return (
    <>
      <header>
        <h1>
          <Text value={runs.value.runs.map((run) => run.name).join(" · ") || "skyrl-train"} />
        </h1>
        <nav aria-label="Views">
          {Object.entries(TABS).map(([tab, { name }]) => (
            <button
              key={tab}
              type="button"
              aria-current={tab === open ? "page" : undefined}
              onClick={() => go({ tab })}
            >
              {name}
              {tab === "diagnosis" && <NumFindings />}
            </button>
          ))}
        </nav>
        <Pulse />
        <label>
          Theme{" "}
          <select value={theme.value} onChange={(event) => choose(event.currentTarget.value as Theme)}>
            {THEMES.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
        <button type="button" onClick={() => (helpShown.value = true)} aria-label="Keys" title="Keys (?)">
          ?
        </button>
      </header>
      {problem.value && (
        <p role="alert" class="problem">
          <Text value={problem.value} />
        </p>
      )}
      <main>{TABS[open]?.show()}</main>
      <Help />
    </>
  );
}

function NumFindings() {
  const number = Object.values(findings.value)
    .flat()
    .filter((finding) => finding.level !== "past").length;
  return number ? (
    <>
      {" "}
      <span class="badge">{number}</span>
    </>
  ) : null;
}

/** How far the runs are, and whether the server still answers. */
function Pulse() {
  const [first, ...others] = runs.value.runs;
  if (!first) return <span class="pulse">reading…</span>;
  const said = others.length
    ? `${others.length + 1} runs`
    : `step ${first.step}${first.total_steps ? ` of ${first.total_steps}` : ""}, ${first.state}`;
  return (
    <span class="pulse">
      {said}
      {live && heard.value > 0 && ` · ${time(heard.value)}`}
    </span>
  );
}
