"""Record a run that is killed and resumed, as an animated picture of a terminal.

Run `python docs/terminal_picture.py` on Linux. The script types commands into bash.
The commands run the first script of README.md with a copy of mini.py. A second bash kills the run.
terminal.svg shows what both terminals displayed, at twice the speed and with shorter pauses.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import os
import pty
import re
import select
import shutil
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
COLUMNS = 62
LONGEST_PAUSE, PAUSE_OF_KEY, FIRST_PAUSE, LAST_PAUSE = 0.4, 0.04, 3.0, 8.0  # seconds
FONT, LINE, MARGIN = 14, 20, 18  # pixels
WIDTH_OF_CHARACTER = 8.4
KEEP_ROWS = "mv logs whole; rm -r checkpoints"
RESUME = 'python train.py  # the same command: fit(..., resume="auto")'
CUT = "cut -d, -f-5 {}/*/*/metrics.csv > {}.csv"
COMPARE = "cmp whole.csv resumed.csv && echo the same rows, bit for bit"
STYLE = """\
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;
fill:#c9d1d9;white-space:pre}
.command{fill:#fff;font-weight:bold}.header{fill:#8b949e}.killed{fill:#ff7b72;font-weight:bold}
.same{fill:#7ee787;font-weight:bold}.past{visibility:hidden}
"""

Frame = tuple[float, list[list[str]]]  # The seconds since the last frame, and each terminal's rows.


class Terminal:
    """A bash in a pseudoterminal, and the rows that it displays."""

    def __init__(self, folder: Path) -> None:
        environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PS1": "$ "}
        environment |= {"TERM": "dumb", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        # After a narrow progress bar, the line has enough space for the message "Killed" of bash.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HOME": str(folder), "TQDM_NCOLS": "54"}
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            command = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
            os.execvpe("bash", command, environment)
        size = struct.pack("HHHH", 100, COLUMNS, 0, 0)
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, size)
        self.rows, self.column, self.cut_bytes = [""], 0, b""

    def read(self, seconds: float) -> bool:
        """Display what bash prints within some seconds. Return whether bash printed anything."""
        if not select.select([self.file], [], [], seconds)[0]:
            return False
        printed = self.cut_bytes + os.read(self.file, 65536)
        text = printed.decode("utf-8", "ignore")
        self.cut_bytes = printed[len(text.encode()) :]
        for character in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text):
            self._display(character)
        return True

    def _display(self, character: str) -> None:
        if character == "\r":
            self.column = 0
            return
        if character == "\n" or self.column == COLUMNS:
            self.rows.append("")
            self.column = 0
        if character != "\n":
            row = self.rows[-1].ljust(self.column)
            self.rows[-1] = row[: self.column] + character + row[self.column + 1 :]
            self.column += 1

    def find_child(self) -> int:
        """Return the process that bash waits for."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0])

    def close(self) -> None:
        """Exit bash, and close the terminal."""
        os.write(self.file, b"exit\n")
        os.close(self.file)
        os.waitpid(self.pid, 0)


class Recorder:
    """Types commands into two terminals, and records what they display."""

    def __init__(self, folder: Path) -> None:
        self.main, self.other = self.terminals = [Terminal(folder), Terminal(folder)]
        self.frames: list[Frame] = []
        self.shown_at = time.monotonic()
        for terminal in self.terminals:
            self.wait_for(terminal, r"^\$ $")

    def record(self, pause: float | None = None) -> None:
        """Record a frame. By default, halve the real pause since the last frame, up to a limit."""
        now = time.monotonic()
        measured, self.shown_at = now - self.shown_at, now
        pause = min(measured / 2, LONGEST_PAUSE) if pause is None else pause
        self.frames.append((pause, [list(terminal.rows) for terminal in self.terminals]))

    def wait_for(self, terminal: Terminal, pattern: str, seconds: float = 300) -> str:
        """Record a terminal until its last rows match. Return the match."""
        until = time.monotonic() + seconds
        while not (found := re.search(pattern, "\n".join(terminal.rows[-3:]))):
            if time.monotonic() > until:
                raise TimeoutError(f"{pattern}: not in\n" + "\n".join(terminal.rows))
            if terminal.read(1.0):
                self.record()
        return found[0]

    def enter(self, terminal: Terminal, command: str) -> None:
        """Type a command, and press the Enter key."""
        for character in command:
            os.write(terminal.file, character.encode())
            terminal.read(5.0)
            self.record(PAUSE_OF_KEY)
        os.write(terminal.file, b"\n")

    def run(self, command: str) -> None:
        """Run a command, and wait until it ends."""
        self.enter(self.main, command)
        self.wait_for(self.main, r"\n\$ $")

    def run_and_kill(self, command: str, epoch: int) -> None:
        """Start a command, and kill it from the other terminal in the middle of an epoch."""
        self.enter(self.main, command)
        row = self.wait_for(self.main, rf"(?m)^ +{epoch - 1}  .*\n")
        until = time.monotonic() + 0.4 * float(row.split()[-1])
        while time.monotonic() < until:
            if self.main.read(0.02):
                self.record()
        self.enter(self.other, f"kill -9 {self.main.find_child()}")
        self.wait_for(self.main, r"Killed\n\$ $")
        self.wait_for(self.other, r"\n\$ $")


def read_script(epochs: int) -> str:
    """Return the first Python block of README.md, with this number of epochs."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    script = re.search(r"^```python\n(.*?)^```", readme, re.M | re.S)[1]  # type: ignore[index]
    return re.sub(r"max_epochs=\d+", f"max_epochs={epochs}", script)


def record_run(epochs: int) -> list[Frame]:
    """Train without interruption, kill and resume a second run, and compare the rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(read_script(epochs), encoding="utf-8")
        shutil.copy(REPOSITORY / "fabric_template" / "mini.py", folder)
        recorder = Recorder(folder)
        recorder.run("python train.py")
        recorder.run(KEEP_ROWS)
        recorder.run_and_kill("python train.py", epoch=epochs // 2)
        recorder.run(RESUME)
        recorder.run(CUT.format("whole", "whole"))
        recorder.run(CUT.format("logs", "resumed"))
        recorder.run(COMPARE)
        for terminal in recorder.terminals:
            terminal.close()
        return recorder.frames


def find_states(frames: list[Frame]) -> list[tuple[int, int, str, float, float | None]]:
    """Return (terminal, row, text, start, end) of each text. ``end`` is None for the last texts."""
    states, shown, now = [], {}, 0.0
    for pause, terminals in frames:
        now += pause
        for terminal, rows in enumerate(terminals):
            for row, text in enumerate(rows):
                previous, start = shown.get((terminal, row), ("", now))
                if text != previous:
                    states.append((terminal, row, previous, start, now))
                    shown[terminal, row] = (text, now)
    states += [(*place, text, start, None) for place, (text, start) in shown.items()]
    return [state for state in states if state[2].strip() and state[3] != state[4]]


def draw_text(text: str, x: float, y: float, kind: str) -> str:
    """Return an SVG text of fixed width, because fonts differ in the width of a character."""
    text = text.rstrip()
    width = f"{WIDTH_OF_CHARACTER * len(text):.1f}"
    return (
        f'<text class="{kind}" x="{x:g}" y="{y:g}" textLength="{width}"'
        f' lengthAdjust="spacingAndGlyphs">{html.escape(text)}</text>\n'
    )


def find_kind(text: str) -> str:
    """Return the CSS class that colors a text."""
    kinds = {
        r"\$ ": "command",
        r"epoch +step": "header",
        r".*Killed$": "killed",
        "the same": "same",
    }
    return next((kind for pattern, kind in kinds.items() if re.match(pattern, text)), "")


def draw(frames: list[Frame]) -> str:
    """Return an SVG that shows the last frame, and then plays all frames in a loop."""
    length = sum(pause for pause, _ in frames) + LAST_PAUSE
    num_rows = [len(rows) for rows in frames[-1][1]]
    tops = [MARGIN + LINE, MARGIN + LINE * (num_rows[0] + 2.5)]
    width = COLUMNS * WIDTH_OF_CHARACTER + 2 * MARGIN
    height = tops[1] + LINE * (num_rows[1] - 1) + MARGIN
    styles, texts = [STYLE], []
    for number, (terminal, row, text, start, end) in enumerate(find_states(frames)):
        kind = f"{find_kind(text)} s{number}" + (" past" if end is not None else "")
        texts.append(draw_text(text, MARGIN, tops[terminal] + row * LINE, kind.strip()))
        shown, hidden = 100 * start / length, 100 * (length if end is None else end) / length
        keys = f"0%{{visibility:hidden}}{shown:.2f}%{{visibility:visible}}"
        keys += f"{hidden:.2f}%{{visibility:hidden}}" if end is not None else ""
        styles.append(f"@keyframes k{number}{{{keys}}}.s{number}{{animation-name:k{number}}}\n")
    # Show the last frame for some seconds, because a reader looks at the picture first.
    delay = FIRST_PAUSE - length
    styles.append(f"text{{animation:{length:.1f}s step-end {delay:.1f}s infinite}}\n")
    line = tops[1] - LINE * 1.6
    label = "another terminal"
    x = width - MARGIN - WIDTH_OF_CHARACTER * len(label)
    texts.append(draw_text(label, x, tops[1], "header"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
        f' viewBox="0 0 {width:g} {height:g}" role="img">\n'
        "<title>A run is killed by kill -9, and the same command resumes it.</title>\n"
        f"<style>\n{''.join(styles)}"
        "@media (prefers-reduced-motion:reduce){text{animation:none!important}}\n</style>\n"
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#0d1117"/>\n'
        f'<path d="M0 {line:g}H{width:g}" stroke="#30363d"/>\n{"".join(texts)}</svg>\n'
    )


def main() -> None:
    """Record the run, and write terminal.svg."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("terminal.svg"))
    options = parser.parse_args()
    options.out.write_text(draw(record_run(options.epochs)), encoding="utf-8")


if __name__ == "__main__":
    main()
