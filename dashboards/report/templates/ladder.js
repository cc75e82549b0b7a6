// The memory ladder of a candidate: each technique of its plan as a bar against the memory of a rank.
const ITEM_COLOURS = ["#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#8c6bb1", "#d55e00", "#7f8790", "#b3bac2", "#5c6470"];
const NEAR_LIMIT = 0.2;

function ladderBar(bar, scale, limit) {
  const share = (bytes) => `${Math.max(0, 100 * bytes / scale).toFixed(2)}%`;
  const fill = element("div", { class: "fill", style: `width: ${share(bar.bytes)}` },
    (bar.items ?? []).map(([, bytes], place) => element("span", { style: `width: ${(100 * bytes / bar.bytes).toFixed(2)}%; background: ${ITEM_COLOURS[place % ITEM_COLOURS.length]}` })));
  const over = bar.lacking
    ? element("div", { class: "over", style: `left: ${share(bar.bytes - bar.lacking)}; width: ${share(bar.lacking)}` }) : null;
  const line = limit && limit <= scale ? element("div", { class: "limit", style: `left: ${share(limit)}` }) : null;
  return element("li", { class: bar.state.replace(" ", "-") },
    element("div", { class: "top" }, element("strong", {}, bar.name), element("span", { class: "number" }, byteSize(bar.bytes))),
    element("div", { class: "track", "aria-hidden": "true" }, fill, over, line),
    element("div", { class: "why" }, bar.why, bar.at ? `; the peak is in the ${bar.at}` : ""));
}

function ladder(trial) {
  const plan = trial.held, hbm = data.study.hbm;
  if (!plan) return [element("p", { class: "hint" }, "No plan was recorded for this trial.")];
  const limit = hbm && hbm - plan.margin;
  const margin = plan.margin > 0 ? `, less a margin of ${byteSize(plan.margin)}` : plan.margin < 0 ? `, and the ${byteSize(-plan.margin)} that were taken off every peak` : "";
  const most = Math.max(1, ...plan.bars.map((bar) => bar.bytes));
  const near = limit && most >= NEAR_LIMIT * limit;
  const scale = near ? 1.04 * Math.max(most, limit) : 1.25 * most;
  const where = !limit ? "" : near ? `The line is the memory of a rank of ${data.study.cluster}: ${byteSize(hbm)}${margin}.`
    : `A rank of ${data.study.cluster} has ${byteSize(hbm)}, ${si(hbm / most)} times as much as the longest bar.`;
  const chosen = plan.bars.find((bar) => bar.items);
  const swatches = chosen ? element("ul", { class: "swatches", "aria-label": `Memory of ${chosen.name} by item` },
    chosen.items.map(([name, bytes], place) => element("li", {}, element("i", { style: `background: ${ITEM_COLOURS[place % ITEM_COLOURS.length]}` }), `${name} ${byteSize(bytes)}`))) : null;
  const words = [plan.reason, plan.more, plan.remedy ? `It would fit with ${plan.remedy}.` : "", plan.faster ? `Faster, with more techniques: ${plan.faster}.` : "",
    plan.hostBytes ? `${byteSize(plan.hostBytes)} of the host's memory are taken for offload.` : "", ...plan.notes];
  return [element("p", { class: "hint" }, `Predicted peak of the fullest rank, fewer techniques first. ${where}`),
    element("ol", { class: "ladder" }, plan.bars.map((bar) => ladderBar(bar, scale, limit))), swatches,
    element("p", { class: "hint" }, words.filter(Boolean).join(" "))];
}
