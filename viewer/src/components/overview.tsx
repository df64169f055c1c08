import type { ComponentChildren } from "preact";
import type { Details, Run } from "../data";
import { count, date, duration, rough } from "../format";
import { findings, metrics, runs, shownRuns } from "../state";
import { colorOf } from "../theme";
import { updateView } from "../view";
import { PathText, SafeText } from "./text";

/** What the runs train, on what, how long, how well, and whether something is wrong. */
export function Overview() {
  const all = runs.value.runs;
  const [only] = all;
  if (!only) return null;
  return all.length === 1 ? <OneRun run={only} /> : <SeveralRuns />;
}

function OneRun({ run }: { run: Run }) {
  const { details } = run;
  if (!details) return null;
  const facts = factsOf(details);
  return (
    <section class="overview" aria-label="Overview">
      <div class="tiles">
        <Tile label="Status" value={<Status run={run} />} note={progressNote(run)}>
          {run.total_steps !== null && <progress max={run.total_steps} value={run.step} aria-label="steps done" />}
        </Tile>
        {details.kind !== "sft" && <EvaluationTile details={details} />}
        <ResultTile run={run} />
        <Tile label="Duration" value={duration(details.seconds)} note={paceNote(run)} />
      </div>
      <Failure run={run} title="Why it failed" />
      <OpenFindings run={run.id} />
      <dl class="facts-grid">
        {facts.map(([name, value, title]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd title={title}>{value}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

function Tile({
  label,
  value,
  note,
  children,
}: {
  label: string;
  value: ComponentChildren;
  note?: ComponentChildren;
  children?: ComponentChildren;
}) {
  return (
    <div class="tile">
      <span class="tile-label">{label}</span>
      <span class="tile-value">{value}</span>
      {children}
      <span class="tile-note">{note}</span>
    </div>
  );
}

const STATUS_TEXT: Record<string, string> = {
  running: "Running",
  finished: "Finished",
  failed: "Failed",
  unknown: "Unknown",
};

export function Status({ run }: { run: Pick<Run, "state"> }) {
  const state = Object.hasOwn(STATUS_TEXT, run.state) ? run.state : "unknown";
  return <span class={`status ${state}`}>{STATUS_TEXT[state]}</span>;
}

const progressNote = ({ step, total_steps }: Run): string =>
  total_steps === null ? `step ${count(step)}` : `step ${count(step)} of ${count(total_steps)}`;

function EvaluationTile({ details }: { details: Details }) {
  const { best } = details;
  if (!best) return <Tile label="Best evaluation" value="–" note="no evaluation yet" />;
  return (
    <Tile
      label="Best evaluation"
      value={rough(best.score)}
      note={
        <>
          <SafeText value={best.source} /> at step {count(best.step)}
          {best.first !== best.score && ` · first ${rough(best.first)}`}
        </>
      }
    />
  );
}

const lastOf = (values: (number | null)[] | undefined): number | null =>
  values?.findLast((value) => value !== null) ?? null;
const firstOf = (values: (number | null)[] | undefined): number | null =>
  values?.find((value) => value !== null) ?? null;

function ResultTile({ run }: { run: Run }) {
  const [name, label] = run.details?.kind === "sft" ? ["sft/loss", "Loss"] : ["reward/mean", "Mean reward"];
  const column = metrics.value[run.id]?.columns[name];
  const last = lastOf(column);
  if (last === null) return null;
  return <Tile label={label} value={rough(last)} note={`latest step · first ${rough(firstOf(column))}`} />;
}

function paceNote(run: Run): string {
  const seconds = metrics.value[run.id]?.columns["timing/step_s"]?.filter((value) => value !== null) ?? [];
  const pace = seconds.toSorted((a, b) => a - b)[Math.floor(seconds.length / 2)];
  const attempts = run.details?.attempts ?? 0;
  return [
    ...(pace === undefined ? [] : [`${duration(pace)} per step`]),
    ...(attempts > 1 ? [`${attempts} attempts`] : []),
  ].join(" · ");
}

/** The last parts of a path that say what it is: "Qwen/Qwen3-0.6B", "gsm8k/train.parquet". */
export function shortPath(path: string): string {
  const parts = path.split("/").filter(Boolean);
  if (!path.startsWith("/") && parts.length <= 2) return path;
  const generic = /^(policy|model|export|global_step_\d+|train|validation)\b/;
  let from = parts.length - 1;
  while (from > 0 && from > parts.length - 4 && generic.test(parts[from] ?? "")) from--;
  return parts.slice(from).join("/");
}

const paths = (values: string[]): ComponentChildren =>
  values.length ? <PathText value={values.map(shortPath).join(", ")} /> : "–";

export function hardwareOf({ hardware }: Details): string {
  const { device, slots, nodes, accelerators = [] } = hardware;
  if (!slots) return "not recorded";
  const name = accelerators.join(", ") || (device === "gpu" ? "GPU" : "");
  const units =
    device === "gpu" ? `${slots} × ${name}` : `CPU, ${slots} ${slots === 1 ? "process slot" : "process slots"}`;
  return nodes && nodes > 1 ? `${units} on ${nodes} nodes` : units;
}

function algorithmOf({ settings, kind }: Details): string {
  if (kind === "evaluation") return "Evaluation";
  const key = (name: string) => settings[`trainer.${name}`] ?? "";
  const estimator = key("algorithm.advantage_estimator");
  const rank = Number(key("policy.model.lora.rank"));
  const lora = rank > 0 ? `LoRA rank ${rank}` : "";
  if (kind === "sft") return ["Supervised fine-tuning", lora].filter(Boolean).join(" · ");
  const parts = [
    /^(grpo|rloo|gae)$/.test(estimator) ? estimator.toUpperCase() : estimator,
    key("algorithm.policy_loss_type") && `${key("algorithm.policy_loss_type")} loss`,
    key("algorithm.use_kl_loss") === "true" ? `KL ${key("algorithm.kl_loss_coef")}` : "",
    lora,
    key("fully_async.enabled") === "true" ? `async, staleness ${key("fully_async.max_staleness_steps")}` : "",
  ];
  return parts.filter(Boolean).join(" · ") || "–";
}

function batchOf({ settings, kind }: Details): string {
  const prompts = settings["trainer.train_batch_size"];
  if (kind === "sft") return prompts ? `${prompts} examples` : "–";
  const samples = settings["generator.n_samples_per_prompt"];
  return prompts && samples ? `${prompts} prompts × ${samples} samples` : "–";
}

function stepsOf(steps: number[]): string {
  if (!steps.length) return "none";
  const shown = steps.slice(-4).join(", ");
  return steps.length > 4 ? `${steps.length}, latest ${steps.slice(-2).join(", ")}` : shown;
}

type Fact = [name: string, value: ComponentChildren, title: string];

function factsOf(details: Details): Fact[] {
  const { settings, kind } = details;
  const setting = (name: string) => <SafeText value={settings[name] ?? "–"} />;
  const facts: [boolean, ...Fact][] = [
    [true, "Model", <PathText value={shortPath(details.model) || "–"} />, details.model],
    [true, "Algorithm", <SafeText value={algorithmOf(details)} />, ""],
    [kind !== "evaluation", "Learning rate", setting("trainer.policy.optimizer_config.lr"), ""],
    [kind !== "evaluation", "Batch", <SafeText value={batchOf(details)} />, ""],
    [kind !== "evaluation", "Training data", paths(details.train_data), details.train_data.join("\n")],
    [kind !== "sft", "Evaluation data", paths(details.eval_data), details.eval_data.join("\n")],
    [kind !== "sft", "Environment", setting("environment.env_class"), ""],
    [kind !== "sft", "Engine", setting("generator.backend"), ""],
    [true, "Hardware", <SafeText value={hardwareOf(details)} />, ""],
    [true, "Started", date(details.started), ""],
    [kind !== "evaluation", "Checkpoints", stepsOf(details.checkpoints), ""],
    [details.resumes.length > 0, "Resumed after", stepsOf(details.resumes), ""],
  ];
  return facts.flatMap(([isShown, ...fact]) => (isShown ? [fact] : []));
}

/** What ended a failed run. */
function Failure({ run, title }: { run: Run; title: string }) {
  const failure = run.details?.failure;
  if (!failure) return null;
  return (
    <div class="failure" role="note">
      <b>
        <SafeText value={title} />
      </b>
      <p>
        <SafeText value={failure} />
      </p>
    </div>
  );
}

/** The findings that still hold, each as a link to the diagnosis. */
function OpenFindings({ run }: { run: string }) {
  const open = (findings.value[run] ?? []).filter(({ level }) => level !== "past");
  if (!open.length) return null;
  return (
    <ul class="open-findings">
      {open.map((finding, index) => (
        <li key={index}>
          <button type="button" class="chip bad" onClick={() => updateView({ tab: "diagnosis" })}>
            <SafeText value={finding.title} />
          </button>{" "}
          <span class="muted">since step {count(finding.step)}</span>
        </li>
      ))}
    </ul>
  );
}

function SeveralRuns() {
  const shown = new Set(shownRuns.value.map(({ id }) => id));
  return (
    <section class="overview" aria-label="Overview">
      <div class="scroll">
        <table class="runs-overview">
          <thead>
            <tr>
              {[
                "Run",
                "Status",
                "Steps",
                "Best evaluation",
                "Mean reward",
                "Duration",
                "Model",
                "Algorithm",
                "Hardware",
              ].map((name) => (
                <th key={name} scope="col">
                  {name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {runs.value.runs.map((run, index) => (
              <tr key={run.id} class={shown.has(run.id) ? "" : "hidden-run"}>
                <th scope="row">
                  <span class="swatch" style={{ background: colorOf(index) }} />
                  <SafeText value={run.name} />
                </th>
                <td>
                  <Status run={run} />
                </td>
                <td class="number">
                  {count(run.step)}
                  {run.total_steps !== null && ` / ${count(run.total_steps)}`}
                </td>
                <td class="number">
                  {run.details?.best ? `${rough(run.details.best.score)} at ${count(run.details.best.step)}` : "–"}
                </td>
                <td class="number">{rough(lastOf(metrics.value[run.id]?.columns["reward/mean"]))}</td>
                <td class="number">{duration(run.details?.seconds)}</td>
                <td title={run.details?.model}>
                  <SafeText value={shortPath(run.details?.model ?? "") || "–"} />
                </td>
                <td>
                  <SafeText value={run.details ? algorithmOf(run.details) : "–"} />
                </td>
                <td>
                  <SafeText value={run.details ? hardwareOf(run.details) : "–"} />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {runs.value.runs.map((run) => (
        <Failure key={run.id} run={run} title={`Why ${run.name} failed`} />
      ))}
    </section>
  );
}
