"""Takes the pictures of the documents from a finished study: report, terminal and MLflow, as PNG files.

    .venv/bin/python docs/take_pictures.py runs/first

`runs/first` is the tutorial's study. Pictures are as people see them: the report and MLflow in Chromium, the
terminal as Rich draws what `dhen-search status` prints. PNG files keep 128 colours, which makes them a third of
the size.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from chromium import Chromium  # noqa: E402

IMAGES = ROOT / "docs" / "images"
COMMAND = Path(sys.executable).parent / "dhen-search"
COLUMNS, LINES = 118, 22
COLOURS = 128
FONT = "<style>.rich-terminal text { font-family: 'DejaVu Sans Mono', monospace !important }</style>"
ASSISTANT = "[...document.querySelectorAll('button[aria-label*=lose]')]"
"""Buttons that close what MLflow opens beside the table."""
RUNS = "[...document.querySelectorAll('a')].filter(a => /\\[/.test(a.textContent)).length"


def report(directory: Path, browser: Chromium) -> None:
    """The first screen of the study's report."""
    subprocess.run([COMMAND, "report", directory], check=True)
    browser.resize(1280, 860)
    browser.open((directory / "report.html").resolve().as_uri())
    browser.wait_for("document.readyState === 'complete' && document.querySelectorAll('svg').length")
    take(browser, "report")


def terminal(directory: Path, browser: Chromium) -> None:
    """What `status` prints in a terminal, its first lines."""
    words = ["script", "-qec", f"stty cols {COLUMNS}; {COMMAND} status {directory}", "/dev/null"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    shown = "\n".join(printed.replace("\r", "").splitlines()[:LINES])
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(Text.from_ansi(f"$ dhen-search status {directory}\n{shown}"))
    svg = console.export_svg(title="dhen-search", theme=MONOKAI)
    page = f"<body style='margin:0'>{FONT}{svg.replace('<svg ', '<svg width=1000 ', 1)}</body>"
    with tempfile.NamedTemporaryFile("w", suffix=".html") as file:
        file.write(page)
        file.flush()
        browser.open(Path(file.name).as_uri())
        height = browser.wait_for("document.querySelector('svg')?.getBoundingClientRect().height")
        browser.resize(1000, int(height))
        take(browser, "terminal")


def mlflow(directory: Path, browser: Chromium) -> None:
    """The table of runs in MLflow."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [COMMAND, "ui", directory, "--port", port]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        said = (word for line in server.stdout for word in line.split())
        address = next(word for word in said if word.startswith("http://") and "#/experiments" in word)
        browser.resize(1440, 640)
        browser.open(address)
        browser.wait_for(RUNS)
        browser.evaluate(f"{ASSISTANT}.forEach(button => button.click())")
        take(browser, "mlflow")
    finally:
        server.terminate()
        server.wait()


def take(browser: Chromium, name: str) -> None:
    """Writes the picture, with few colours."""
    path = IMAGES / f"{name}.png"
    browser.evaluate("new Promise(done => setTimeout(done, 1500))")  # fonts and figures settle
    browser.screenshot(path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size // 1024} KiB")


def main(directory: Path) -> None:
    """Takes all pictures."""
    with tempfile.TemporaryDirectory() as profile, Chromium(Path(profile)) as browser:
        for picture in (report, terminal, mlflow):
            picture(directory, browser)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
