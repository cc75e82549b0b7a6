// The page of two studies has figures and commands, and no panels: points open nothing.
const trialOf = new Map();

listenToCopy();
watchFigures();
followColours();
