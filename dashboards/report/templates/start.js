// All of it in order; `start` is called again when a live page has been brought up to date.
function start() {
  readStudy();
  restoreTrials();
  watchFigures();
  showTrials();
}

listenToTrials();
listenToAddress();
listenToCopy();
start();
showPanel();
followColours();
const live = document.querySelector('meta[name="study-live"]');
if (live) follow(live);
