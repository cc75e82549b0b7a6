"""TorchRec, imported by the fork server if candidates train on several ranks, so that no rank has to import it.

If it is missing or broken nothing happens here; a rank that needs it says so. Nor with CUDA: FBGEMM asks for
devices as it is imported, and then no process that is forked can use one.
"""

from __future__ import annotations

import contextlib

import torch

from dhen.errors import UserError
from trials.training.embeddings.sharded import import_torchrec

if torch.version.cuda is None:
    with contextlib.suppress(UserError):
        import_torchrec()
