"""The log that is named beside a bundle, in the bundle's encoding."""

from __future__ import annotations

from collections.abc import Sequence

from dhen.errors import UserError
from search.bundles.bundle import Bundle
from search.dataset import log_files
from trials.data.cache import PreparedLog
from trials.data.prepare.prepare_log import prepare
from trials.data.read_options import READ_AS_FOUND, ReadOptions


def log_of(bundle: Bundle, data: Sequence[str], options: ReadOptions = READ_AS_FOUND) -> PreparedLog:
    """Returns the log that `--data` names, prepared as at training where it is the bundle's, else in its encoding.

    Raises:
        UserError: for anything wrong with the files, and for a prepared log in another encoding than the bundle's,
            whose ids name other rows of its tables.
    """
    files = log_files(data)
    if len(files) == 1 and PreparedLog.is_prepared(files[0]):
        prepared = PreparedLog.open(files[0])
        if not _in_encoding_of(bundle, prepared):
            raise UserError(
                f"{files[0]}: this log was prepared in another encoding than that of {bundle.directory}; name "
                "the raw files, and they are read in the bundle's."
            )
        return prepared
    log = prepare(files, schema=bundle.encoding.schema, of_another_log=True, options=options)
    same = log.fingerprint == bundle.info.log.fingerprint
    return (
        log
        if same and _in_encoding_of(bundle, log)
        else prepare(files, encoding=bundle.encoding, options=options)
    )


def _in_encoding_of(bundle: Bundle, log: PreparedLog) -> bool:
    """Says whether ids name the same rows in both; one log may be fitted by other rules than it was."""
    return log.encoding.fingerprint == bundle.encoding.fingerprint
