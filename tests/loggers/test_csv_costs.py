"""Test that the cost of reading a CSV file is linear in the numbers of its columns and runs."""

import pytest

from fabric_template.loggers.csv_formats import name_columns, split_runs


class Cell(str):
    """A cell of a CSV file. The class counts all comparisons of cells."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Cell.comparisons += 1
        return str.__eq__(self, other)

    def startswith(self, *args):
        Cell.comparisons += 1
        return super().startswith(*args)


def name_many_columns(number):
    cells = [Cell(f"metric_{index}") for index in range(number)]
    assert name_columns(cells, has_rows=True) == cells


def split_many_runs(number):
    rows = [(run, epoch) for run in range(number) for epoch in range(3)]
    columns = {"run": [Cell(f"r{run}") for run, _ in rows], "epoch": [str(epoch) for _, epoch in rows]}
    columns["loss"] = ["0.5"] * len(rows)
    assert split_runs(columns)["r1"] == {"epoch": ["0", "1", "2"], "loss": ["0.5"] * 3}


@pytest.mark.parametrize("read", [name_many_columns, split_many_runs])
def test_the_cost_of_reading_a_csv_file_grows_linearly(read):
    counts = []
    for number in (100, 200, 300):
        Cell.comparisons = 0
        read(number)
        counts.append(Cell.comparisons)
    few, more, most = counts
    assert most - more <= 1.1 * (more - few)
