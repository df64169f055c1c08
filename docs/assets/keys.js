// A box that filters the tables of keys (configuration.md): words of the whole key or of its meaning.
// The page is complete without it.
(() => {
  const HEADINGS = "h1, h2, h3";
  const columns = (table) => [...table.rows[0].cells].map((cell) => cell.textContent.trim()).join();
  const named = (table) => /^(key,default|keys,accepted)/.test(columns(table)); // the second kind has whole keys
  if (![...document.querySelectorAll("article table")].some(named)) return;

  const sections = []; // a heading, what follows it up to the next one, and its rows with the text to look in
  for (const element of document.querySelectorAll(`article :is(${HEADINGS}), article table`)) {
    if (element.matches(HEADINGS)) {
      sections.push({ heading: element, rows: [] });
    } else if (named(element) && sections.length) {
      const { heading, rows } = sections.at(-1);
      const section = heading.matches("h1") || columns(element).startsWith("keys") ? "" : `${heading.firstChild.textContent.trim()}.`;
      for (const row of [...element.rows].slice(1)) {
        const key = section + row.cells[0].textContent.trim();
        row.cells[0].title = key;
        rows.push({ row, text: `${key} ${row.textContent}`.toLowerCase() });
      }
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
  const count = sections.reduce((sum, { rows }) => sum + rows.length, 0);
  box.placeholder = `Filter ${count} keys: clip, trainer.policy lr, 600.0 ...`;
  box.setAttribute("aria-label", box.placeholder);
  sections[0].heading.after(box);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const { heading, rows } of sections) {
      let shown = 0;
      for (const { row, text } of rows) {
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      const hide = words.length > 0 && shown === 0;
      if (!heading.matches("h1")) heading.hidden = hide;
      for (const element of following(heading)) if (element !== box) element.hidden = hide;
    }
  });
})();
