"""The built-in demo click log: generated, not collected, and it says so wherever it goes.

It looks like Criteo's (13 counts, 26 categorical columns) with two multi-hot columns, time stamps and a
drifting base rate, and it carries what no real log does: the true probability of every label. The best any
model can do is therefore known, and so is how far a candidate is from it.
"""
