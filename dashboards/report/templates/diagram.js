// An architecture as a drawing: inputs at the top, each layer with its modules, the head at the bottom.
const WIDTH = 600, LANE = 34, BOX = 42, GAP = 10, STEP = 26;

function box(x, y, width, height, kind, title, detail) {
  const middle = x + width / 2;
  const fits = Math.floor(width / 6.2);
  const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  return drawn("g", {}, drawn("title", {}, detail ? `${title}: ${detail}` : title),
    drawn("rect", { class: kind, x, y, width, height, rx: 5 }),
    drawn("text", { class: "strong", x: middle, y: y + (detail ? 17 : height / 2 + 4), "text-anchor": "middle" }, cut(title, Math.floor(width / 7))),
    detail ? drawn("text", { class: "soft", x: middle, y: y + 33, "text-anchor": "middle" }, cut(detail, fits)) : null);
}

// An arrow down the middle, with the shape of what goes along it.
function arrow(y, length, shape) {
  const x = WIDTH / 2, end = y + length;
  return [drawn("line", { class: "wire", x1: x, y1: y, x2: x, y2: end - 5 }),
    drawn("path", { class: "head", d: `M${x - 4} ${end - 6}L${x + 4} ${end - 6}L${x} ${end}Z` }),
    shape ? drawn("text", { class: "soft", x: x + 10, y: y + length / 2 + 4 }, shape) : null];
}

const shapeOf = (embeddings, dim) => (embeddings && dim ? `${embeddings} × ${dim}` : "");

// The boxes of modules, at most four in a row; the height that they take.
function moduleBoxes(modules, top) {
  const inside = WIDTH - 2 * LANE - 2 * GAP, inRow = Math.min(4, modules.length || 1);
  const width = (inside - GAP * (inRow - 1)) / inRow;
  const parts = modules.map(([kind, settings], place) => box(
    LANE + GAP + (place % inRow) * (width + GAP), top + Math.floor(place / inRow) * (BOX + GAP), width, BOX, "module", kind, settings));
  return [parts, Math.ceil(modules.length / inRow) * (BOX + GAP) - GAP];
}

function layerTitle(layer) {
  if (layer.count === 1) return `Layer ${layer.first}`;
  return `Layers ${layer.first} to ${layer.first + layer.count - 1}: ${layer.count} alike`;
}

// One layer, from y on: modules on the norm or on the input, their ensemble, the shortcut's sum, the norm.
function layerGroup(layer, dim, top) {
  const parts = [], wide = WIDTH - 2 * LANE - 2 * GAP;
  let y = top + 30;
  const stage = (kind, title, detail, shape) => {
    parts.push(box(LANE + GAP, y, wide, detail ? BOX : 28, kind, title, detail));
    y += detail ? BOX : 28;
    parts.push(...arrow(y, STEP, shape));
    y += STEP;
  };
  const norm = layer.norm === "none" ? null : `${layer.norm} norm`;
  if (norm && layer.pre) stage("box", norm, "");
  const [modules, height] = moduleBoxes(layer.modules, y);
  parts.push(...modules);
  y += height;
  parts.push(...arrow(y, STEP, layer.modules.length > 1 ? `${shapeOf(layer.each, dim)} from each` : shapeOf(layer.each, dim)));
  y += STEP;
  if (layer.ensemble) stage("box", layer.ensemble[0], layer.ensemble[1], shapeOf(layer.out, dim));
  if (layer.shortcut) {
    const x = WIDTH - LANE - GAP + 8, sum = y + 10;
    parts.push(drawn("path", { class: "wire shortcut", d: `M${WIDTH / 2 + 4} ${top + 12}H${x}V${sum}H${WIDTH / 2 + 14}` }),
      drawn("circle", { class: "box", cx: WIDTH / 2, cy: sum, r: 10 }),
      drawn("text", { class: "strong", x: WIDTH / 2, y: sum + 4, "text-anchor": "middle" }, "+"),
      drawn("text", { class: "soft", x: x - 6, y: sum - 5, "text-anchor": "end" }, "shortcut"));
    y += 20;
    if (norm && !layer.pre) { parts.push(...arrow(y, 18, "")); y += 18; }
  }
  if (norm && !layer.pre) { parts.push(box(LANE + GAP, y, wide, 28, "box", norm, "")); y += 28; }
  y += GAP;
  const frame = drawn("rect", { class: "layer", x: LANE, y: top, width: WIDTH - 2 * LANE, height: y - top, rx: 8 });
  const title = [drawn("text", { class: "strong", x: LANE + GAP, y: top + 19 }, layerTitle(layer)),
    layer.raw ? drawn("text", { class: "soft", x: LANE + GAP + 170, y: top + 19 }, "sees raw numeric inputs too") : null];
  return [[frame, drawn("line", { class: "wire", x1: WIDTH / 2, y1: top, x2: WIDTH / 2, y2: top + 30 }), title, parts].flat(), y];
}

function inputWords(model) {
  return [`${model.tables} embedding tables`, model.numeric ? "numeric inputs" : ""].filter(Boolean).join(", ");
}

// What the drawing shows, in a sentence for those who do not see it.
function modelWords(model) {
  const layers = model.layers.map((layer) => {
    const modules = layer.modules.map(([kind, settings]) => (settings ? `${kind} (${settings})` : kind)).join(", ");
    const rest = [layer.ensemble ? `joined by ${layer.ensemble[0]}` : "", layer.norm === "none" ? "no norm" : `${layer.norm} norm ${layer.pre ? "in front" : "behind"}`,
      layer.shortcut ? "with shortcut" : "no shortcut", layer.out && model.dim ? `${layer.out} embeddings of length ${model.dim} out` : ""];
    return `${layerTitle(layer)}: ${[modules, ...rest.filter(Boolean)].join("; ")}.`;
  });
  const first = `${inputWords(model)}${model.inputs && model.dim ? `: ${model.inputs} embeddings of length ${model.dim}` : ""}.`;
  const head = model.layers.length ? `Head: ${model.head.join("-") || "none"}, then the logit.` : `${model.family}, then the logit.`;
  return [first, ...layers, head].join(" ");
}

function averageOf(model) {
  const link = (number) => element("a", { href: `#trial-${number}` }, `trial ${number}`);
  const parts = [...model.average.map(link), ...model.retrained.map((number) => `retraining ${number}`)];
  return element("p", {}, "The mean of what these networks predict: ", parts.flatMap((part, place) => (place ? [", ", part] : [part])), ".");
}

function diagram(model) {
  if (model.average.length || model.retrained.length) return [averageOf(model)];
  const parts = [box(LANE, 4, WIDTH - 2 * LANE, BOX, "box", "inputs", inputWords(model))];
  let y = 4 + BOX;
  const shape = shapeOf(model.inputs, model.dim);
  for (const layer of model.layers) {
    parts.push(...arrow(y, STEP + 4, layer === model.layers[0] ? shape && `x: B × ${shape}` : shapeOf(layer.in, model.dim)));
    const [group, end] = layerGroup(layer, model.dim, y + STEP + 4);
    parts.push(...group);
    y = end;
  }
  const last = model.layers.at(-1);
  parts.push(...arrow(y, STEP + 4, last ? shapeOf(last.out, model.dim) : shape));
  y += STEP + 4;
  const settings = model.settings.map(([name, value]) => `${name} ${value}`).join(", ");
  const members = model.members > 1 ? `, ${model.members} members` : "";
  parts.push(model.layers.length
    ? box(LANE, y, WIDTH - 2 * LANE, BOX, "box", `head${members}`, `MLP ${[...model.head, 1].join("-")} to the logit`)
    : box(LANE, y, WIDTH - 2 * LANE, BOX, "module", model.family, settings));
  y += BOX;
  const picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${y + 6}`, role: "img", "aria-label": modelWords(model), class: "diagram" }, parts);
  return [picture, model.layers.length && settings ? element("p", { class: "hint" }, settings) : null];
}
