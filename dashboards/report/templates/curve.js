// A learning curve, relative to the baseline where there is one: below the line at zero is better.
const CURVE = { width: 600, height: 230, left: 66, right: 14, top: 12, bottom: 36 };

// Round values between two ends, some four of them.
function ticks(low, high) {
  const rough = (high - low) / 4 || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= rough);
  const first = Math.ceil(low / step) * step;
  return Array.from({ length: Math.floor((high - first) / step + 1e-9) + 1 }, (_, place) => first + place * step);
}

// The range that fits the second half of training, for early values would press the rest flat.
function curveRange(curves, relative) {
  const late = curves.flatMap((points) => points.slice(Math.floor(points.length / 2)).map(([, value]) => value));
  const values = relative ? [...late, 0] : late;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const margin = 0.12 * (high - low) || Math.abs(high) * 0.01 || 1;
  return [low - margin, high + margin];
}

function curve(trial, range) {
  const points = curvePoints(trial);
  if (!points.length) return [element("p", { class: "hint" }, "Nothing was evaluated in this trial's training.")];
  const relative = Boolean(trial.curve.relative), show = (value) => (relative ? percent(value) : value.toFixed(5));
  const [low, high] = range ?? curveRange([points], relative), last = points.at(-1);
  const inner = { width: CURVE.width - CURVE.left - CURVE.right, height: CURVE.height - CURVE.top - CURVE.bottom };
  const x = (examples) => CURVE.left + inner.width * examples / last[0];
  const y = (value) => CURVE.top + inner.height * (high - Math.max(low, Math.min(high, value))) / (high - low);
  const horizontal = (value, kind) => drawn("line", { class: kind, x1: CURVE.left, x2: CURVE.width - CURVE.right, y1: y(value), y2: y(value) });
  const lines = ticks(low, high).map((value) => [horizontal(value, "grid"),
    drawn("text", { class: "soft", x: CURVE.left - 8, y: y(value) + 4, "text-anchor": "end" }, show(value))]);
  const marks = ticks(0, last[0]).map((value) => drawn("text", { class: "soft", x: x(value), y: CURVE.height - 18, "text-anchor": "middle" }, si(value)));
  const path = points.map(([examples, value], place) => `${place ? "L" : "M"}${x(examples).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const best = points.reduce((one, other) => (other[1] < one[1] ? other : one));
  const words = `${relative ? "NE against the baseline's at the same number of examples" : "NE on validation"}: ${show(points[0][1])} after ${si(points[0][0])} examples, ${show(last[1])} at the end, lowest ${show(best[1])} after ${si(best[0])}.`;
  const picture = drawn("svg", { class: "curve", viewBox: `0 0 ${CURVE.width} ${CURVE.height}`, role: "img", "aria-label": words }, lines,
    relative && low < 0 && high > 0 ? horizontal(0, "zero") : null, marks,
    drawn("text", { class: "soft", x: CURVE.width - CURVE.right, y: CURVE.height - 3, "text-anchor": "end" }, "training examples seen"),
    drawn("path", { d: path }), drawn("circle", { class: "dot", cx: x(best[0]), cy: y(best[1]), r: 4 }));
  const table = element("details", { class: "data" }, element("summary", {}, "The curve as a table"),
    textTable(["Training examples", relative ? "NE against the baseline" : "NE"], points.map(([examples, value]) => [si(examples), show(value)]), [0, 1]));
  return [element("p", { class: "hint" }, words), picture, table];
}
