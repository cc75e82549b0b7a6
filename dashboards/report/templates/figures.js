// Figures are drawn when they come near the window, in the page's own colours.
const CONFIG = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] };
const MOST_ROWS = 500;
const nearWindow = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((each) => each.isIntersecting)) {
    nearWindow.unobserve(entry.target);
    draw(entry.target.closest("figure"));
  }
}, { rootMargin: "300px" });

const parsed = (figure) => JSON.parse(figure.querySelector("script").textContent);

// Axes and texts of a layout in the colours that the page has now.
function inked(layout) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axes = Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name));
  const axisInk = { gridcolor: colour("--grid"), linecolor: colour("--grid"), tickcolor: colour("--grid") };
  return {
    ...layout,
    font: { ...layout.font, color: colour("--ink") },
    hoverlabel: { ...layout.hoverlabel, bgcolor: colour("--raised"), bordercolor: colour("--line"),
      font: { ...layout.hoverlabel?.font, color: colour("--ink") } },
    ...Object.fromEntries(axes.map((name) => [name, { ...layout[name], ...axisInk }])),
  };
}

// On a phone the legend stands below the drawing, where it covers nothing, and margins are small.
function fitted(layout, width) {
  if (width >= 560) return layout;
  return { ...layout, margin: { ...layout.margin, l: 52, r: 8 },
    legend: { ...layout.legend, x: 0, xanchor: "left", y: -0.22, yanchor: "top" } };
}

async function draw(figure) {
  const Plotly = await plotly();
  if (Plotly) {
    paint(figure, Plotly);
  } else {
    const drawing = figure.querySelector(".drawing");
    drawing.replaceChildren("This browser cannot draw the figure; its data are in the table below.");
    drawing.style.minHeight = "auto";
  }
}

// Without waiting for anything, so that a page that is about to be printed has it.
function paint(figure, Plotly) {
  const drawing = figure.querySelector(".drawing");
  const { data: traces, layout } = parsed(figure);
  Plotly.react(drawing, traces, inked(fitted(layout, drawing.clientWidth)), CONFIG);
  // what is drawn is said by the title and by the table of its data; letters in the drawing would only repeat parts of it
  for (const picture of drawing.querySelectorAll(".main-svg")) picture.setAttribute("aria-hidden", "true");
  if (figure.dataset.drawn) return;
  figure.dataset.drawn = "yes";
  drawing.on("plotly_click", ({ points }) => {
    const number = /^trial (\d+)\b/.exec(points[0].hovertext ?? points[0].text ?? "");
    if (number && trialOf.has(Number(number[1]))) location.hash = `trial-${number[1]}`;
  });
}

function drawAllAgain() {
  for (const figure of document.querySelectorAll("figure[data-drawn]")) draw(figure);
}

// Paper is white, and has no place that could come into view later.
function drawForPaper(event) {
  const undrawn = event.matches && window.Plotly ? document.querySelectorAll("main figure:has(.drawing)") : [];
  for (const figure of new Set([...undrawn, ...document.querySelectorAll("figure[data-drawn]")])) paint(figure, window.Plotly);
}

function followColours() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAllAgain);
  matchMedia("print").addEventListener("change", drawForPaper);
}

// A row for each point: its series, its place on both axes, and what its hover box says.
function dataTable(figure) {
  const { data: traces, layout } = parsed(figure);
  const words = (html) => {
    const text = (html ?? "").replace(/<br ?\/?>/g, "; ");
    return new DOMParser().parseFromString(text, "text/html").body.textContent;
  };
  const at = (value, place) => (Array.isArray(value) ? value[place] : value);
  const shown = (value) => (known(value) ? String(Number(value.toPrecision(6))) : String(value ?? ""));
  const rows = traces.flatMap((trace) => {
    const values = trace.y ?? trace.x ?? [];
    return values.map((_, place) => [words(trace.name), shown(at(trace.x, place) ?? place), shown(at(trace.y, place) ?? place),
      words(at(trace.hovertext, place) ?? at(trace.text, place) ?? "")]).filter((_, place) => values[place] !== null);
  });
  const titles = ["Series", words(layout.xaxis?.title?.text) || "x", words(layout.yaxis?.title?.text) || "y", "Says"];
  const left = rows.length > MOST_ROWS ? element("p", { class: "hint" }, `The first ${MOST_ROWS} of ${rows.length} points.`) : null;
  const region = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Data of the figure" },
    textTable(titles, rows.slice(0, MOST_ROWS), [1, 2]));
  return [left, region].filter(Boolean);
}

function watchFigures() {
  for (const figure of document.querySelectorAll("main figure")) {
    const drawing = figure.querySelector(".drawing");
    if (!drawing) continue;
    if (!figure.dataset.drawn) nearWindow.observe(drawing);
    const details = figure.querySelector("details");
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(...dataTable(figure));
    });
  }
}
