/** Shading of tokens by a value, relative to the largest value of the sample. */
import type { Column, Tokens } from "./data";

export interface Shade {
  /** -1 to 1 for each token; 0 for a token without a value. */
  strength: number[];
  /** The magnitude that is shaded darkest. */
  scale: number;
  signed: boolean;
}

interface ShadeOption {
  title: string;
  signed: boolean;
  values: (tokens: Tokens) => Column;
  /** Lower bound of the scale, so that tiny values are not shaded dark. */
  minScale: number;
}

/** Shadings by name. With "logprob", a token is darker the less likely it was. */
export const SHADES: Record<string, ShadeOption> = {
  logprob: {
    title: "log-prob",
    signed: false,
    values: ({ logprobs }) => logprobs.map((value) => value && -value),
    minScale: 3,
  },
  gap: { title: "trainer minus engine", signed: true, values: gaps, minScale: 0.01 },
  advantage: { title: "advantage", signed: true, values: ({ advantages }) => advantages, minScale: 1e-6 },
};

export function shadeOf(tokens: Tokens, name: string): Shade {
  const { values, signed, minScale } = SHADES[name] as ShadeOption;
  const column = values(tokens);
  const scale = column.reduce((largest: number, value) => Math.max(largest, Math.abs(value ?? 0)), minScale);
  return { strength: column.map((value) => (value ?? 0) / scale), scale, signed };
}

function gaps({ logprobs, old_logprobs }: Tokens): Column {
  return logprobs.map((engine, index) => {
    const trainer = old_logprobs[index];
    return engine === null || trainer === null || trainer === undefined ? null : trainer - engine;
  });
}
