"""The figures of RESULTS.md as a picture, docs/overhead.png: what a step costs in each loop, and with so many logged metrics.

    python benchmarks/picture.py [--out docs/overhead.png]

It reads the tables as the scripts have printed them, so that the picture says what the page says.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OURS, OTHERS, HAND = "#2a6fbb", "#b8bcc2", "#3c3f44"
ROW = re.compile(r"^(\S.*?) {2,}([\d.,]+) +([\d.,]+)( |$)")  # a name, two numbers, whatever else


def table_below(text: str, title: str) -> list[tuple[str, float, float]]:
    """Name and the first two numbers of each row, from the line that begins with the title to an empty one."""
    lines = text.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith(title)), None)
    if start is None:
        raise SystemExit(f"{title!r} begins no line of RESULTS.md: has a script's output changed?")
    rows = []
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        if found := ROW.match(line):
            rows.append(
                (found[1], float(found[2].replace(",", "")), float(found[3].replace(",", "")))
            )
    return rows


def colour_of(name: str) -> str:
    if name.startswith(("ours", "MiniLoop")):
        return OURS
    return HAND if name.startswith("plain") else OTHERS


def draw_steps(ax: Any, title: str, rows: list[tuple[str, float, float]]) -> None:
    """A bar for each loop, its milliseconds behind it."""
    names = [name for name, _, _ in rows][::-1]
    values = [value for _, value, _ in rows][::-1]
    bars = ax.barh(names, values, color=[colour_of(name) for name in names], height=0.7)
    ax.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=8)
    ax.set_title(title, loc="left", fontsize=10)
    ax.set_xlabel("milliseconds a step")
    ax.set_xlim(0, 1.12 * max(values))


def draw_metrics(ax: Any, rows: list[tuple[str, float, float]]) -> None:
    numbers = [int(name) for name, _, _ in rows]
    for column, colour, label in ((1, HAND, "by hand, the same sums"), (2, OURS, "ours, self.log")):
        values = [row[column] for row in rows]
        ax.plot(numbers, values, "o-", color=colour, markersize=4)
        ax.annotate(label, (numbers[-1], values[-1]), (-6, 6 if column == 2 else -70), textcoords="offset points",
                    ha="right", color=colour, fontsize=9)  # fmt: skip
    ax.set_title("a step of a tiny net that logs", loc="left", fontsize=10)
    ax.set_xlabel("logged metrics")
    ax.set_ylabel("microseconds of CPU time a step")
    ax.set_ylim(0, 1.15 * max(row[2] for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "overhead.png")
    arguments = parser.parse_args()
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    text = (HERE / "RESULTS.md").read_text(encoding="utf-8")
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), width_ratios=[1, 1, 0.9])
    draw_steps(axes[0], "64-32-10, batch 32, Adam", table_below(text, "tiny: "))
    draw_steps(axes[1], "784-100-10, batch 100, Adam", table_below(text, "tutorial: "))
    axes[1].set_yticklabels([])
    draw_metrics(axes[2], table_below(text, "logged metrics"))
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=110)
    print(arguments.out)


if __name__ == "__main__":
    main()
