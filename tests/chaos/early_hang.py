"""The command, in which silent ranks count as hanging after some seconds: `early_hang.py SECONDS WORDS...`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    seconds = float(sys.argv.pop(1))

    from search.planning import attempts

    attempts.DEADLINE_SECONDS = seconds

    from search.cli import main

    main()
