"""The mutations of `tests/mutations.py` stay true as code moves."""

from __future__ import annotations

from mutations import MUTATIONS, ROOT


def test_each_breaks_one_place_and_names_tests_that_there_are() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation.name
        assert mutation.new != mutation.old, mutation.name
        assert mutation.tests, mutation.name
        for test in mutation.tests.split():
            file, _, function = test.partition("::")
            assert f"def {function or 'test_'}" in (ROOT / file).read_text(), f"{mutation.name}: {test}"
