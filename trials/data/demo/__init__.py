"""The built-in demo click log: generated, not collected, and it says so wherever it goes.

It looks like Criteo's (13 counts, 26 categorical columns) with two multi-hot columns, time stamps and a
drifting base rate, and it carries what no real log does: the true probability of every label. The best any
model can do is therefore known, and so is how far a candidate is from it.
"""

from trials.data.demo.spec import DemoLog, Shares
from trials.data.demo.teacher import variance_shares
from trials.data.demo.write import generate

__all__ = ["DemoLog", "Shares", "generate", "variance_shares"]
