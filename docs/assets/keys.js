// A box that filters the tables of keys (reference/configuration): words of the whole key or of its meaning.
// The pages are complete without it.
(() => {
  const HEADINGS = "h1, h2, h3";
  const columns = (table) => [...table.rows[0].cells].map((cell) => cell.textContent.trim()).join();
  // Keys of the heading's section with their meaning; whole keys of SkyRL; on the first page, all keys of a section in a row.
  const isKeyTable = (table) => /^(key,default|keys,accepted|section,keys$)/.test(columns(table));
  if (![...document.querySelectorAll("article table")].some(isKeyTable)) return;

  const entriesOf = (row, kind, section) => {
    const first = row.cells[0].textContent.trim();
    if (kind.startsWith("section")) {
      return [...row.cells[1].querySelectorAll("code")].map((code) => ({ element: code, text: `${first}.${code.textContent}`.toLowerCase() }));
    }
    const key = kind.startsWith("keys") || !section ? first : `${section}.${first}`;
    row.cells[0].title = key;
    return [{ element: row, text: `${key} ${row.textContent}`.toLowerCase() }];
  };

  const sections = []; // each has a heading, and the rows of the tables up to the next heading with their entries
  for (const element of document.querySelectorAll(`article :is(${HEADINGS}), article table`)) {
    if (element.matches(HEADINGS)) {
      sections.push({ heading: element, rows: [] });
    } else if (isKeyTable(element) && sections.length) {
      const { heading, rows } = sections.at(-1);
      const name = heading.firstChild.textContent.trim();
      const section = /^(data|trainer|generator|environment)\b[\w.]*$/.test(name) ? name : "";
      for (const row of [...element.rows].slice(1)) rows.push({ row, entries: entriesOf(row, columns(element), section) });
    }
  }
  const following = (heading) => {
    const found = [];
    for (let next = heading.nextElementSibling; next && !next.matches(HEADINGS); next = next.nextElementSibling) found.push(next);
    return found;
  };

  const box = document.createElement("input");
  box.type = "search";
  box.className = "key-filter";
  const count = sections.flatMap(({ rows }) => rows.flatMap(({ entries }) => entries)).length;
  box.placeholder = `Filter ${count} keys, for example: trainer.policy lr`;
  box.setAttribute("aria-label", box.placeholder);
  sections[0].heading.after(box);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const { heading, rows } of sections) {
      let shown = 0;
      for (const { row, entries } of rows) {
        let matches = 0;
        for (const { element, text } of entries) {
          element.hidden = !words.every((word) => text.includes(word));
          matches += !element.hidden;
        }
        row.hidden = matches === 0;
        shown += matches;
      }
      const hide = words.length > 0 && shown === 0;
      if (!heading.matches("h1")) heading.hidden = hide;
      for (const element of following(heading)) if (element !== box) element.hidden = hide;
    }
  });
})();
