// Sorting: by the cells' data-key, numbers as numbers, missing ones last in either direction.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const key = (row) => row.cells[column].dataset.key;
    const compare = (a, b) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      const order = head.classList.contains("number") ? a - b : a.localeCompare(b);
      return direction * order;
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
  }));
}

// Figures take their ink from the page, so that they follow it between light and dark.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const ink = () => {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  for (const figure of document.querySelectorAll(".plotly-graph-div")) {
    const change = { "font.color": colour("--ink"),
      "hoverlabel.bgcolor": colour("--raised"), "hoverlabel.font.color": colour("--ink"),
      "hoverlabel.bordercolor": colour("--line") };
    for (const axis of ["xaxis", "yaxis"]) {
      for (const part of ["gridcolor", "linecolor", "tickcolor"]) change[`${axis}.${part}`] = colour("--grid");
    }
    Plotly.relayout(figure, change);
  }
};
ink();
dark.addEventListener("change", ink);
