"""How long parts of models, and ranks of one training, take on this machine's CPU: measured once and kept."""
