import { type ComponentChildren, Fragment } from "preact";
import { useMemo, useState } from "preact/hooks";
import { count } from "../format";
import { piecesOf } from "../invisibleCharacters";
import { type Block, type Inline, inline, parseMarkdown } from "../markdown";
import { view } from "../view";

const MAX_CHARS_SHOWN = 50_000;
/** Longer texts are not rendered as Markdown. */
const MAX_CHARS_RENDERED = 50_000;

/** Untrusted text, shown literally. Invisible characters are replaced by signs. */
export function SafeText({ value }: { value: string }) {
  return (
    <bdi>
      {piecesOf(value).map((piece) =>
        "text" in piece ? (
          piece.text
        ) : (
          <span class="hidden-sign" title={piece.code}>
            {piece.sign}
          </span>
        ),
      )}
    </bdi>
  );
}

/** A path or a configuration key, which breaks after slashes and dots where a column is narrow. */
export const PathText = ({ value }: { value: string }) => (
  <>
    {value.split(/(?<=[/.])/).map((part, index) => (
      <Fragment key={index}>
        <SafeText value={part} />
        <wbr />
      </Fragment>
    ))}
  </>
);

/** A text whose first `dimmed` characters are dimmed. */
function Dimmed({ value, dimmed }: { value: string; dimmed: number }) {
  if (dimmed <= 0) return <SafeText value={value} />;
  return (
    <>
      <span class="common">
        <SafeText value={value.slice(0, dimmed)} />
      </span>
      {dimmed < value.length && <SafeText value={value.slice(dimmed)} />}
    </>
  );
}

/**
 * A text of many lines. A very long one is truncated until the user asks for all of it.
 *
 * `markdown` allows rendering, which the user can turn off. The first `dimmed` characters are dimmed.
 */
export function TextBlock({
  value,
  markdown = false,
  dimmed = 0,
}: {
  value: string;
  markdown?: boolean;
  dimmed?: number;
}) {
  const [showsAll, setShowsAll] = useState(false);
  if (markdown && view.value.markdown !== "off" && value.length <= MAX_CHARS_RENDERED)
    return <Rendered value={value} dimmed={dimmed} />;
  const isTruncated = !showsAll && value.length > MAX_CHARS_SHOWN;
  return (
    <div class="text-block">
      <Dimmed value={isTruncated ? value.slice(0, MAX_CHARS_SHOWN) : value} dimmed={dimmed} />
      {isTruncated && (
        <button type="button" class="more" onClick={() => setShowsAll(true)}>
          Show all {count(value.length)} characters
        </button>
      )}
    </div>
  );
}

function Rendered({ value, dimmed }: { value: string; dimmed: number }) {
  const blocks = useMemo(() => parseMarkdown(value), [value]);
  return (
    <div class="text-block rendered">
      {blocks.map((block, index) => (
        <BlockView key={index} block={block} dimmed={dimmed} />
      ))}
    </div>
  );
}

function BlockView({ block, dimmed }: { block: Block; dimmed: number }) {
  const pieces = (children: Inline[]) => <Pieces pieces={children} dimmed={dimmed} />;
  switch (block.kind) {
    case "paragraph":
      return <p>{pieces(block.children)}</p>;
    case "heading":
      return (
        <p class={`heading level-${block.level}`}>
          <span class="marks">{"#".repeat(block.level)} </span>
          {pieces(block.children)}
        </p>
      );
    case "quote":
      return <blockquote>{pieces(block.children)}</blockquote>;
    case "rule":
      return <hr />;
    case "code":
      return (
        <pre>
          <code>
            <Dimmed value={block.text} dimmed={dimmed - block.at} />
          </code>
        </pre>
      );
    case "list":
      return (
        <ul>
          {block.items.map((item, index) => (
            <li key={index} style={{ marginInlineStart: `${1.2 * item.depth}em` }}>
              <span class="bullet">{item.marker}</span>
              <span>{pieces(item.children)}</span>
            </li>
          ))}
        </ul>
      );
    case "table":
      return (
        <div class="scroll">
          <table>
            {block.rows.map((row, index) => (
              <tr key={index}>
                {row.map((cell, column) =>
                  index === 0 ? <th key={column}>{pieces(cell)}</th> : <td key={column}>{pieces(cell)}</td>,
                )}
              </tr>
            ))}
          </table>
        </div>
      );
  }
}

function Pieces({ pieces, dimmed }: { pieces: Inline[]; dimmed: number }) {
  return (
    <>
      {pieces.map((piece, index): ComponentChildren => {
        if (piece.kind === "text") return <Dimmed key={index} value={piece.text} dimmed={dimmed - piece.at} />;
        if (piece.kind === "code")
          return (
            <code key={index}>
              <Dimmed value={piece.text} dimmed={dimmed - piece.at} />
            </code>
          );
        const children = <Pieces pieces={piece.children} dimmed={dimmed} />;
        if (piece.kind === "strong") return <strong key={index}>{children}</strong>;
        if (piece.kind === "em") return <em key={index}>{children}</em>;
        if (piece.kind !== "link") return <del key={index}>{children}</del>;
        return (
          <span key={index} class="link-text">
            {children} <SafeText value={`(${piece.address})`} />
          </span>
        );
      })}
    </>
  );
}

/** A line of our own texts, with code between backticks. */
export const InlineMarkdown = ({ value }: { value: string }) => <Pieces pieces={inline(value)} dimmed={0} />;
