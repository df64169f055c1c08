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

/** A number with nine significant digits, which distinguish all float32 values, for tokens; "–" for none. */
export const exact = (value: number | null | undefined): string =>
  value === null || value === undefined ? "–" : String(Number(value.toPrecision(9)));

export const count = (value: number): string => value.toLocaleString("en");

export const time = (milliseconds: number): string => new Date(milliseconds).toLocaleTimeString("en-GB");
