// A page that is served while its study goes on follows it: once the version differs, the page is fetched anew and what
// has changed is put in place. What the reader has open, chosen and scrolled to stays.
const POLL_MS = 2000, MOST_POLL_MS = 30000;

function sayLive(text) {
  const status = document.querySelector(".live");
  if (status.textContent === text) return;
  status.textContent = text;
  status.hidden = !text;
}

// Figures that are drawn keep their drawing; it is drawn again where its data differ.
function keepDrawings(fresh) {
  for (const figure of fresh.querySelectorAll("figure")) {
    const old = byId(figure.id), drawing = old?.querySelector(".drawing");
    if (!old?.dataset.drawn || !figure.querySelector(".drawing")) continue;
    const changed = old.querySelector("script").textContent !== figure.querySelector("script").textContent;
    figure.querySelector(".drawing").replaceWith(drawing);
    figure.dataset.drawn = "yes";
    if (changed) queueMicrotask(() => draw(figure));
  }
}

async function bringUpToDate() {
  const answer = await fetch(location.href, { cache: "no-store" });
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (!fresh.getElementById("study-data")) throw new Error("the address answered with something else than the page");
  const { scrollX, scrollY } = window;
  const open = [...document.querySelectorAll("main details[open]")].map((details) => details.closest("[id]")?.id);
  keepDrawings(fresh);
  for (const part of ["main", ".bar nav", ".progress", "#study-data"]) document.querySelector(part).replaceWith(document.adoptNode(fresh.querySelector(part)));
  document.title = fresh.title;
  start();
  for (const id of open) byId(id)?.querySelector("details")?.setAttribute("open", "");
  window.scrollTo(scrollX, scrollY);
  showPanel();
  return fresh.querySelector('meta[name="study-live"]')?.dataset.version;
}

async function follow(meta) {
  let version = meta.dataset.version, pause = POLL_MS;
  for (;;) {
    await new Promise((resume) => { setTimeout(resume, pause); });
    try {
      const answer = await fetch(meta.content, { cache: "no-store" });
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      const now = (await answer.json()).version;
      if (now !== version) version = (await bringUpToDate()) ?? now;
      [pause, version] = [POLL_MS, version];
      sayLive("live");
    } catch (error) {
      pause = Math.min(2 * pause, MOST_POLL_MS);
      sayLive(`not up to date: ${error.message}`);
    }
  }
}
