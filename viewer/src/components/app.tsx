import type { ComponentChildren } from "preact";
import { time } from "../format";
import { escapeInvisible } from "../invisibleCharacters";
import { findings, lastResponseMs, helpShown, live, problem, runs } from "../state";
import { choose, theme, THEMES, type Theme } from "../theme";
import { updateView, view } from "../view";
import { Curves } from "./curves";
import { Diagnosis } from "./diagnosis";
import { Help } from "./help";
import { Rollouts } from "./rollouts";
import { RunTables } from "./runs";
import { SafeText } from "./text";

const TABS: Record<string, { name: string; render: () => ComponentChildren }> = {
  curves: { name: "Curves", render: () => <Curves /> },
  rollouts: { name: "Rollouts", render: () => <Rollouts /> },
  diagnosis: { name: "Diagnosis", render: () => <Diagnosis /> },
  runs: { name: "Runs", render: () => <RunTables /> },
};

export function App() {
  const title = runs.value.runs.map((run) => run.name).join(" · ") || "skyrl-train";
  const open = Object.hasOwn(TABS, view.value.tab) ? view.value.tab : "curves";
  return (
    <>
      <header>
        <h1 title={escapeInvisible(title)}>
          <SafeText value={title} />
        </h1>
        <nav aria-label="Views">
          {Object.entries(TABS).map(([tab, { name }]) => (
            <button
              key={tab}
              type="button"
              aria-current={tab === open ? "page" : undefined}
              onClick={() => updateView({ tab })}
            >
              {name}
              {tab === "diagnosis" && <NumFindings />}
            </button>
          ))}
        </nav>
        <ConnectionStatus />
        <label class="theme">
          <span class="visually-hidden">Theme</span>
          <select title="Theme" value={theme.value} onChange={(event) => choose(event.currentTarget.value as Theme)}>
            {THEMES.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
        <button
          type="button"
          class="help-button"
          onClick={() => (helpShown.value = true)}
          aria-label="Keys"
          title="Keys (?)"
        >
          ?
        </button>
      </header>
      {problem.value && (
        <p role="alert" class="problem">
          <SafeText value={problem.value} />
        </p>
      )}
      <main>{TABS[open]?.render()}</main>
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

/** The progress of the runs, and the time of the server's last response. */
function ConnectionStatus() {
  const [first, ...others] = runs.value.runs;
  if (!first) return <span class="pulse">loading…</span>;
  const status = others.length
    ? `${others.length + 1} runs`
    : `step ${first.step}${first.total_steps ? ` of ${first.total_steps}` : ""}, ${first.state}`;
  return (
    <span class="pulse">
      <span class={`dot ${others.length ? "" : first.state}`} aria-hidden="true" />
      {status}
      {live && lastResponseMs.value > 0 && <span class="updated"> · updated {time(lastResponseMs.value)}</span>}
    </span>
  );
}
