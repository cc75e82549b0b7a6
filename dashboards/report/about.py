"""What a study was run on and with, as pairs of a name and a text."""

from __future__ import annotations

from dashboards.sentences.stages import number_of_passes
from dashboards.units import byte_size, decimals, si
from trials.study_record import StudyRecord


def facts(record: StudyRecord) -> tuple[tuple[str, str], ...]:
    """Returns the facts of a study that its page shows, and that two studies are compared by."""
    log, cluster = record.log, record.cluster
    known = {
        "Study": record.name,
        "Log": log.name,
        **{split.capitalize(): _rows(record, split) for split in log.rows},
        "Features": f"{log.tables} tables, {log.numeric} numeric" if log.rows else "",
        "Space": record.space,
        "Sampler": f"{record.sampler}, seed {record.seed}",
        "Candidates": _budget(record),
        "Judged by": f"the next {record.period}, before it is trained on" if record.period else "validation",
        "Passes": _passes(record),
        "Planned for": (
            f"{cluster.name}, {cluster.ranks_words} of {byte_size(cluster.hbm)}"
            + ("" if cluster.verified else ", numbers unverified")
            if cluster
            else ""
        ),
        "Serving": f"{record.serving.request}: {record.serving.limits}" if record.serving.limited else "",
        "Table bytes": f"at most {byte_size(record.max_table_bytes)}" if record.max_table_bytes else "",
        "Directory": record.directory,
    }
    return tuple((name, text) for name, text in known.items() if text)


def _passes(record: StudyRecord) -> str:
    found = record.passes
    if found is None:
        return ""
    return number_of_passes(found).rstrip(",") + (", found with the baseline" if found.reason is None else "")


def _rows(record: StudyRecord, split: str) -> str:
    rate = record.log.base_rate.get(split)
    positive = f", {decimals(100 * rate, 2)} % positive" if rate is not None else ""
    return f"{si(record.log.rows[split])} rows{positive}"


def _budget(record: StudyRecord) -> str:
    budget = f" of {record.trials_budget}" if record.trials_budget is not None else ""
    minutes = f", {record.seconds_budget / 60:.3g} minutes" if record.seconds_budget else ""
    return f"{len(record.candidates)}{budget}{minutes}"
