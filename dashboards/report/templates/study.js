// The study's data, read once, and again when a page that is live has been brought up to date.
let data = null;
let trialOf = new Map();

function readStudy() {
  data = JSON.parse(byId("study-data").textContent);
  trialOf = new Map(data.trials.map((trial) => [trial.n, trial]));
}

// A trial's cell in the column with this id; null where the study has no such column.
function cell(trial, id) {
  const place = data.columns.findIndex((column) => column.id === id);
  return place < 0 ? null : trial.cells[place];
}

function curvePoints(trial) {
  if (!trial.curve) return [];
  const [percents, nes] = data.study.scales;
  const scale = trial.curve.relative ? percents : nes;
  return data.grids[trial.curve.grid]
    .map((examples, place) => [examples, trial.curve.values[place]])
    .filter(([, value]) => value !== null)
    .map(([examples, value]) => [examples, value / scale]);
}
