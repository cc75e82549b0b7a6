"""Opens a storage of Optuna by its URL, or by the path of a journal file; trouble with it is said in words."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from dhen.errors import UserError
from dhen.values import Value
from spaces.axes import Axis, ChoiceAxis, is_number, label
from spaces.space import Space
from trials.store.database import masked, trouble

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage


SQLITE_FILE = b"SQLite format 3\x00"
MOST_OF_A_LINE = 4096
"""Bytes of a file that are looked at to tell what it is."""
OPTUNAS_TABLE, MIGRATED = "version_info", "alembic_version"
"""A table that is Optuna's alone, and one that other programs with migrations (MLflow) have too."""


class WrittenStudy(Value):
    """A study as it was written (`dhen-search optuna --json`)."""

    storage: str
    """Where it stands, without a password."""
    study: str
    """Name of the Optuna study."""
    trials: int
    """Number of its trials: the candidates that are points of the space."""


def is_url(storage: str) -> bool:
    """Returns whether a storage is named by a URL; else by the path of a journal file."""
    return "://" in storage


def shown(storage: str) -> str:
    """Returns a storage's name as it may be printed: without a password."""
    return masked(storage) if is_url(storage) else storage


def open_storage(storage: str) -> tuple[BaseStorage, Callable[[], None]]:
    """Opens a storage, whose tables or file are made if there are none.

    Args:
        storage: a SQLAlchemy URL, or the path of a journal file.

    Returns:
        The storage, and what closes its connections.

    Raises:
        UserError: if it cannot be used, or holds the tables of another program.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with in_words(storage):
        if is_url(storage):
            _check_tables(storage)
            database = optuna.storages.RDBStorage(storage)

            def close() -> None:
                database.remove_session()
                database.engine.dispose()

            return optuna.storages.get_storage(database), close
        return _journal(Path(storage)), lambda: None


@contextlib.contextmanager
def in_words(storage: str) -> Iterator[None]:
    """A context in which what the storage's libraries raise becomes a UserError that says what would work."""
    import optuna

    try:
        yield
    except UserError:  # which is a ValueError too
        raise
    except optuna.exceptions.StorageInternalError as error:
        cause = error.__cause__
        raise UserError(trouble(storage, cause if isinstance(cause, Exception) else error)) from None
    except SQLAlchemyError as error:
        raise UserError(trouble(storage, error)) from None
    except ImportError as error:
        missing = error.__cause__ or error
        raise UserError(
            f"the Optuna storage {shown(storage)} needs a driver ({missing}); for PostgreSQL "
            "`pip install 'psycopg[binary]'`."
        ) from None
    except (optuna.exceptions.OptunaError, RuntimeError, OSError, ValueError, KeyError) as error:
        # tables of another version, a journal that is damaged or has no space, another program in between
        reason = masked(f"{type(error).__name__}: {error}")
        raise UserError(
            f"the Optuna storage {shown(storage)} cannot be used ({reason}); mend it, or name another: it can be "
            "made again."
        ) from None


def _check_tables(url: str) -> None:
    """Checks that a database is not another program's before Optuna adds tables to it that it could not use."""
    engine = sa.create_engine(url)
    try:
        names = set(sa.inspect(engine).get_table_names())
    finally:
        engine.dispose()
    if MIGRATED in names and OPTUNAS_TABLE not in names:
        raise UserError(
            f"{shown(url)}: this database is that of another program (MLflow?), and Optuna needs one of its own; "
            "name another, such as sqlite:///optuna.db."
        )


def _journal(path: Path) -> BaseStorage:
    """A journal file; what is there and is none is refused before a line is appended."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    if path.is_dir():
        raise UserError(f"{path} is a folder; name a journal file, or a URL such as sqlite:///optuna.db.")
    first = b""
    if path.exists():
        with path.open("rb") as file:
            first = file.readline(MOST_OF_A_LINE)
    if first.startswith(SQLITE_FILE):
        raise UserError(f"{path} is a SQLite file: sqlite:///{path} is its URL.")
    if first and b'"op_code"' not in first:
        raise UserError(
            f"{path} is no journal file of Optuna; name one, new or of Optuna, or a URL such as "
            "sqlite:///optuna.db."
        )
    return optuna.storages.JournalStorage(JournalFileBackend(str(path)))


# A space's axes as distributions of Optuna, in the values that people know: `embedding_dim` is 16, not its
# place.
#
# What the samplers are given (`spaces/axes.py`) counts places in a list, so that a list may grow within one
# Optuna study; nobody could read that in a chart. Here a choice of numbers is a range between its ends, which
# may grow too. All other choices are categorical; if one of them grows, the mirror is made anew
# (docs/decisions/0033-optuna-mirror.md).


def distributions_of(space: Space) -> dict[str, BaseDistribution]:
    """Returns a distribution for each axis of the space, by name, in the order of sampling.

    Args:
        space: the space, as wide as the study has made it.
    """
    return {axis.name: _distribution(axis) for axis in space.axes}


def _distribution(axis: Axis) -> BaseDistribution:
    """The distribution of one axis, over the values that stand in a point."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(axis, ChoiceAxis):
        if axis.whole:
            return IntDistribution(int(axis.low), int(axis.high), log=axis.log, step=axis.step)
        return FloatDistribution(axis.low, axis.high, log=axis.log)
    numbers = axis.ascending
    if not numbers or not all(map(is_number, axis.values)):
        return CategoricalDistribution([label(value) for value in numbers or axis.values])
    if all(isinstance(number, int) for number in numbers):  # in the widest steps that have them all
        step = math.gcd(*(int(right - left) for left, right in pairwise(numbers)))
        return IntDistribution(int(numbers[0]), int(numbers[-1]), step=step)
    return FloatDistribution(numbers[0], numbers[-1])
