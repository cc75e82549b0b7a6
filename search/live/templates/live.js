// Follows the study while the page is open: a strip says what trains now and whether the server is still there.
// A report takes in news by itself. A page without a version shows a problem; it is loaded anew once there is a report.
(() => {
  if (window.studyLiveStrip) return;
  window.studyLiveStrip = true;
  const POLL_MS = 2000;
  const hook = document.querySelector('meta[name="study-live"]');
  const strip = document.createElement("aside");
  strip.id = "study-trains";
  strip.setAttribute("aria-label", "Live");
  strip.style.cssText = "position:fixed;right:.75rem;bottom:.75rem;z-index:1000;max-width:calc(100vw - 1.5rem);"
    + "padding:.3rem .7rem;border:1px solid GrayText;border-radius:.4rem;background:Canvas;color:CanvasText;"
    + "font:13px/1.4 system-ui,sans-serif;white-space:pre-line";
  const style = document.createElement("style");
  style.textContent = "@media print { #study-trains { display: none } }";
  let failures = 0;

  const training = (trials) => trials.map((trial) => {
    const share = Math.round(100 * trial.examples / trial.total_examples);
    const speed = Math.round(trial.examples_per_second).toLocaleString("en");
    return `trial ${trial.trial} trains: ${share} % of its passes at most, ${speed} examples/s`;
  });
  const say = (lines, role) => {
    const text = lines.join("\n");
    if (strip.textContent !== text) strip.textContent = text;
    strip.setAttribute("role", role);
    if (!strip.isConnected) document.body.append(style, strip);  // the page may have been replaced under it
  };

  const look = async () => {
    try {
      const answer = await fetch(hook.content, { cache: "no-store" });
      if (!answer.ok) throw new Error(`answer ${answer.status}`);
      const state = await answer.json();
      failures = 0;
      say(state.problem ? [state.problem] : ["live", ...training(state.training)], "note");
      if (!hook.dataset.version && state.version && !state.problem) location.reload();
    } catch (error) {
      failures += 1;
      if (failures > 1) say(["dhen-search ui does not answer; this page stands as it was"], "status");
    }
    setTimeout(look, POLL_MS);
  };
  look();
})();
