/**
 * Characters that are invisible or change how others look: control characters and escapes, bidirectional controls,
 * zero-width characters, tags and lone surrogates. Joiners and variation selectors are not among them: emoji and scripts
 * need them.
 */
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\ufff9-\ufffb\u{e0000}-\u{e0fff}\p{Cs}]/gu;

/** A part of a text: visible characters, or a `sign` in place of an invisible character. */
export type Piece = { text: string } | { sign: string; code: string };

/** Split a text into visible parts and signs for invisible characters, in order. */
export function piecesOf(text: string): Piece[] {
  const pieces: Piece[] = [];
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > from) pieces.push({ text: text.slice(from, match.index) });
    const point = match[0].codePointAt(0) ?? 0;
    const code = `U+${point.toString(16).toUpperCase().padStart(4, "0")}`;
    pieces.push({ sign: point < 32 ? String.fromCharCode(0x2400 + point) : point === 127 ? "\u2421" : code, code });
    from = match.index + match[0].length;
  }
  if (from < text.length) pieces.push({ text: text.slice(from) });
  return pieces;
}

/** Replace invisible characters by their code points, for attributes and options, which hold plain text only. */
export const escapeInvisible = (text: string): string =>
  piecesOf(text)
    .map((piece) => ("text" in piece ? piece.text : `[${piece.code}]`))
    .join("");
