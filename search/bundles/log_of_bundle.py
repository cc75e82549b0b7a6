"""The log that is named beside a bundle, in the bundle's encoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from search.bundles.bundle import Bundle
from search.dataset import log_files
from trials.data.cache import PreparedLog
from trials.data.prepare.prepare_log import prepare


def log_of(bundle: Bundle, data: Sequence[str], **reading: Any) -> PreparedLog:
    """The log that `--data` names, prepared as at training where it is the bundle's, else in its encoding.

    Raises:
        UserError: for anything wrong with the files.
    """
    files = log_files(data)
    if len(files) == 1 and PreparedLog.is_prepared(files[0]):
        return PreparedLog.open(files[0])
    log = prepare(files, schema=bundle.encoding.schema, of_another_log=True, **reading)
    same = log.fingerprint == bundle.info.log.fingerprint
    return log if same else prepare(files, encoding=bundle.encoding, **reading)
