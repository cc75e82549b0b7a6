// The table of trials: every row opens its trial, headings sort, and what cannot be known goes last either way.
let order = { column: "trial", direction: 1 };

function tableColumns() {
  return data.columns.map((column, place) => ({ ...column, place })).filter((column) => column.shown !== "panel");
}

// The number of a trial in a numeric column: keys leave out the columns of words.
function keyOf(trial, column) {
  if (!column.number) return trial.cells[column.place] || null;
  const before = data.columns.slice(0, column.place).filter((other) => other.number).length;
  return trial.keys[before];
}

function sorted(trials, column, direction) {
  const keys = new Map(trials.map((trial) => [trial, keyOf(trial, column)]));
  return [...trials].sort((one, other) => {
    const [a, b] = [keys.get(one), keys.get(other)];
    if (a === null || b === null) return (a === null) - (b === null);
    return direction * (column.number ? a - b : a.localeCompare(b));
  });
}

function matching(trials) {
  const words = byId("filter-words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const kind = byId("filter-kind").value;
  const fits = { "": () => true, front: (trial) => trial.marks.includes("front"),
    completed: (trial) => trial.outcome === "completed", other: (trial) => trial.outcome !== "completed" }[kind];
  return trials.filter((trial) => {
    const text = [...trial.cells, ...trial.marks, trial.kind].join(" ").toLowerCase();
    return fits(trial) && words.every((word) => text.includes(word));
  });
}

// A strategy's name, which may break behind each of its techniques.
const breakable = (name) => name.split("+").flatMap((word, place) => (place ? ["+", element("wbr"), word] : [word]));

function tableRow(trial, columns) {
  const marks = trial.marks.filter((mark) => mark !== "front" || trial.marks.length === 1);
  const cells = columns.map((column) => {
    const classes = [column.shown, column.number ? "number" : ""].filter(Boolean).join(" ");
    if (column.id === "technique") return element("td", { class: classes }, breakable(trial.cells[column.place]));
    if (column.id !== "trial") return element("td", { class: classes }, trial.cells[column.place]);
    return element("td", { class: column.shown },
      element("a", { href: `#trial-${trial.n}`, id: `row-${trial.n}`, "aria-label": `Trial ${trial.n}, ${trial.name}` }, String(trial.n)),
      marks.map((mark) => element("span", { class: `mark ${mark}` }, mark)));
  });
  return element("tr", { class: [...trial.marks, trial.outcome].join(" "), "data-trial": trial.n }, cells);
}

function heading(column) {
  const sort = order.column === column.id ? (order.direction === 1 ? "ascending" : "descending") : null;
  const classes = [column.shown, `col-${column.id}`, column.number && column.id !== "trial" ? "number" : ""].join(" ");
  return element("th", { scope: "col", class: classes, "aria-sort": sort },
    element("button", { type: "button", id: `sort-${column.id}`, title: column.help }, column.title));
}

function showTrials() {
  const place = byId("trials-table");
  if (!place) return;
  const focused = document.activeElement?.id;
  const columns = tableColumns();
  const by = columns.find((column) => column.id === order.column) ?? columns[0];
  const rows = sorted(matching(data.trials), by, order.direction);
  const table = element("table", {},
    element("thead", {}, element("tr", {}, columns.map(heading))),
    element("tbody", {}, rows.map((trial) => tableRow(trial, columns))));
  place.replaceChildren(table);
  byId("filter-count").textContent = `${rows.length} of ${data.trials.length}`;
  if (focused && !document.activeElement?.id) byId(focused)?.focus({ preventScroll: true });
}

function sortBy(id) {
  order = { column: id, direction: order.column === id && order.direction === 1 ? -1 : 1 };
  remember("order", JSON.stringify(order));
  showTrials();
  byId(`sort-${id}`).focus();
}

function restoreTrials() {
  order = JSON.parse(recall("order") ?? "null") ?? order;
  for (const id of ["filter-words", "filter-kind"]) {
    const control = byId(id);
    if (!control) return;
    control.value = recall(id) ?? "";
    control.addEventListener("input", () => { remember(id, control.value); showTrials(); });
  }
}

// Clicks are heard by the document, so that they need not be bound again to rows that are made anew.
function listenToTrials() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("#trials-table th button");
    if (button) sortBy(button.id.replace("sort-", ""));
    const row = event.target.closest("#trials-table tbody tr");
    if (row && !event.target.closest("a") && !String(getSelection())) location.hash = `trial-${row.dataset.trial}`;
  });
}
