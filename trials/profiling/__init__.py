"""How long parts of models take on this machine's CPU: measured once, fitted, kept for all studies after."""
