"""Draws the table of rollouts in docs/measured.md: each contender's share of the limit.

    python benchmarks/plot.py [FILE.png]

The numbers are those of the page, so that the two cannot differ. Draw anew when the table changes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).parent.parent
HEAD = "| work (2 workers) | limit |"


def table(page: str) -> tuple[list[str], dict[str, list[float]]]:
    """The works, and for each contender its shares of their limits."""
    lines = page[page.index(HEAD) :].partition("\n\n")[0].splitlines()
    head, _, *rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    speeds = {name: [_speed(row[column]) for row in rows] for column, name in enumerate(head) if column}
    shares = {name: [speed / limit for speed, limit in zip(speeds[name], speeds["limit"], strict=True)]
              for name in speeds if name != "limit"}  # fmt: skip
    return [row[0] for row in rows], shares


def _speed(cell: str) -> float:
    return float(cell.partition(" ")[0].replace(",", ""))


def main(path: Path) -> None:
    works, shares = table((ROOT / "docs" / "measured.md").read_text())
    figure, axes = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
    width = 0.8 / len(shares)
    for index, (name, of_works) in enumerate(shares.items()):
        at = [work + (index - (len(shares) - 1) / 2) * width for work in range(len(works))]
        axes.bar(at, of_works, width, label=name, color="black" if index == 0 else f"C{index}")
    axes.axhline(1, color="grey", linewidth=1, linestyle="--")
    axes.set(ylabel="share of bare environment loops", ylim=(0, 2.3))
    axes.set_xticks(range(len(works)), [work.replace(", ", "\n") for work in works], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=8, ncols=5, loc="outside upper center", frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "curves" / "rollouts.png")
