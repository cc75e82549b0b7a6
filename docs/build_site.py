"""Builds the documentation site, `site/`, from the Markdown documents: `make docs` runs it.

Documents are copied as they lie in the repository, so a relative link means the same on a code host and on
the site; what else they link to comes along. The generator is Zensical, which reads `mkdocs.yml`
(docs/decisions/0035-the-guide.md says why).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "pages"
"""`docs_dir` of mkdocs.yml."""
DOCUMENTS = ("*.md", "docs/**/*.md", "benchmarks/README.md", "examples/*.md")
ASSETS = ("docs/site/*",)
GENERATOR = (sys.executable, "-m", "zensical")
ADDRESS = "127.0.0.1:8000"


def files() -> set[Path]:
    """Documents, what their pages are drawn with, and all files of the repository that documents link to."""
    documents = {path for pattern in DOCUMENTS for path in ROOT.glob(pattern)}
    assets = {path for pattern in ASSETS for path in ROOT.glob(pattern)}
    linked = {target for document in documents for target in links(document)}
    return documents | assets | linked


def links(document: Path) -> Iterator[Path]:
    """Files of the repository that a document links to, or shows."""
    for link in re.findall(r"\]\(([^)\s#]+)", document.read_text(encoding="utf-8")):
        target = (document.parent / link).resolve()
        if not link.startswith("http") and target.is_file():
            yield target


def copy_pages() -> None:
    """Makes `build/pages` anew; files that did not change keep their time, which spares a server work."""
    wanted = {path: PAGES / path.relative_to(ROOT) for path in files()}
    if PAGES.exists():
        for old in {path for path in PAGES.rglob("*") if path.is_file()} - set(wanted.values()):
            old.unlink()
    for path, copy in wanted.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            shutil.copyfile(path, copy)


def build() -> int:
    """Builds the site anew, with every warning an error; the generator's exit code."""
    copy_pages()
    return subprocess.run([*GENERATOR, "build", "--clean", "--strict"], cwd=ROOT, check=False).returncode


def serve() -> None:
    """Shows the site until Ctrl-C, and brings what has changed to it once a second."""
    copy_pages()
    server = subprocess.Popen([*GENERATOR, "serve", "--dev-addr", ADDRESS], cwd=ROOT)
    try:
        while server.poll() is None:
            time.sleep(1)
            copy_pages()
    except KeyboardInterrupt:
        pass
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["serve"] else build())
