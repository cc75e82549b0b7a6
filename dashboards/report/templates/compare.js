// The page of two studies has figures and commands, and no panels: points open nothing.
const trialOf = new Map();

listenToCopy();
watchFigures();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAllAgain);
