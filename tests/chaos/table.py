"""The committed table of injections, and the page that shows it: `python tests/chaos/table.py` writes it anew."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
if __name__ == "__main__":
    for place in (HERE.parent, HERE.parents[1]):
        sys.path.insert(0, str(place))

from chaos.faults import FAULTS  # noqa: E402
from chaos.injection import Injection  # noqa: E402

INJECTIONS = HERE / "injections.jsonl"
PAGE = HERE.parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- the table of injections -->", "<!-- its end -->"
HEAD = "| fault | injected | lost | doubled | compared | else wrong | recovered in (median s) | at most (s) |"


def append(injection: Injection, path: Path) -> None:
    with path.open("a") as file:
        file.write(injection.model_dump_json(exclude_defaults=True) + "\n")


def injections(path: Path = INJECTIONS) -> list[Injection]:
    return [Injection.model_validate_json(line) for line in path.read_text().splitlines()]


def table(found: Iterable[Injection]) -> str:
    by_fault = defaultdict[str, list[Injection]](list)
    for injection in found:
        by_fault[injection.fault].append(injection)
    lines = [HEAD, "| --- |" + " ---: |" * (HEAD.count("|") - 2)]
    lines += [_line(FAULTS[name].what, by_fault[name]) for name in FAULTS]
    lines.append(_line("all", [one for each in by_fault.values() for one in each]))
    return "\n".join(lines)


def with_table(page: str, found: Iterable[Injection]) -> str:
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table(found)}\n{END}{tail}"


def write_page() -> None:
    PAGE.write_text(with_table(PAGE.read_text(), injections()))


def _line(what: str, found: list[Injection]) -> str:
    lost, doubled, compared = (
        sum(getattr(one, key) for one in found) for key in ("lost", "doubled", "compared")
    )
    wrong = sum(bool(one.problems) and not one.lost and not one.doubled for one in found)
    seconds = [one.recovered_seconds for one in found if one.recovered_seconds is not None]
    times = f"{median(seconds):.1f} | {max(seconds):.1f}" if seconds else " | "
    return f"| {what} | {len(found)} | {lost} | {doubled} | {compared} | {wrong} | {times} |"


if __name__ == "__main__":
    write_page()
