"""A bundle copied to another folder, with what its increments brought in the weights themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from dhen.atomic_write import atomic_folder
from search.bundles.bundle import CHECK, INFO, Bundle, check_place, weights_names
from search.bundles.increments import replay
from search.bundles.manifest import MANIFEST, file_hashes, write_manifest
from trials.storage.weights_file import read_weights, save_weights


def copy_whole(bundle: Bundle, out: Path) -> None:
    """Writes a bundle that begins with the version that this one has; increments that follow suit both.

    Raises:
        UserError: where `out` is something else than a bundle.
    """
    check_place(out)
    with atomic_folder(out) as building:
        for name in (*file_hashes(bundle.directory), MANIFEST):
            (building / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.directory / name, building / name)
        if not bundle.increments:
            return
        (name,) = weights_names(bundle.info)
        weights = read_weights(building / name)
        replay(weights, bundle.increments)
        save_weights(weights, building / name)
        stored = load_file(building / CHECK)
        save_file(stored | {"score": bundle.increments[-1].scores()}, building / CHECK)
        info = bundle.info.replace(version=bundle.version, trained=bundle.trained)
        (building / INFO).write_text(json.dumps(info.to_dict(), indent=1), encoding="utf-8")
        write_manifest(building)
