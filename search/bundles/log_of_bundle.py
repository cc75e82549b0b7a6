"""The log that is named beside a bundle, in the bundle's encoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dhen.errors import UserError
from search.bundles.bundle import Bundle
from search.dataset import log_files
from trials.data.cache import PreparedLog
from trials.data.prepare.prepare_log import prepare


def log_of(bundle: Bundle, data: Sequence[str], **reading: Any) -> PreparedLog:
    """Returns the log that `--data` names, prepared as at training where it is the bundle's, else in its encoding.

    Raises:
        UserError: for anything wrong with the files, and for a prepared log in another encoding than the bundle's,
            whose ids name other rows of its tables.
    """
    files = log_files(data)
    if len(files) == 1 and PreparedLog.is_prepared(files[0]):
        prepared = PreparedLog.open(files[0])
        if prepared.encoding.fingerprint != bundle.encoding.fingerprint:
            raise UserError(
                f"{files[0]}: this log was prepared in another encoding than that of {bundle.directory}; name "
                "the raw files, and they are read in the bundle's."
            )
        return prepared
    log = prepare(files, schema=bundle.encoding.schema, of_another_log=True, **reading)
    same = log.fingerprint == bundle.info.log.fingerprint
    alike = (
        log.encoding.fingerprint == bundle.encoding.fingerprint
    )  # it may be fitted by other rules than it was
    return log if same and alike else prepare(files, encoding=bundle.encoding, **reading)
