/**
 * A parser of the Markdown that models write: headings, lists, quotes, tables, code, emphasis, links.
 *
 * It returns plain data, which components render as elements of a fixed set. Links and pictures stay text, and HTML is
 * text like any other. Text without Markdown keeps all its characters.
 */

/** A piece of a line. `at` is its offset in the source. */
export type Inline =
  | { kind: "text"; text: string; at: number }
  | { kind: "code"; text: string; at: number }
  | { kind: "strong" | "em" | "del"; children: Inline[] }
  | { kind: "link"; children: Inline[]; address: string };

export type Block =
  | { kind: "paragraph"; children: Inline[] }
  | { kind: "heading"; level: number; children: Inline[] }
  | { kind: "code"; text: string; language: string; at: number }
  | { kind: "quote"; children: Inline[] }
  | { kind: "list"; ordered: boolean; items: { marker: string; depth: number; children: Inline[] }[] }
  | { kind: "table"; rows: Inline[][][] }
  | { kind: "rule" };

interface SourceLine {
  text: string;
  at: number;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6}) +(.+)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const TABLE_RULE = /^ {0,3}\|?(?: *:?-+:? *\|)+ *(?::?-+:? *)?$/;

export function parseMarkdown(source: string): Block[] {
  const lines: SourceLine[] = [];
  let at = 0;
  for (const text of source.split("\n")) {
    lines.push({ text, at });
    at += text.length + 1;
  }
  const blocks: Block[] = [];
  let row = 0;
  while (row < lines.length) {
    const line = lines[row] as SourceLine;
    const fence = FENCE.exec(line.text);
    if (line.text.trim() === "") row++;
    else if (fence) row = codeBlock(lines, row, fence, source, blocks);
    else if (TABLE_RULE.test(lines[row + 1]?.text ?? "") && line.text.includes("|")) row = table(lines, row, blocks);
    else if (RULE.test(line.text)) {
      blocks.push({ kind: "rule" });
      row++;
    } else if (HEADING.test(line.text)) {
      const [, marks = "", title = ""] = HEADING.exec(line.text) ?? [];
      blocks.push({
        kind: "heading",
        level: marks.length,
        children: inline(title, line.at + line.text.length - title.length),
      });
      row++;
    } else if (ITEM.test(line.text)) row = list(lines, row, blocks);
    else if (QUOTE.test(line.text)) row = quote(lines, row, blocks);
    else row = paragraph(lines, row, source, blocks);
  }
  return blocks;
}

function codeBlock(lines: SourceLine[], row: number, fence: RegExpExecArray, source: string, blocks: Block[]): number {
  const mark = fence[1] ?? "";
  const isEnd = ({ text }: SourceLine) =>
    text.trim().startsWith(mark) && text.trim().replaceAll(mark.charAt(0), "") === "";
  let end = row + 1;
  while (end < lines.length && !isEnd(lines[end] as SourceLine)) end++;
  const at = lines[row + 1]?.at ?? source.length;
  const stop = end < lines.length ? (lines[end] as SourceLine).at - 1 : source.length;
  blocks.push({ kind: "code", text: source.slice(at, Math.max(at, stop)), language: (fence[2] ?? "").trim(), at });
  return end + 1;
}

function table(lines: SourceLine[], row: number, blocks: Block[]): number {
  const rows: Inline[][][] = [];
  let end = row;
  for (; end < lines.length && (lines[end] as SourceLine).text.includes("|"); end++)
    if (end !== row + 1) rows.push(cells(lines[end] as SourceLine));
  blocks.push({ kind: "table", rows });
  return end;
}

function cells({ text, at }: SourceLine): Inline[][] {
  const found: Inline[][] = [];
  let offset = 0;
  const parts = text.split("|");
  parts.forEach((part, index) => {
    const isEdge = (index === 0 || index === parts.length - 1) && part.trim() === "";
    if (!isEdge) found.push(inline(part, at + offset));
    offset += part.length + 1;
  });
  return found;
}

function list(lines: SourceLine[], row: number, blocks: Block[]): number {
  const items: { marker: string; depth: number; children: Inline[] }[] = [];
  let end = row;
  for (; end < lines.length; end++) {
    const { text, at } = lines[end] as SourceLine;
    const match = ITEM.exec(text);
    if (!match || RULE.test(text)) break;
    const [whole, indent = "", marker = ""] = match;
    items.push({
      marker: /\d/.test(marker) ? marker : "•",
      depth: Math.min(6, Math.floor(indent.length / 2)),
      children: inline(text.slice(whole.length), at + whole.length),
    });
  }
  blocks.push({ kind: "list", ordered: items[0]?.marker !== "•", items });
  return end;
}

function quote(lines: SourceLine[], row: number, blocks: Block[]): number {
  const children: Inline[] = [];
  let end = row;
  for (; end < lines.length; end++) {
    const { text, at } = lines[end] as SourceLine;
    const mark = QUOTE.exec(text)?.[0];
    if (mark === undefined) break;
    if (end > row) children.push({ kind: "text", text: "\n", at });
    children.push(...inline(text.slice(mark.length), at + mark.length));
  }
  blocks.push({ kind: "quote", children });
  return end;
}

function paragraph(lines: SourceLine[], row: number, source: string, blocks: Block[]): number {
  let end = row + 1;
  const begins = ({ text }: SourceLine) =>
    text.trim() === "" || [FENCE, HEADING, ITEM, QUOTE, RULE].some((pattern) => pattern.test(text));
  while (end < lines.length && !begins(lines[end] as SourceLine)) end++;
  const [first, last] = [lines[row] as SourceLine, lines[end - 1] as SourceLine];
  blocks.push({ kind: "paragraph", children: inline(source.slice(first.at, last.at + last.text.length), first.at) });
  return end;
}

const MAX_DEPTH = 4;
/** Code, links and emphasis. No part can match in more than one way, and lengths are bounded, so that hostile texts take no longer. */
const INLINE =
  /(`+)(?!`)([^\n]{0,1000}?[^`\n])\1(?!`)|!?\[([^[\]\n]{1,300})\]\(([^()\s]{1,500})\)|(\*\*|~~)(?=\S)([^\n]{0,1000}?\S)\5|(?<![\w*])\*(?=[^\s*])([^*\n]{0,500}?[^\s*])\*(?![\w*])|(?<![\w_])_(?=[^\s_])([^_\n]{0,500}?[^\s_])_(?![\w_])/g;

/** Parse the pieces of a text that begins at offset `at` of the source. */
export function inline(text: string, at = 0, depth = 0): Inline[] {
  if (depth >= MAX_DEPTH) return [{ kind: "text", text, at }];
  const pieces: Inline[] = [];
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, ticks, code, label, address, mark, marked, starred, underlined] = match;
    if (match.index > from) pieces.push({ kind: "text", text: text.slice(from, match.index), at: at + from });
    const start = at + match.index;
    const nested = (content: string) => inline(content, start + whole.indexOf(content), depth + 1);
    if (code !== undefined) pieces.push({ kind: "code", text: code, at: start + (ticks ?? "").length });
    else if (label !== undefined) pieces.push({ kind: "link", children: nested(label), address: address ?? "" });
    else if (marked !== undefined) pieces.push({ kind: mark === "~~" ? "del" : "strong", children: nested(marked) });
    else pieces.push({ kind: "em", children: nested(starred ?? underlined ?? "") });
    from = match.index + whole.length;
  }
  if (from < text.length) pieces.push({ kind: "text", text: text.slice(from), at: at + from });
  return pieces;
}
