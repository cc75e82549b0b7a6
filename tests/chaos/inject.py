"""Puts faults into small real studies at random moments, and holds what comes of them to what must be so.

    make chaos                              each fault once
    make chaos SEED=7 N=100 ARGS="rank_killed driver_killed"       ... these in turn, 100 in sum

It prints a line for each injection; docs/reliability.md has what came of the first 530.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "runs" / "chaos"
MOST_STRIKES = 4
"""With so many a study has seven candidates; from eight on some may be stopped early."""
for place in (HERE.parent, HERE.parents[1]):
    sys.path.insert(0, str(place))


def main() -> None:
    from chaos.faults import FAULTS
    from chaos.injection import Chaos
    from tools import TOOLS, find

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", help=f"default: all, which are {', '.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-n", type=int, help="injections in sum; default: each fault once")
    parser.add_argument("--strikes", type=int, default=1, help="of a fault in one study, which takes longer")
    parser.add_argument(
        "--keep", type=Path, default=KEPT, help="where studies that are not as they must be are kept"
    )
    given = parser.parse_args()
    if given.strikes > MOST_STRIKES:
        parser.error(
            f"--strikes {given.strikes}: {MOST_STRIKES} at most; with more a study has so many candidates that "
            "some are stopped, as those before them happened to end"
        )
    for name in given.faults:
        if name not in FAULTS:
            parser.error(f"{name!r} is no fault; there are {', '.join(FAULTS)}.")
    names = []
    for name in given.faults or FAULTS:
        needed = FAULTS[name].tool
        if needed is not None and find(needed) is None:
            print(f"{name}: left out, as it needs {TOOLS[needed].words}", flush=True)
        else:
            names.append(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # as Ctrl-C: nothing is left
    broken = count = studies = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dhen-chaos-")))
        os.environ["DHEN_SEARCH_CACHE"] = str(folder / "cache")
        chaos = Chaos(
            folder, given.seed, dict(os.environ), stack, strikes=given.strikes, keep=given.keep.resolve()
        )
        while count < given.n if given.n is not None else studies < len(names):
            name = names[studies % len(names)]
            found = chaos.inject(name, studies // len(names))
            studies += 1
            if not found:
                print(f"{name}: found nothing to strike", flush=True)
            for injection in found:
                broken += bool(injection.problems)
                print(injection.model_dump_json(exclude_defaults=True), flush=True)
            count += len(found)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
