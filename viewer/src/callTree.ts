/** The tree that the calls of a session form, for showing them in their order. */
import type { Call } from "./data";

/** How a call follows the calls before it. */
export interface Place {
  /** Indentation. */
  depth: number;
  /** False if it is the first call, or the first one that continues an earlier call's tokens. */
  isBranch: boolean;
  label: string;
  /** A sentence that explains the label; "" if there is nothing to explain. */
  explanation: string;
}

/** The places of all calls. The first call that continues another has the other's depth; later ones are indented. */
export function placesOf(calls: Call[]): Place[] {
  const places: Place[] = [];
  const continued = new Set<number>();
  calls.forEach(({ parent, previous }, number) => {
    if (previous === null) places.push(number === 0 ? FIRST : REWRITTEN);
    else {
      const isSecond = continued.has(previous);
      continued.add(previous);
      const depth = (places[previous]?.depth ?? 0) + (isSecond ? 1 : 0);
      const name = `call ${previous + 1}`;
      if (parent === null) {
        const explanation = `It continues the messages of ${name}, but the chat template renders them differently now.`;
        places.push({ depth, isBranch: true, label: `branch: ${name} rendered anew`, explanation });
      } else if (isSecond) {
        const explanation = `Another call continues ${name}, too: the program made calls in parallel, or it went back.`;
        places.push({ depth, isBranch: true, label: `also continues ${name}`, explanation });
      } else places.push({ depth, isBranch: false, label: `continues ${name}`, explanation: "" });
    }
  });
  return places;
}

const FIRST: Place = { depth: 0, isBranch: false, label: "first call", explanation: "" };
const REWRITTEN: Place = {
  depth: 1,
  isBranch: true,
  label: "branch: history rewritten",
  explanation:
    "Its messages do not begin with those of an earlier call: the program rewrote its history, or began another conversation.",
};
