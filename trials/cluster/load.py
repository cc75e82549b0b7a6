"""Clusters by name (`trials/cluster/catalog/*.yaml`), by a YAML file's path, or this machine."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from dhen.errors import UserError, unknown_name
from dhen.values import load_yaml, parse
from trials.cluster.cluster import Cluster
from trials.cluster.here import this_machine

THIS = "this"
"""The name of the machine that asks."""


def catalog() -> dict[str, Cluster]:
    """Returns the named clusters, without this machine."""
    with resources.as_file(resources.files("trials.cluster") / "catalog") as folder:
        return {file.stem: _read(file) for file in sorted(Path(folder).glob("*.yaml"))}


def load_cluster(name_or_path: str) -> Cluster:
    """Returns a cluster by its name, by the path of a YAML file of your own, or `this`, which is measured
    (seconds).

    Raises:
        UserError: for an unknown name, with the names there are; for a bad value in a file, with its key and what
            would work.
    """
    if name_or_path == THIS:
        return this_machine()
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".json"):
        return _read(path)
    named = catalog()
    if name_or_path in named:
        return named[name_or_path]
    error = unknown_name("cluster", name_or_path, [*named, THIS])
    raise UserError(f"{error} Or give the path of a YAML file.")


def _read(path: Path) -> Cluster:
    """Returns the file's cluster, named after the file; a number that gives no source has the file as its
    source."""
    data: Any = load_yaml(path)
    cluster = parse(Cluster, {"name": path.stem} | data if isinstance(data, dict) else data, str(path))
    sources = dict.fromkeys(cluster.numbers(), f"your file {path.name}") | cluster.sources
    return cluster.replace(sources=sources)
