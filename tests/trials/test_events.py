"""Events pass from a writer to a reader that tails the file, whole lines only."""

from __future__ import annotations

from pathlib import Path

from trials.records.events import DivergenceEvent, EventReader, EventWriter, FailureEvent, Progress


def test_a_reader_sees_each_event_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    read = EventReader(path)
    assert read() == []
    with EventWriter(path) as write:
        first = Progress(examples=10, total_examples=100, seconds=0.5)
        write(first)
        assert read() == [first]
        assert read() == []
        more = [DivergenceEvent(step=3, loss="nan"), FailureEvent(error="a\nb")]
        for event in more:
            write(event)
        assert read() == more


def test_half_a_line_waits_and_does_not_spoil_the_next_event(tmp_path: Path) -> None:
    """A rank whose event found no space says so in another one, should there be some space by then."""
    path = tmp_path / "events.jsonl"
    told, failed = Progress(examples=10, total_examples=100, seconds=0.5), FailureEvent(error="no space")
    line = told.model_dump_json() + "\n"
    path.write_text(line + line[:10])
    read = EventReader(path)
    assert read() == [told]
    with path.open("a") as file:
        file.write(line[10:] + line[:20])
    assert read() == [told]
    with EventWriter(path) as write:
        write(failed)
    assert read() == [failed]
