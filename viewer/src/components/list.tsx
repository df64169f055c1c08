import { useEffect, useRef } from "preact/hooks";
import { isSame, PAGE_ROWS, type Row } from "../data";
import { count, short } from "../format";
import { rows } from "../state";
import { asView, updateView, openKey, view } from "../view";
import { SafeText } from "./text";

/** A page of the list of samples, with two lines per sample. */
export function List() {
  const list = rows.value;
  const open = openKey(view.value);
  if (!list) return <p class="muted">loading…</p>;
  return (
    <>
      <Pager total={list.total} shown={list.rows.length} />
      {list.total === 0 && <p class="empty">No sample matches these filters.</p>}
      <ol class="list" hidden={list.total === 0}>
        {list.rows.map((row) => (
          <Entry
            key={`${row.step} ${row.group} ${row.sample} ${row.uid}`}
            row={row}
            open={open !== null && isSame(row, open)}
          />
        ))}
      </ol>
    </>
  );
}

function Entry({ row, open }: { row: Row; open: boolean }) {
  const button = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    if (open) button.current?.scrollIntoView({ block: "nearest" });
  }, [open]);
  return (
    <li>
      <button
        ref={button}
        type="button"
        aria-current={open ? "true" : undefined}
        onClick={() => updateView(asView(row))}
      >
        <span class="facts">
          <Reward row={row} />
          <span>
            step {row.step} · row <SafeText value={row.uid} /> · {row.sample}
          </span>
          <span class="muted">
            {count(row.tokens)} tokens{row.turns > 1 && `, ${row.turns} turns`} · <SafeText value={row.stop_reason} />
          </span>
        </span>
        <span class="preview">
          <SafeText value={row.preview.trim().replaceAll(/\n+/g, " ↵ ")} />
        </span>
      </button>
    </li>
  );
}

/** The reward of a sample, or its status if it failed. */
export function Reward({ row }: { row: Pick<Row, "reward" | "status"> }) {
  if (row.status !== "ok") return <span class="reward failed">{row.status}</span>;
  const reward = row.reward ?? 0;
  return <span class={`reward ${reward > 0 ? "good" : reward < 0 ? "failed" : "none"}`}>{short(row.reward)}</span>;
}

function Pager({ total, shown }: { total: number; shown: number }) {
  const offset = Number(view.value.offset) || 0;
  const showPage = (newOffset: number) => updateView({ offset: newOffset > 0 ? String(newOffset) : "" });
  return (
    <nav class="pager" aria-label="Pages">
      <button
        type="button"
        aria-label="Previous page"
        disabled={offset <= 0}
        onClick={() => showPage(offset - PAGE_ROWS)}
      >
        ‹
      </button>
      <span role="status">
        {total ? `${count(offset + 1)}–${count(offset + shown)} of ${count(total)}` : "no samples"}
      </span>
      <button
        type="button"
        aria-label="Next page"
        disabled={offset + shown >= total}
        onClick={() => showPage(offset + PAGE_ROWS)}
      >
        ›
      </button>
    </nav>
  );
}
