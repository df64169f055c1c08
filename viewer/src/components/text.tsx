import { useState } from "preact/hooks";
import { count } from "../format";
import { piecesOf } from "../visible";

const FIRST = 50_000;

/** Text of a model or an environment, as text and nothing else; what cannot be seen has a sign. */
export function Text({ value }: { value: string }) {
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

/** A text of many lines; of a very long one its start, until someone wants all. */
export function TextBlock({ value }: { value: string }) {
  const [whole, showWhole] = useState(false);
  const cut = !whole && value.length > FIRST;
  return (
    <div class="text-block">
      <Text value={cut ? value.slice(0, FIRST) : value} />
      {cut && (
        <button type="button" class="more" onClick={() => showWhole(true)}>
          Show all {count(value.length)} characters
        </button>
      )}
    </div>
  );
}
