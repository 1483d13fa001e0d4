"""Test the picture in the README that shows a killed and resumed run."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = "{http://www.w3.org/2000/svg}text"


def last_lines(picture):
    """Return the lines at the end of the animation, from top to bottom."""
    texts = [text for text in ElementTree.fromstring(picture).iter(TEXT) if "past" not in text.get("class")]
    return [text.text for text in sorted(texts, key=lambda text: float(text.get("y")))]


def check_picture(picture):
    """Check that a picture is animated, loads no files, and shows equal rows for the killed and the whole run."""
    assert "@keyframes" in picture
    assert "prefers-reduced-motion" in picture
    assert re.findall(r"<script|href|url\(|@import|<image", picture) == []
    lines = last_lines(picture)
    tables, header = [[]], []
    for line in lines:
        if line.startswith("$ "):
            tables.append([])
        if line.startswith("epoch   step"):
            # On a busy machine, the table ends with a column "waiting", which is empty in some rows. Do not compare it.
            header = line.split()
        if re.match(r" +\d+ ", line):
            row = zip(header, line.split(), strict=False)
            tables[-1].append([cell for name, cell in row if name not in ("time", "waiting")])
    whole, killed, resumed = [table for table in tables if table]
    assert killed + resumed == whole
    assert [line for line in lines if line.endswith("Killed")]
    assert [line for line in lines if re.fullmatch(r"\$ kill -9 \d+", line)]
    assert "the same rows, bit for bit" in lines


def test_the_terminal_recording_in_the_readme_shows_a_killed_and_resumed_run():
    path = DOCS / "terminal.svg"
    check_picture(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 1_000_000


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a pseudoterminal")
def test_the_terminal_picture_script_records_a_killed_and_resumed_run(tmp_path):
    command = [sys.executable, str(DOCS / "terminal_picture.py"), "--epochs", "3", "--out", str(tmp_path / "out.svg")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    check_picture((tmp_path / "out.svg").read_text(encoding="utf-8"))
