/** Keyboard shortcuts. They are off while the user types in a field. */
import { helpShown, moveSelection } from "./state";
import { updateView, NO_SAMPLE, view } from "./view";

interface Binding {
  key: string;
  what: string;
  run: () => void;
}

const show = (how: string) => {
  if (view.value.tab === "rollouts" && view.value.sample !== "") updateView({ how });
};

export const KEYS: Binding[] = [
  { key: "j", what: "next sample", run: () => void onRollouts(() => moveSelection(1)) },
  { key: "k", what: "previous sample", run: () => void onRollouts(() => moveSelection(-1)) },
  { key: "c", what: "show the sample as a conversation", run: () => show("conversation") },
  { key: "s", what: "show the calls of the sample's session", run: () => show("session") },
  { key: "t", what: "show the sample as tokens", run: () => show("tokens") },
  { key: "g", what: "show the samples of its group side by side", run: () => show("group") },
  { key: "m", what: "render Markdown, or show texts as they are", run: toggleMarkdown },
  { key: "/", what: "search", run: () => document.querySelector<HTMLInputElement>("input[type=search]")?.focus() },
  { key: "?", what: "show or hide this help", run: () => (helpShown.value = !helpShown.value) },
  { key: "Escape", what: "leave the search, close the help or the sample", run: leave },
];

/** Shortcuts in the help, including those that only a focused element handles. */
export const HELP: Pick<Binding, "key" | "what">[] = [
  ...KEYS,
  { key: "← →", what: "previous or next token, after a click in the token view" },
  { key: "↑ ↓", what: "previous or next call, in the view of a session" },
];

/** Fields whose keys are text or choices. Others, such as checkboxes, leave shortcuts on. */
const TEXT_FIELDS = "input:not([type=checkbox], [type=radio], [type=range]), select, textarea";

export function onKeyDown(event: KeyboardEvent): void {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target instanceof HTMLElement && event.target.matches(TEXT_FIELDS);
  if (typing && event.key !== "Escape") return;
  const binding = KEYS.find(({ key }) => key === event.key);
  if (!binding || (helpShown.value && !["?", "Escape"].includes(binding.key))) return;
  event.preventDefault();
  binding.run();
}

function onRollouts(run: () => Promise<void>): void {
  if (view.value.tab === "rollouts") void run();
  else updateView({ tab: "rollouts" });
}

export function toggleMarkdown(): void {
  updateView({ markdown: view.value.markdown === "off" ? "on" : "off" }, true);
}

function leave(): void {
  const focused = document.activeElement;
  if (helpShown.value) helpShown.value = false;
  else if (focused instanceof HTMLElement && focused.matches("input, select")) focused.blur();
  else if (view.value.sample !== "") updateView(NO_SAMPLE);
}
