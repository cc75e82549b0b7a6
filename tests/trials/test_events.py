"""Events pass from a writer to a reader that tails the file, whole lines only."""

from __future__ import annotations

from pathlib import Path

from trials.events import Diverged, EventReader, EventWriter, Failed, Progress


def test_a_reader_sees_each_event_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    read = EventReader(path)
    assert read() == []
    with EventWriter(path) as write:
        first = Progress(examples=10, total_examples=100, seconds=0.5)
        write(first)
        assert read() == [first]
        assert read() == []
        more = [Diverged(step=3, loss="nan"), Failed(error="a\nb")]
        for event in more:
            write(event)
        assert read() == more


def test_half_a_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = Failed(error="late").model_dump_json() + "\n"
    path.write_text(line + line[:10])
    read = EventReader(path)
    assert len(read()) == 1
    with path.open("a") as file:
        file.write(line[10:])
    assert len(read()) == 1
