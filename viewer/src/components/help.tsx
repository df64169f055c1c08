import { useEffect, useRef } from "preact/hooks";
import { HELP } from "../keyboard";
import { helpShown } from "../state";

export function Help() {
  const dialog = useRef<HTMLDialogElement>(null);
  const shown = helpShown.value;
  useEffect(() => {
    if (shown) dialog.current?.showModal();
    else dialog.current?.close();
  }, [shown]);
  return (
    <dialog ref={dialog} aria-label="Keys" onClose={() => (helpShown.value = false)}>
      <h2>Keys</h2>
      <dl>
        {HELP.map(({ key, what }) => (
          <div key={key}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
      <button type="button" onClick={() => (helpShown.value = false)}>
        Close
      </button>
    </dialog>
  );
}
