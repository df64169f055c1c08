import { useState } from "preact/hooks";
import { count } from "../format";
import { piecesOf } from "../invisibleCharacters";

const MAX_CHARS_SHOWN = 50_000;

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

/** A text of many lines. A very long one is truncated until the user asks for all of it. */
export function TextBlock({ value }: { value: string }) {
  const [showsAll, setShowsAll] = useState(false);
  const isTruncated = !showsAll && value.length > MAX_CHARS_SHOWN;
  return (
    <div class="text-block">
      <SafeText value={isTruncated ? value.slice(0, MAX_CHARS_SHOWN) : value} />
      {isTruncated && (
        <button type="button" class="more" onClick={() => setShowsAll(true)}>
          Show all {count(value.length)} characters
        </button>
      )}
    </div>
  );
}
