// Elements from data: text is put in as text, never as markup, so that no name can become an element.
const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

const element = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const drawn = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

// A table of texts, with a header for each column.
function textTable(titles, rows, numeric = []) {
  const kind = (place) => (numeric.includes(place) ? "number" : null);
  return element("table", {},
    element("thead", {}, element("tr", {}, titles.map((title, place) => element("th", { scope: "col", class: kind(place) }, title)))),
    element("tbody", {}, rows.map((row) => element("tr", {}, row.map((cell, place) => element("td", { class: kind(place) }, cell))))));
}
