/** Numbers and times as text. */
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });

/** A number with four significant digits, for curves; "–" for none. */
export function short(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10_000) return COMPACT.format(value);
  return size < 0.001 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

/** A number with three significant digits, for overviews; "–" for none. */
export const rough = (value: number | null | undefined): string =>
  value === null || value === undefined ? "–" : short(Number(value.toPrecision(3)));

/** A number with nine significant digits, which distinguish all float32 values, for tokens; "–" for none. */
export const exact = (value: number | null | undefined): string =>
  value === null || value === undefined ? "–" : String(Number(value.toPrecision(9)));

/** A duration such as "4 min 12 s"; "–" for none. */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  const total = Math.round(seconds);
  const [days, hours, minutes] = [
    Math.floor(total / 86400),
    Math.floor(total / 3600) % 24,
    Math.floor(total / 60) % 60,
  ];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${total % 60} s` : `${total} s`;
}

/** A date and time such as "30 Nov 2026, 01:45"; "–" for none. */
export const date = (unixSeconds: number | null | undefined): string =>
  unixSeconds === null || unixSeconds === undefined
    ? "–"
    : new Date(1000 * unixSeconds).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });

export const count = (value: number): string => value.toLocaleString("en");

export const time = (milliseconds: number): string => new Date(milliseconds).toLocaleTimeString("en-GB");
