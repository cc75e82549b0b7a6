"""What tables over several ranks need; looked at before any rank starts, so that none waits for one that failed.

Light: neither torch nor TorchRec is imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from dhen.errors import UserError
from trials.records.strategy import Ranks

if TYPE_CHECKING:
    from trials.planner.table_placement import Placement

TORCHREC = "torchrec==1.8.0"
"""TorchRec's requirement; its own requirements clash with ours (another torchmetrics), so it is installed without
them."""
INSTALL = (
    "pip install fbgemm-gpu-cpu==1.8.0 tensordict pyre-extensions tqdm torchmetrics "
    f"&& pip install --no-deps {TORCHREC}"
)
COLUMNS_MULTIPLE = 4
"""Number of values in the vectors as which FBGEMM reads rows, also on a CPU; a row has a multiple of it."""


class UnfitShardError(UserError):
    """A shard of a table that TorchRec's kernels do not take."""


def missing_torchrec(reason: str) -> UserError:
    """Returns the error if TorchRec is needed and cannot be imported."""
    return UserError(
        f"embedding tables over several ranks need TorchRec, which cannot be imported ({reason}). `make setup` "
        f"installs it, or: {INSTALL}    (with a GPU: fbgemm-gpu in place of fbgemm-gpu-cpu). One rank "
        "(ranks=1x1) trains without it."
    )


def check_torchrec() -> None:
    """Checks that what tables over several ranks need is installed.

    Raises:
        UserError: if it is not.
    """
    for package in ("torchrec", "fbgemm_gpu"):
        if find_spec(package) is None:
            raise missing_torchrec(f"there is no {package}")


def check_tables(placement: Placement, ranks: Ranks) -> None:
    """Checks that ranks can hold tables as a placement says.

    Raises:
        UserError: without TorchRec, for a placement for other ranks, for widths that its kernels do not take.
    """
    if len(placement.bytes_per_rank) != ranks.world:
        raise UserError(
            f"the tables were placed on {len(placement.bytes_per_rank)} ranks, and {ranks.world} are to train: "
            "plan again for the ranks there are."
        )
    if ranks.world == 1 or not placement.shards:
        return
    for shard in placement.shards:
        if shard.columns % COLUMNS_MULTIPLE:
            raise UnfitShardError(
                f"table {shard.table!r}: a shard of {shard.columns} columns, and TorchRec's kernels take "
                f"multiples of {COLUMNS_MULTIPLE}: an embedding_dim that is one trains on several ranks."
            )
    check_torchrec()
