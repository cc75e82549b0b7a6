// Numbers in words, as dashboards/names.py has them; a test holds the two to each other.
const MISSING = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

function si(value) {
  if (!known(value)) return MISSING;
  const prefixes = ["", "k", "M", "G", "T", "P"];
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < prefixes.length - 1) [value, power] = [value / 1000, power + 1];
  if (!power) return String(Number(value.toPrecision(3)));
  const size = Math.abs(value);
  return `${value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0)} ${prefixes[power]}`;
}

function byteSize(value) {
  if (!known(value)) return MISSING;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1024) return `${value.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

function percent(value) {
  if (!known(value)) return MISSING;
  return Math.abs(value) >= 0.005 ? `${value > 0 ? "+" : ""}${value.toFixed(2)} %` : "0.00 %";
}
