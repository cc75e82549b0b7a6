// What a candidate costs, folded by layer and module; the rows of a module are inside it.
const FLOP_KINDS = { matmul: "matrix product", attention: "attention", elementwise: "elementwise", lookup: "look-up" };

function costLine(name, flops, share, parameters) {
  return element("summary", {}, element("span", {}, name),
    element("span", { class: "share", "aria-hidden": "true" }, element("span", { style: `width: ${(100 * share).toFixed(2)}%` })),
    element("span", { class: "number" }, parameters ? `${si(parameters)} parameters` : ""), element("span", { class: "number", title: `${(100 * share).toFixed(1)} % of all FLOPs` }, si(flops)));
}

function moduleCost(module, total) {
  const rows = module.rows.map(([name, kind, flops, parameters]) => [name, FLOP_KINDS[kind] ?? kind, si(flops), si(parameters)]);
  return element("details", {}, costLine(module.name, module.flops, module.flops / total, module.parameters),
    module.bytes ? element("p", { class: "hint" }, `${byteSize(module.bytes)} of table rows are looked up per example.`) : null,
    textTable(["Part", "Kind", "FLOPs", "Parameters"], rows, [2, 3]));
}

function cost(trial, largest) {
  if (!trial.cost.length) return [element("p", { class: "hint" }, trial.model.average.length ? "An average costs what its networks cost together." : "No cost was recorded for this trial.")];
  const total = Math.max(1, largest ?? trial.flops ?? 0);
  const layers = trial.cost.map(([name, places]) => {
    const modules = places.map((place) => data.costs[place]);
    const sum = (of) => modules.reduce((so_far, module) => so_far + of(module), 0);
    const flops = sum((module) => module.flops);
    return element("details", {}, costLine(name, flops, flops / total, sum((module) => module.parameters)),
      modules.map((module) => moduleCost(module, total)));
  });
  const others = trial.cost.flatMap(([, places]) => places).reduce((sum, place) => sum + data.costs[place].other, 0);
  return [element("p", { class: "hint" }, `FLOPs forward per example, ${si(trial.flops)} in all; outside this number are ${si(others)} of elementwise work, and look-ups. A line opens.`),
    element("div", { class: "cost" }, layers)];
}
