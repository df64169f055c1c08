/** Light or dark colors: those of the system until the user chooses. */
import { computed, effect, signal } from "@preact/signals";

export const THEMES = ["system", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

const STORAGE_KEY = "skyrl-train-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const systemDark = signal(system.matches);
system.addEventListener("change", () => (systemDark.value = system.matches));

export const theme = signal<Theme>(storedTheme());
export const dark = computed(() => (theme.value === "system" ? systemDark.value : theme.value === "dark"));

effect(() => {
  document.documentElement.dataset.theme = dark.value ? "dark" : "light";
});

export function choose(chosen: Theme): void {
  try {
    localStorage.setItem(STORAGE_KEY, chosen);
  } catch {
    // no storage, as for files in some browsers: the choice lasts until the page is closed
  }
  theme.value = chosen;
}

function storedTheme(): Theme {
  try {
    const stored = localStorage.getItem(STORAGE_KEY) as Theme;
    return THEMES.includes(stored) ? stored : "system";
  } catch {
    return "system";
  }
}

/** Colors of runs and step parts, distinguishable on light and dark backgrounds. */
export const PALETTE = ["#3b82f6", "#f97316", "#10b981", "#e11d48", "#8b5cf6", "#ca8a04", "#06b6d4", "#db2777"];
export const colorOf = (index: number): string => PALETTE[index % PALETTE.length] as string;
