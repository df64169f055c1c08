import { useEffect, useState } from "preact/hooks";
import type { Query } from "../data";
import { rows, runs, viewedRun } from "../state";
import { DEFAULT_FILTERS, updateView, NO_SAMPLE, view } from "../view";
import { escapeInvisible } from "../invisibleCharacters";

const ORDERS = {
  "-step": "newest first",
  step: "oldest first",
  "-reward": "highest reward",
  reward: "lowest reward",
  "-tokens": "longest",
  tokens: "shortest",
};
const DEBOUNCE_MS = 250;

/** Change a filter and go to the first page of the list. */
const filter = (change: Partial<Query>) => updateView({ ...change, offset: "" }, true);

export function Filters() {
  const facets = rows.value?.facets;
  const all = runs.value.runs;
  const changed = Object.entries(DEFAULT_FILTERS).some(
    ([name, value]) => name !== "offset" && view.value[name as keyof Query] !== value,
  );
  const number = Object.entries(DEFAULT_FILTERS).filter(
    ([name, value]) => !["offset", "text", "order"].includes(name) && view.value[name as keyof Query] !== value,
  ).length;
  const [open, setOpen] = useState(false);
  return (
    <form class={open ? "filters open" : "filters"} aria-label="Filters" onSubmit={(event) => event.preventDefault()}>
      <label class="text">
        <span>text</span>
        <DebouncedInput name="text" type="search" />
      </label>
      <button type="button" class="clear" disabled={!changed} onClick={() => filter(DEFAULT_FILTERS)}>
        Clear
      </button>
      <button type="button" class="more-filters" aria-expanded={open} onClick={() => setOpen(!open)}>
        Filters{number > 0 && <span class="badge neutral">{number}</span>}
      </button>
      {all.length > 1 && (
        <label class="wide">
          <span>run</span>
          <select
            value={viewedRun.value?.id}
            onChange={(e) => updateView({ run: e.currentTarget.value, ...NO_SAMPLE, offset: "" })}
          >
            {all.map((run) => (
              <option key={run.id} value={run.id}>
                {escapeInvisible(run.name)}
              </option>
            ))}
          </select>
        </label>
      )}
      <Range label="step" from="step_from" to="step_to" />
      <Range label="reward" from="reward_min" to="reward_max" />
      <Range label="tokens" from="tokens_min" to="tokens_max" />
      <Choice label="source" name="source" choices={facets?.sources} wide />
      <Choice label="status" name="status" choices={facets?.statuses} />
      <Choice label="stop reason" name="stop_reason" choices={facets?.stop_reasons} />
      <label>
        <span>order</span>
        <select value={view.value.order} onChange={(event) => filter({ order: event.currentTarget.value })}>
          {Object.entries(ORDERS).map(([order, label]) => (
            <option key={order} value={order}>
              {label}
            </option>
          ))}
        </select>
      </label>
    </form>
  );
}

function Range({ label, from, to }: { label: string; from: keyof Query; to: keyof Query }) {
  return (
    <span class="range" role="group" aria-label={label}>
      <span>{label}</span>
      <span class="ends">
        <DebouncedInput name={from} type="number" label={`${label} from`} placeholder="min" />
        <span aria-hidden="true">–</span>
        <DebouncedInput name={to} type="number" label={`${label} to`} placeholder="max" />
      </span>
    </span>
  );
}

/** An input that applies its filter once the user stops typing. */
function DebouncedInput({
  name,
  type,
  label,
  placeholder,
}: {
  name: keyof Query;
  type: "search" | "number";
  label?: string;
  placeholder?: string;
}) {
  const applied = view.value[name];
  const [typed, setTyped] = useState(applied);
  useEffect(() => setTyped(applied), [applied]);
  useEffect(() => {
    if (typed === view.peek()[name]) return;
    const timer = setTimeout(() => filter({ [name]: typed }), DEBOUNCE_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  const field = {
    value: typed,
    "aria-label": label,
    placeholder: placeholder ?? "words in the conversation",
    onInput: (event: { currentTarget: HTMLInputElement }) => setTyped(event.currentTarget.value),
  };
  return type === "search" ? <input type="search" {...field} /> : <input type="number" step="any" {...field} />;
}

function Choice({
  label,
  name,
  choices = [],
  wide = false,
}: {
  label: string;
  name: keyof Query;
  choices?: string[] | undefined;
  wide?: boolean;
}) {
  const chosen = view.value[name];
  const options = chosen === "" || choices.includes(chosen) ? choices : [...choices, chosen];
  return (
    <label class={wide ? "half" : undefined}>
      <span>{label}</span>
      <select value={chosen} onChange={(event) => filter({ [name]: event.currentTarget.value })}>
        <option value="">all</option>
        {options.map((choice) => (
          <option key={choice} value={choice}>
            {escapeInvisible(choice)}
          </option>
        ))}
      </select>
    </label>
  );
}
