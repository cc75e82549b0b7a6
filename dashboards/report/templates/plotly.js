// plotly.js lies packed in the page and is unpacked when the first figure is to be drawn.
let plotlyReady = null;

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function loadPlotly() {
  const packed = byId("plotly");
  const script = element("script", {}, await unpacked(packed.textContent));
  document.head.append(script);
  script.remove();
  packed.remove();
  return window.Plotly;
}

// Resolves to Plotly; to null in a browser that cannot unpack it, in which figures are tables.
function plotly() {
  plotlyReady ??= typeof DecompressionStream === "undefined" ? Promise.resolve(null) : loadPlotly();
  return plotlyReady;
}
