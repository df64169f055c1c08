import { useEffect, useState } from "preact/hooks";
import type { Query } from "../data";
import { rows, runs, viewedRun } from "../state";
import { FIRST_FILTERS, go, NO_SAMPLE, view } from "../view";
import { plain } from "../visible";

const ORDERS = {
  "-step": "newest first",
  step: "oldest first",
  "-reward": "highest reward",
  reward: "lowest reward",
  "-tokens": "longest",
  tokens: "shortest",
};
const PAUSE_MS = 250;

/** Every filter asks again from the list's first page on. */
const filter = (change: Partial<Query>) => go({ ...change, offset: "" }, true);

export function Filters() {
  const facets = rows.value?.facets;
  const all = runs.value.runs;
  const changed = Object.entries(FIRST_FILTERS).some(
    ([name, value]) => name !== "offset" && view.value[name as keyof Query] !== value,
  );
  return (
    <form class="filters" aria-label="Filters" onSubmit={(event) => event.preventDefault()}>
      {all.length > 1 && (
        <label>
          run
          <select
            value={viewedRun.value?.id}
            onChange={(e) => go({ run: e.currentTarget.value, ...NO_SAMPLE, offset: "" })}
          >
            {all.map((run) => (
              <option key={run.id} value={run.id}>
                {plain(run.name)}
              </option>
            ))}
          </select>
        </label>
      )}
      <label class="wide">
        text
        <Typed name="text" type="search" />
      </label>
      <Range what="step" from="step_from" to="step_to" />
      <Range what="reward" from="reward_min" to="reward_max" />
      <Range what="tokens" from="tokens_min" to="tokens_max" />
      <Choice what="source" name="source" choices={facets?.sources} />
      <Choice what="status" name="status" choices={facets?.statuses} />
      <Choice what="stop" name="stop_reason" choices={facets?.stop_reasons} />
      <label>
        order
        <select value={view.value.order} onChange={(event) => filter({ order: event.currentTarget.value })}>
          {Object.entries(ORDERS).map(([order, said]) => (
            <option key={order} value={order}>
              {said}
            </option>
          ))}
        </select>
      </label>
      <button type="button" disabled={!changed} onClick={() => filter(FIRST_FILTERS)}>
        Clear
      </button>
    </form>
  );
}

function Range({ what, from, to }: { what: string; from: keyof Query; to: keyof Query }) {
  return (
    <span class="range" role="group" aria-label={what}>
      {what}
      <Typed name={from} type="number" label={`${what} from`} />
      –
      <Typed name={to} type="number" label={`${what} to`} />
    </span>
  );
}

/** Asks once someone has stopped typing. */
function Typed({ name, type, label }: { name: keyof Query; type: "search" | "number"; label?: string }) {
  const asked = view.value[name];
  const [typed, setTyped] = useState(asked);
  useEffect(() => setTyped(asked), [asked]);
  useEffect(() => {
    if (typed === view.peek()[name]) return;
    const wait = setTimeout(() => filter({ [name]: typed }), PAUSE_MS);
    return () => clearTimeout(wait);
  }, [typed]);
  const field = {
    value: typed,
    "aria-label": label,
    onInput: (event: { currentTarget: HTMLInputElement }) => setTyped(event.currentTarget.value),
  };
  return type === "search" ? <input type="search" {...field} /> : <input type="number" step="any" {...field} />;
}

function Choice({ what, name, choices = [] }: { what: string; name: keyof Query; choices?: string[] | undefined }) {
  const chosen = view.value[name];
  const offered = chosen === "" || choices.includes(chosen) ? choices : [...choices, chosen];
  return (
    <label>
      {what}
      <select value={chosen} onChange={(event) => filter({ [name]: event.currentTarget.value })}>
        <option value="">all</option>
        {offered.map((choice) => (
          <option key={choice} value={choice}>
            {plain(choice)}
          </option>
        ))}
      </select>
    </label>
  );
}
