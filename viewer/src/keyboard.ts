/** What keys do. Letters do nothing while someone types. */
import { helpShown, move } from "./state";
import { go, NO_SAMPLE, view } from "./view";

interface Binding {
  key: string;
  what: string;
  run: () => void;
}

const show = (how: string) => {
  if (view.value.tab === "rollouts" && view.value.sample !== "") go({ how });
};

export const KEYS: Binding[] = [
  { key: "j", what: "next sample", run: () => void onRollouts(() => move(1)) },
  { key: "k", what: "previous sample", run: () => void onRollouts(() => move(-1)) },
  { key: "c", what: "the sample as a conversation", run: () => show("conversation") },
  { key: "t", what: "the sample as tokens", run: () => show("tokens") },
  { key: "g", what: "its group side by side", run: () => show("group") },
  { key: "/", what: "search", run: () => document.querySelector<HTMLInputElement>("input[type=search]")?.focus() },
  { key: "?", what: "these keys", run: () => (helpShown.value = !helpShown.value) },
  { key: "Escape", what: "leave the search, the help, the sample", run: leave },
];

/** What the help says: also of keys that only an element with the focus takes. */
export const HELP: Pick<Binding, "key" | "what">[] = [
  ...KEYS,
  { key: "← →", what: "in the token view, once it is clicked: the token before, the next one" },
];

export function onKeyDown(event: KeyboardEvent): void {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target instanceof HTMLElement && event.target.matches("input, select, textarea");
  if (typing && event.key !== "Escape") return;
  const binding = KEYS.find(({ key }) => key === event.key);
  if (!binding || (helpShown.value && !["?", "Escape"].includes(binding.key))) return;
  event.preventDefault();
  binding.run();
}

function onRollouts(run: () => Promise<void>): void {
  if (view.value.tab === "rollouts") void run();
  else go({ tab: "rollouts" });
}

function leave(): void {
  const focused = document.activeElement;
  if (helpShown.value) helpShown.value = false;
  else if (focused instanceof HTMLElement && focused.matches("input, select")) focused.blur();
  else if (view.value.sample !== "") go(NO_SAMPLE);
}
