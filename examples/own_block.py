"""An interaction module of one's own, in a space of one's own, without a change to this package.

python examples/own_block.py [FOLDER]
"""

import os
import sys
from pathlib import Path

here = Path(__file__).parent

# 1. The module lies in a file of its own, own_block_gate.py: read that first. This variable names such files
#    (several with `:` between them). It is read when the package is imported, here and in the processes that
#    train, so it is set before. On the command line: DHEN_SEARCH_BLOCKS=examples/own_block_gate.py dhen-search
#    run ...
os.environ["DHEN_SEARCH_BLOCKS"] = str(here / "own_block_gate.py")

from search import open_bundle, run_study  # noqa: E402  after the variable is set

SMALL = os.environ.get("SMALL") == "1"
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example-block")

# 2. The space, own_block_space.yaml, lists the gate among its modules. Everything else follows: candidates with
#    it are proposed, planned, trained and reported like those of shipped modules.
study = run_study(
    "demo",
    folder,
    space=str(here / "own_block_space.yaml"),
    trials=2 if SMALL else 20,
    demo={"rows": 3_000 if SMALL else 50_000},
    baseline_trials=1,
    training={"epochs": 1},
    parallel=1,
    threads=1,
    # A network that you want to see is proposed beside the sampler's own, a line of JSON each.
    proposals=str(here / "own_block_proposal.jsonl"),
)

# 3. Which candidates have it, and how well they did.
with_gate = study.trials[study.trials["model"].str.contains("gate")]
print(with_gate[["model", "ne", "ne_vs_baseline_percent", "flops", "outcome"]])

# 4. A bundle with the module needs the same variable wherever it is loaded: no bundle has code in it.
print(open_bundle(folder / "best"))
