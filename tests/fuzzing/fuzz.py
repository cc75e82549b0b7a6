"""Fuzzes what the program reads, by libFuzzer (atheris): inputs that make new lines run are kept and varied.

    make fuzz                               10,000 inputs for each target
    make fuzz INPUTS=100000 ARGS="schema bundle --folder fuzzed"

What breaks a target is written into the folder, and is one more test once it lies in tests/fuzzing/found/TARGET/.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

HERE = Path(__file__).parent
for place in (HERE.parents[1], HERE.parent):
    sys.path.insert(0, str(place))
SECONDS, MEBIBYTES = 30, 6144
"""What one input may take."""
TOGETHER = "together"
READERS = (
    *("dhen", "search.bundles", "search.config", "search.plan_request", "search.execution", "search.serving"),
    *("spaces", "trials.cluster", "trials.data", "trials.records.events", "trials.store", "yaml"),
)
"""Packages whose new lines count."""


def main() -> None:
    """Fuzzes the targets one after another, each in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help="default: all")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where inputs are kept, to go on with them another time")
    parser.add_argument(
        "--together", action="store_true", help="all targets in one process, which starts sooner"
    )
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = (given.folder or Path(tempfile.mkdtemp())).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if given.only is not None:
        _fuzz(given.only, folder, given.inputs, given.seed)
        return
    from fuzzing.targets import targets

    known = targets(folder)
    failed = []
    for name in [TOGETHER] if given.together else given.targets or known:
        if name not in known and name != TOGETHER:
            parser.error(f"{name!r} is no target; there are {', '.join(known)}.")
        words = ("--only", name, "--inputs", given.inputs, "--seed", given.seed, "--folder", folder)
        ended = subprocess.run(
            [sys.executable, __file__, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        print(f"{name}: {_last(ended.stdout)}", flush=True)
        if ended.returncode:
            failed.append(name)
            print(ended.stdout[-6000:], flush=True)
    sys.exit(1 if failed else 0)


def _last(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.startswith("Done ")), "broke")


def _fuzz(name: str, folder: Path, inputs: int, seed: int) -> None:
    """Fuzzes one target; ends the process."""
    with atheris.instrument_imports(include=list(READERS)):
        from fuzzing.targets import targets, together

        from dhen.errors import UserError
    known = targets(folder)
    target = together(known) if name == TOGETHER else known[name]
    corpus = folder / "inputs" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for index, data in enumerate(target.seeds):
        (corpus / f"seed{index}").write_bytes(data)

    def one(data: bytes) -> None:
        with contextlib.suppress(UserError):
            target.read(data)

    options = {
        "runs": inputs,
        "seed": seed + 1,  # 0 is libFuzzer's word for any
        "len_control": 0,
        "dict": HERE / "tokens.dict",
        "timeout": SECONDS,
        "rss_limit_mb": MEBIBYTES,
        "artifact_prefix": f"{folder}/{name}-",
    }
    atheris.Setup([name, *(f"-{key}={value}" for key, value in options.items()), str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
