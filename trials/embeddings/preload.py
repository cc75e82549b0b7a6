"""TorchRec, imported by the fork server where candidates train on several ranks, so that no rank has to import it.

Where it is missing or broken nothing happens here; a rank that needs it says so.
"""

from __future__ import annotations

import contextlib

from dhen.errors import UserError
from trials.embeddings.torchrec_backend import import_torchrec

with contextlib.suppress(UserError):
    import_torchrec()
