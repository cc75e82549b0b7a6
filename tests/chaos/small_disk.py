"""A small disk of its own: root has a tmpfs; for everyone else a limit on the size of files stands for it, which
the kernel refuses in the same way."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from command_line import TIMEOUT_SECONDS
from tools import find
from warm_process import COMMAND_LINE, WarmProcess

ROOMY = "200m"
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY)); "
BALLAST, BLOCK_BYTES = ".ballast", 4096


class SmallDisk:
    """A folder in which so much can be written: in all, or per file where no disk may be mounted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_bytes: int | None = None

    def limit(self, size_bytes: int) -> None:
        if find("mount"):
            self._mount(str(size_bytes))
        else:
            self._file_bytes = size_bytes

    def lift(self) -> None:
        self._file_bytes = None
        if os.path.ismount(self.folder):
            self._mount(ROOMY)

    def fill(self, but_bytes: int = 0) -> None:
        """Takes what is free, less so much; only where a disk is mounted."""
        with (self.folder / BALLAST).open("wb", buffering=0) as ballast, suppress(OSError):
            while os.statvfs(self.folder).f_bavail * BLOCK_BYTES > but_bytes:
                ballast.write(bytes(BLOCK_BYTES))

    def free(self) -> None:
        """Gives back what `fill` has taken."""
        (self.folder / BALLAST).unlink(missing_ok=True)

    def run(self, words: tuple[object, ...], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """The command, in a process of its own."""
        limit = "" if self._file_bytes is None else LIMITED.format(self._file_bytes)
        process = WarmProcess(words, environment, code=limit + COMMAND_LINE)
        said, errors = process.communicate(TIMEOUT_SECONDS)
        return subprocess.CompletedProcess(words, process.wait(), said, errors)

    def close(self) -> None:
        if os.path.ismount(self.folder):
            subprocess.run(["umount", "-l", str(self.folder)], check=True)

    def _mount(self, size: str) -> None:
        options = f"remount,size={size}" if os.path.ismount(self.folder) else f"size={size}"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        subprocess.run(command, check=True, capture_output=True)
