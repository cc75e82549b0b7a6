"""The fidelity audit: how well candidates rank on a part of the log as they do on all of it."""
