"""Increments of a bundle: what its weights became since a version, small beside a full export, replayed exactly.

BUNDLE/increments/000001/   `increment.json` (what it is, and what it follows), `changes.safetensors` (rows that
changed, new ones, tombstones), `check.safetensors` (scores of the bundle's stored examples after it),
`manifest.json` (SHA-256 of these files). The version before the first is 0, the bundle's own weights.

Each increment names its parent by a hash that covers all of it and, through its own parent, all before it:
what is missing, doubled, out of order or another bundle's cannot be replayed by mistake. An increment appears
whole or not at all, so a reader finds the version before or the one after.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout
from pydantic import Field, TypeAdapter
from safetensors.torch import save_file
from torch import Tensor

from dhen.atomic_write import atomic_folder
from dhen.errors import UserError
from dhen.values import PathBelow, Value, file_hash, load_json, parse
from trials.records.trial_record import NAN_AS_WORD, Metrics
from trials.store.user_cache import locked
from trials.store.weights import Weights, apply_changes, named_tensor, read_weights

# The manifest of a folder: SHA-256 of every file in it, by which a reader knows that they are whole.

MANIFEST = "manifest.json"
_HASHES = TypeAdapter(dict[PathBelow, str])


def write_manifest(folder: Path) -> None:
    """Writes the hashes of all files of a folder; the last of them."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = {str(path.relative_to(folder)): file_hash(path) for path in paths}
    (folder / MANIFEST).write_text(json.dumps(files, indent=1, sort_keys=True), encoding="utf-8")


def check_is_bundle(path: Path) -> None:
    """Checks that a folder says it is a bundle.

    Raises:
        UserError: if it does not.
    """
    if not (path / MANIFEST).is_file():
        raise UserError(f"{path}: no bundle here ({MANIFEST} is missing); `dhen-search export` makes one.")


def first_fault(folder: Path, needed: Iterable[str] = ()) -> str | None:
    """The first file that is not as it was written, with the reason, in words; None if all are.

    Args:
        folder: the folder.
        needed: names of files that are read, and so have to be in the manifest.

    Raises:
        ValueError: for a damaged manifest.
    """
    hashes = file_hashes(folder)
    for name in needed:
        if name not in hashes:
            return f"{name} is not in {MANIFEST}"
    for name, expected in hashes.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if file_hash(folder / name) != expected:
            return f"{name} was altered"
    return None


def file_hashes(folder: Path) -> dict[str, str]:
    """Returns the hashes in a folder's manifest, by file.

    Raises:
        ValueError: for a damaged manifest.
    """
    return _HASHES.validate_json((folder / MANIFEST).read_bytes(), strict=True)


INCREMENTS, INFO, CHANGES, CHECK = (
    "increments",
    "increment.json",
    "changes.safetensors",
    "check.safetensors",
)
DIGITS = 6


class Version(Value):
    """A state of a bundle's weights: which of its base it is, and what it is known by."""

    number: int = Field(ge=0)
    """Number of increments since the base."""
    base: str
    """Identity of version 0."""
    identity: str
    """Hash of all that led to this version."""


class TrainedPeriod(Value):
    """The period of a log that an increment was trained on, and what was predicted for it before."""

    model_config = NAN_AS_WORD

    log: str
    """Fingerprint of the log."""
    length: str
    """The length of periods, such as `1d`."""
    number: int
    """The period's number among those of the log, from 0."""
    first: int | None
    """Time stamp of its first row, milliseconds since 1970; None if the log has none."""
    last: int | None
    """Time stamp of its last row."""
    online: Metrics
    """Metrics of the version before, which had not been trained on the period."""
    frozen: Metrics
    """Metrics of the model as it was when online training began."""
    ne_floor: float | None = None
    """Lowest NE that any model can reach in the period, if the log is generated and says so."""


class IncrementInfo(Value):
    """The content of `increment.json`."""

    increment_version: int = 1
    number: int = Field(gt=0)
    """Number of the version that it makes."""
    base: str
    """Identity of version 0."""
    parent: str
    """Identity of the version that it follows."""
    steps: int
    """Training steps since online training began."""
    period: TrainedPeriod
    begun: int
    """Number of ids that have a row of a growing table and had none in the version before."""
    gone: int
    """Number of ids that had one and have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """An increment on disk whose files are whole."""

    directory: Path
    info: IncrementInfo
    identity: str
    """Identity of the version that it makes."""

    @property
    def version(self) -> Version:
        """The version that it makes."""
        return Version(number=self.info.number, base=self.info.base, identity=self.identity)

    def changes(self) -> Weights:
        """Returns what it changes, as `trials.store.weights` has it."""
        return read_weights(self.directory / CHANGES)

    def scores(self) -> Tensor:
        """Returns the scores of the bundle's stored examples after it."""
        return named_tensor(read_weights(self.directory / CHECK), "score", self.directory / CHECK)

    @property
    def bytes(self) -> int:
        """Size of its files."""
        return sum(path.stat().st_size for path in self.directory.iterdir())


def read_increments(bundle: Path, base: Version) -> tuple[Increment, ...]:
    """Returns the increments in a bundle's folder, in order, each of which follows the one before it.

    Raises:
        UserError: naming the first that is missing, altered or does not follow.
    """
    folders = sorted((bundle / INCREMENTS).glob("[0-9]*"))
    found: list[Increment] = []
    for folder in folders:
        increment = read_increment(folder)
        check_follows(increment, found[-1].version if found else base, str(bundle))
        found.append(increment)
    return tuple(found)


def read_increment(folder: Path) -> Increment:
    """Returns the increment in a folder.

    Raises:
        UserError: for a folder that is none, or whose files are missing or were altered.
    """
    manifest = folder / MANIFEST
    if not (folder / INFO).is_file() or not manifest.is_file():
        raise UserError(
            f"{folder}: no increment here ({INFO} or {MANIFEST} is missing); increments lie below "
            f"{INCREMENTS}/ of a bundle that `dhen-search online` has trained."
        )
    try:
        fault = first_fault(folder, (INFO, CHANGES, CHECK))
        info = parse(IncrementInfo, load_json(folder / INFO), INFO)
    except ValueError:
        raise UserError(f"{folder}: the increment is damaged; take it from its origin again.") from None
    if fault:
        raise UserError(f"{folder}: the increment's file {fault}; take it from its origin again.")
    return Increment(directory=folder, info=info, identity=file_hash(manifest))


def check_follows(increment: Increment, current: Version, bundle: str) -> None:
    """Checks that an increment is the next of a version.

    Raises:
        UserError: for one of another bundle, one that is there already, and one after a gap.
    """
    made, what = increment.version, f"{increment.directory}"
    if made.base != current.base:
        raise UserError(
            f"{what} is an increment of another bundle (of {made.base[:12]}; {bundle} is of {current.base[:12]})."
        )
    if made.number > current.number + 1:
        raise UserError(
            f"{what} makes version {made.number}, and {bundle} is at version {current.number}: version "
            f"{current.number + 1} is missing; apply the increments in order."
        )
    if made.identity == current.identity:
        raise UserError(f"{what} is in {bundle} already, which is at version {current.number}.")
    if made.number <= current.number:
        raise UserError(
            f"{what} makes version {made.number}, which {bundle}, at version {current.number}, has passed."
        )
    if increment.info.parent != current.identity:
        raise UserError(
            f"{what} follows another version {current.number} than that of {bundle}: the two were trained apart."
        )


@contextmanager
def only_trainer(bundle: Path) -> Iterator[None]:
    """Holds a bundle for one process that adds increments to it; the lock goes with the process, however it ends.

    Raises:
        UserError: if another process holds it.
    """
    with ExitStack() as held:
        try:
            held.enter_context(locked(bundle, seconds=0.0))
        except Timeout:
            raise UserError(
                f"{bundle}: another process adds increments to this bundle (`online` or `apply`); wait for it to "
                "end."
            ) from None
        yield


def write_increment(
    bundle: Path, info: IncrementInfo, found: Mapping[str, Tensor], scores: Tensor
) -> Increment:
    """Writes an increment into a bundle, whole or not at all."""
    folder = increment_folder(bundle, info.number)
    with atomic_folder(folder) as building:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, building / CHANGES)
        save_file({"score": scores.contiguous()}, building / CHECK)
        (building / INFO).write_text(json.dumps(info.to_dict(), indent=1), encoding="utf-8")
        write_manifest(building)
    return Increment(directory=folder, info=info, identity=file_hash(folder / MANIFEST))


def take_increments(bundle: Path, current: Version, folders: Sequence[Path]) -> Version:
    """Copies increments into a bundle, one after another, and returns the version that it has then.

    Raises:
        UserError: as `read_increment` and `check_follows`; those before the one that it names are in the bundle.
    """
    for folder in folders:
        increment = read_increment(folder)
        check_follows(increment, current, str(bundle))
        with atomic_folder(increment_folder(bundle, increment.version.number)) as building:
            for name in (*file_hashes(folder), MANIFEST):  # what else lies there is not the increment's
                (building / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, building / name)
        current = increment.version
    return current


def replay(weights: Weights, increments: Iterable[Increment]) -> None:
    """Makes of a base's weights, in place, those of the last of these increments.

    Raises:
        UserError: for an increment that is of another model.
    """
    for increment in increments:
        apply_changes(weights, increment.changes())


def increment_folder(bundle: Path, number: int) -> Path:
    """Returns where a bundle has the increment that makes this version."""
    return bundle / INCREMENTS / f"{number:0{DIGITS}d}"
