/** Light or dark: as the system says, until someone chooses. */
import { computed, effect, signal } from "@preact/signals";

export const THEMES = ["system", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

const KEPT_AS = "skyrl-train-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const systemDark = signal(system.matches);
system.addEventListener("change", () => (systemDark.value = system.matches));

export const theme = signal<Theme>(kept());
export const dark = computed(() => (theme.value === "system" ? systemDark.value : theme.value === "dark"));

effect(() => {
  document.documentElement.dataset.theme = dark.value ? "dark" : "light";
});

export function choose(chosen: Theme): void {
  try {
    localStorage.setItem(KEPT_AS, chosen);
  } catch {
    // a browser that keeps nothing of files: it holds until the page is closed
  }
  theme.value = chosen;
}

function kept(): Theme {
  try {
    const found = localStorage.getItem(KEPT_AS) as Theme;
    return THEMES.includes(found) ? found : "system";
  } catch {
    return "system";
  }
}

/** Of runs and parts in curves, told apart on both backgrounds. */
export const PALETTE = ["#3b82f6", "#f97316", "#10b981", "#e11d48", "#8b5cf6", "#ca8a04", "#06b6d4", "#db2777"];
export const colorOf = (index: number): string => PALETTE[index % PALETTE.length] as string;
