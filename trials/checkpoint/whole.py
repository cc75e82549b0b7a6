"""Whether a checkpoint is as it was written: SHA-256 of its files, which its ranks look through together.

`manifest.json` has those of the files that rank 0 wrote, the index among them; the index has those of the
tensors' files, each from the rank that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter

from dhen.errors import UserError
from dhen.fingerprint import file_hash
from dhen.values import PathBelow
from trials.checkpoint.folders import checkpoints_in, steps_of
from trials.checkpoint.index_file import INDEX, CheckpointIndex
from trials.ranks import Ranks

MANIFEST = "manifest.json"
_HASHES = TypeAdapter(dict[PathBelow, str])


def write_manifest(folder: Path, known: Mapping[str, str]) -> None:
    """Writes the hashes of what rank 0 wrote into a checkpoint, as its last file, less work for `known` ones."""
    names = [path.name for path in folder.iterdir() if path.suffix != ".distcp" and path.name != MANIFEST]
    hashes = {name: known.get(name) or file_hash(folder / name) for name in sorted(names)}
    (folder / MANIFEST).write_bytes(_HASHES.dump_json(hashes))


def written_hashes(folder: Path) -> dict[str, str]:
    """Hashes of the files that rank 0 wrote into a checkpoint, by name.

    Raises:
        OSError: where there is no manifest.
        ValueError: where it is damaged.
    """
    return _HASHES.validate_json((folder / MANIFEST).read_bytes(), strict=True)


def damage(folder: Path, ranks: Ranks) -> str | None:
    """Says which file of a checkpoint is not as it was written, of those that this rank looks at; None: none.

    A rank that does not see the folder finds no damage: there the disk is not shared, which `Checkpoints` says.
    """
    if not folder.is_dir():
        return None
    try:
        hashes = written_hashes(folder)
        if INDEX not in hashes:
            return f"{INDEX} is not in {MANIFEST}"
        if ranks.first and (fault := _altered(folder, hashes)):
            return fault
        index = CheckpointIndex.model_validate_json((folder / INDEX).read_bytes())
    except (OSError, ValueError) as error:
        return " ".join(str(error).split())[:200]
    if (
        unlisted := {chunk.file for tensor in index.tensors.values() for chunk in tensor.chunks}
        - index.sha256.keys()
    ):
        return f"{min(unlisted)} has no hash in {INDEX}"
    own = sorted(index.sha256)[ranks.rank :: ranks.world]
    return _altered(folder, {name: index.sha256[name] for name in own})


def newest_whole(folder: Path) -> tuple[int, Path]:
    """Returns the newest checkpoint in a folder that is as it was written, and the number of steps that it is made
    after; of a process that looks by itself.

    Raises:
        UserError: where there is none.
    """
    for path in checkpoints_in(folder):
        if damage(path, Ranks()) is None:
            return steps_of(path), path
    raise UserError(f"{folder} has no checkpoint that is as it was written, to go on from")


def _altered(folder: Path, hashes: Mapping[str, str]) -> str | None:
    for name, expected in hashes.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if file_hash(folder / name) != expected:
            return f"{name} is not what was written"
    return None
