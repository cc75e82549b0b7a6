// What a reader has chosen (order, filter), kept over a reload; where a page may keep nothing, for as long as it is open.
const memory = {};

function recall(key) {
  try {
    return sessionStorage.getItem(`dhen-search ${document.title.split(":")[0]} ${key}`);
  } catch {
    return memory[key] ?? null;
  }
}

function remember(key, value) {
  memory[key] = value;
  try {
    sessionStorage.setItem(`dhen-search ${document.title.split(":")[0]} ${key}`, value);
  } catch { /* a page in a sandbox has no storage */ }
}
