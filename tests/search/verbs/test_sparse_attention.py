"""A study over sparse attention, its export and its predictions, as a user runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Run


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("{layout: [bigbrid]}", "'fixed', 'sliding_window', 'bigbird', 'variable' or 'given'"),
        ("{layout: [given]}", "layout given needs its rows"),
        ("{layout: [given], given: [['10', '1']]}", "2 rows need 2 characters each"),
        ("{window_size: [1]}", "Did you mean 'window'"),
    ],
)
def test_a_bad_layout_in_a_space_is_one_clear_message(
    dhen_search: Run, click_log: Path, tmp_path: Path, module: str, said: str
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(f"modules: {{sparse_attention: {module}}}\nslots: 1\n")
    words = ("run", "--data", click_log, "--out", tmp_path / "study", f"space={space}", "trials=1")
    assert said in dhen_search(*words, code=2).stderr
