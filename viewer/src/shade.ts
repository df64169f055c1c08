/** How dark a token is: by a number of it over the largest of the sample. */
import type { Column, Tokens } from "./data";

export interface Shade {
  /** -1 to 1 by token; 0 where there is no number. */
  strength: number[];
  /** The number that is darkest. */
  scale: number;
  signed: boolean;
}

interface Choice {
  title: string;
  signed: boolean;
  values: (tokens: Tokens) => Column;
  /** Numbers below are never darkest, however small the others are. */
  least: number;
}

/** A log-prob is 0 to minus infinity: the darker, the less was it expected. */
export const SHADES: Record<string, Choice> = {
  logprob: { title: "log-prob", signed: false, values: ({ logprobs }) => logprobs.map((one) => one && -one), least: 3 },
  gap: { title: "trainer minus engine", signed: true, values: gaps, least: 0.01 },
  advantage: { title: "advantage", signed: true, values: ({ advantages }) => advantages, least: 1e-6 },
};

export function shadeOf(tokens: Tokens, name: string): Shade {
  const { values, signed, least } = SHADES[name] as Choice;
  const numbers = values(tokens);
  const scale = numbers.reduce((most: number, one) => Math.max(most, Math.abs(one ?? 0)), least);
  return { strength: numbers.map((one) => (one ?? 0) / scale), scale, signed };
}

function gaps({ logprobs, old_logprobs }: Tokens): Column {
  return logprobs.map((engine, index) => {
    const trainer = old_logprobs[index];
    return engine === null || trainer === null || trainer === undefined ? null : trainer - engine;
  });
}
