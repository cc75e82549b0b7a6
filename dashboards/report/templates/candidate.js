// The panel of one candidate, or of two side by side. The address says which: #trial-7, #trial-7-12.
let cameFromPage = false;
let shownTrials = "";

function addressed() {
  const match = /^#trial-(\d+)(?:-(\d+))?$/.exec(location.hash);
  return match ? match.slice(1).filter(Boolean).map(Number) : [];
}

function commandLine(line, purpose) {
  return element("span", { class: "command" }, element("code", {}, line),
    element("button", { type: "button", class: "copy", "aria-label": `Copy the command: ${purpose}` }, "Copy"));
}

function keyNumbers(trial) {
  const shown = ["ne", "relative", "flops", "technique", "memory", "outcome"].map((id) => data.columns.find((column) => column.id === id));
  return element("dl", { class: "key" }, shown.map((column) => element("div", {},
    element("dt", {}, column.title), element("dd", {}, cell(trial, column.id) || MISSING))));
}

function exportPart(trial) {
  if (trial.export) return commandLine(trial.export, `export trial ${trial.n}`);
  return element("p", { class: "hint" }, "Its weights were not kept: those of the fronts, of the baseline and of members of averages are.");
}

function attempts(trial) {
  if (!trial.attempts.length) return [element("p", { class: "hint" }, "Nothing was trained for this trial.")];
  const titles = ["Asked for", "How it ended", "Executed", "Predicted peak", "Measured peak", "Time", "Error"];
  return [element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Attempts of trial ${trial.n}` },
    textTable(titles, trial.attempts, [3, 4, 5]))];
}

function allNumbers(trial) {
  return element("details", { class: "data" }, element("summary", {}, "All numbers and settings"),
    element("dl", { class: "facts" }, data.columns.map((column, place) => element("div", {},
      element("dt", { title: column.help }, column.title), element("dd", {}, trial.cells[place] || MISSING)))),
    trial.point.length ? textTable(["Setting", "Value"], trial.point.map(([axis, value]) => [data.axes[axis], value === null ? "none" : String(value)])) : null);
}

// One candidate's column; scales are those of both candidates where there are two.
function column(trial, scales) {
  const remark = cell(trial, "remark");
  const part = (title, content) => [element("h3", {}, title), ...content];
  return element("article", { "aria-label": `Trial ${trial.n}` },
    element("p", { class: "candidate-name" }, element("strong", {}, `Trial ${trial.n}`), " ", trial.marks.map((mark) => element("span", { class: `mark ${mark}` }, mark)),
      element("br"), trial.name, remark ? [element("br"), element("span", { class: "hint" }, remark)] : null),
    keyNumbers(trial), exportPart(trial),
    part("Architecture", diagram(trial.model)), part("Memory: what fits, and why nothing less", ladder(trial)),
    part("Learning curve", curve(trial, scales.range)), part("Cost by module", cost(trial, scales.flops)),
    part("Attempts", attempts(trial)), allNumbers(trial));
}

function scalesOf(trials) {
  const curves = trials.map(curvePoints).filter((points) => points.length);
  const alike = new Set(trials.filter((trial) => trial.curve).map((trial) => Boolean(trial.curve.relative)));
  return {
    range: trials.length > 1 && curves.length > 1 && alike.size === 1 ? curveRange(curves, [...alike][0]) : null,
    flops: trials.length > 1 ? Math.max(...trials.map((trial) => trial.flops ?? 0)) : null,
  };
}

// What two candidates differ in: numbers of the table first, then settings.
function differences([one, other]) {
  const rows = data.columns.map((column, place) => [column.title, one.cells[place], other.cells[place]])
    .filter(([title, a, b]) => a !== b && title !== "Trial");
  const settings = (trial) => new Map(trial.point.map(([axis, value]) => [data.axes[axis], String(value)]));
  const [first, second] = [settings(one), settings(other)];
  const axes = [...new Set([...first.keys(), ...second.keys()])].filter((axis) => first.get(axis) !== second.get(axis));
  rows.push(...axes.map((axis) => [axis, first.get(axis) ?? "", second.get(axis) ?? ""]));
  return element("details", { class: "data", open: rows.length <= 12 }, element("summary", {}, `What they differ in (${rows.length})`),
    textTable(["", `Trial ${one.n}`, `Trial ${other.n}`], rows));
}

function chooser(trials) {
  const options = data.trials.filter((trial) => trial.n !== trials[0].n)
    .map((trial) => element("option", { value: trial.n, selected: trials[1]?.n === trial.n }, `${trial.n}: ${trial.name}`.slice(0, 70)));
  const select = element("select", { id: "beside" }, element("option", { value: "" }, "none"), options);
  select.addEventListener("change", () => location.replace(`#trial-${trials[0].n}${select.value ? `-${select.value}` : ""}`));
  return element("label", {}, "Beside it ", select);
}

function showPanel() {
  const dialog = byId("candidate"), trials = addressed().map((number) => trialOf.get(number)).filter(Boolean);
  if (!trials.length) {
    shownTrials = "";
    if (dialog.open) dialog.close();
    return;
  }
  const text = JSON.stringify(trials);
  if (dialog.open && text === shownTrials) return;
  shownTrials = text;
  const focused = dialog.open ? document.activeElement?.id : null, scales = scalesOf(trials);
  const title = trials.length > 1 ? `Trials ${trials[0].n} and ${trials[1].n}` : `Trial ${trials[0].n}`;
  const close = element("button", { type: "button", id: "close-candidate" }, "Close");
  close.addEventListener("click", leavePanel);
  dialog.className = trials.length > 1 ? "two" : "";
  dialog.replaceChildren(element("header", {}, element("h2", { id: "candidate-title" }, title), chooser(trials), close),
    trials.length > 1 ? differences(trials) : "", element("div", { class: "columns" }, trials.map((trial) => column(trial, scales))));
  if (!dialog.open) {
    dialog.showModal();
    dialog.scrollTop = 0;
  }
  byId(focused || "close-candidate")?.focus({ preventScroll: true });
}

// Closing goes back to where the reader was; a page that was opened at this address has nothing behind it.
function leavePanel() {
  if (cameFromPage) {
    cameFromPage = false;
    history.back();
    return;
  }
  try {
    history.replaceState(null, "", location.pathname + location.search);
  } catch {
    location.replace("#trials");
  }
  showPanel();
}

function listenToAddress() {
  window.addEventListener("hashchange", (event) => {
    cameFromPage ||= addressed().length > 0 && !event.oldURL.includes("#trial-");
    if (!addressed().length) cameFromPage = false;
    showPanel();
  });
  byId("candidate").addEventListener("cancel", (event) => { event.preventDefault(); leavePanel(); });
  byId("candidate").addEventListener("click", (event) => { if (event.target.id === "candidate" && event.offsetX < 0) leavePanel(); });
}
