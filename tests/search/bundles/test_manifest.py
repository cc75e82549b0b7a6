"""The manifest of a folder says which files it has, none outside of it, and all that are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Run

from dhen.errors import UserError
from search.bundles.bundle import CHECK, INFO, read_bundle
from search.bundles.increments import MANIFEST, file_hashes, first_fault, write_manifest


def a_folder(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    write_manifest(folder)
    return folder


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/etc/hostname", "", ".", "a\0b"])
def test_no_name_leads_out_of_the_folder(dhen_search: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("before")
    bundle = a_folder(tmp_path / "sent" / "bundle", INFO, CHECK)
    (bundle / MANIFEST).write_text(json.dumps(json.loads((bundle / MANIFEST).read_text()) | {name: "0"}))
    for read in (file_hashes, first_fault):
        with pytest.raises(ValueError, match="stays in its folder"):
            read(bundle)
    (tmp_path / "sent" / "outside").write_text("sent")
    said = dhen_search("apply", bundle, "--out", tmp_path / "out", code=2).stderr
    assert "manifest.json is damaged" in said
    assert (tmp_path / "outside").read_text() == "before"


def test_a_file_that_is_read_has_to_be_in_the_manifest(tmp_path: Path) -> None:
    bundle = a_folder(tmp_path / "bundle", INFO)
    (bundle / CHECK).write_text("added later")
    with pytest.raises(UserError, match=r"check.safetensors is not in manifest.json"):
        read_bundle(bundle)
