"""A table with ever more columns: each new one costs a pass over the file's bytes, and no cell of it is taken apart."""

import csv
import io
import itertools

import pandas as pd
import pytest

from fabric_template.files import disk
from fabric_template.record import parsing, tables
from fabric_template.record.parsing import read_table
from fabric_template.record.tables import Table

FIRST = ("epoch", "step")


def count_rows_read(monkeypatch):
    """A list that grows by every row of a file that is taken apart into cells."""
    rows = []

    def counting(path):
        found = read_table(path)
        rows.extend(found[1])
        return found

    monkeypatch.setattr(parsing, "read_table", counting)
    return rows


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """Hundreds of them would be seconds."""
    monkeypatch.setattr(disk.fs, "fsync", lambda fd: None)


def test_new_names_one_by_one_take_no_row_apart(tmp_path, monkeypatch):
    table, rows = Table(str(tmp_path / "metrics.csv"), FIRST), count_rows_read(monkeypatch)
    for i in range(100):
        table.append({"epoch": i, "step": 10 * i, f"loss,{i}": 0.5, "=note": "a,b"})
    assert rows == []
    names = ["loss,0", "=note", *(f"loss,{i}" for i in range(1, 100))]
    expected = pd.DataFrame(
        {"epoch": range(100), "step": range(0, 1000, 10)}
        | {f"'{name}" if name == "=note" else name: "a,b" if name == "=note" else None for name in names}
    ).astype({f"loss,{i}": float for i in range(100)})
    for i in range(100):
        expected.loc[i, f"loss,{i}"] = 0.5
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "metrics.csv"), expected)


@pytest.mark.parametrize("last", [3, 7, 8])
def test_the_file_is_whole_after_each_row_and_the_same_however_it_came_about(tmp_path, last):
    """At once, by a table that is opened anew for each row, and by one that is cut back and goes on."""
    rows = [
        {"a": 1}, {"a": 2}, {"a": None}, {"step": 1, "b": ""}, {"b": "x\ny", "epoch": 0}, {}, {"c,d": 'q"', "e": 1.5},
        {"a": 1, "f": float("nan")}, {"g": "ü"},
    ][: last + 1]  # fmt: skip
    paths = [str(tmp_path / name) for name in ("one.csv", "anew.csv", "cut.csv")]
    one, positions, texts = Table(paths[0], FIRST), [], []
    for row in rows:
        one.append(row)
        positions.append(one.position())
        texts.append((tmp_path / "one.csv").read_bytes())
        Table(paths[1], FIRST).append(row)
        assert (tmp_path / "anew.csv").read_bytes() == texts[-1]
        columns, read, whole = read_table(paths[0])
        assert (columns, len(read), whole) == (positions[-1]["columns"], positions[-1]["rows"], True)
    for i, place in enumerate(positions):
        cut = Table(paths[2], FIRST)
        for row in rows:
            cut.append(row)
        cut.rewind(**place)
        assert (tmp_path / "cut.csv").read_bytes() == texts[i]
        for row in rows[i + 1 :]:
            cut.append(row)
        assert (tmp_path / "cut.csv").read_bytes() == texts[-1]
        cut.rewind()


@pytest.mark.parametrize(
    "text",
    [b"epoch,a\r\n0,1\r\n", b"\xef\xbb\xbfepoch,a\n0,1\n", b'epoch,a\n0,"1"\n', b"epoch,a\n\n0,1\n", b"epoch,a\n0,1,9\n0,1\n"],
)  # fmt: skip
def test_a_file_of_another_hand_is_read_cell_by_cell(tmp_path, text):
    (tmp_path / "metrics.csv").write_bytes(text)
    Table(str(tmp_path / "metrics.csv"), FIRST).append({"epoch": 1, "b": 2})
    rows = b"0,1,\n0,1,\n" if b"9" in text else b"0,1,\n"
    assert (tmp_path / "metrics.csv").read_bytes() == b"epoch,a,b\n" + rows + b"1,,2\n"


def test_a_hand_between_two_rows_is_noticed(tmp_path):
    path = tmp_path / "metrics.csv"
    table = Table(str(path), FIRST)
    table.append({"epoch": 0, "a": 1})
    table.append({"epoch": 1, "b": 1})
    path.write_bytes(b'epoch,a,b\n0,"x\ny",5\n1,,1\n')
    table.append({"epoch": 2, "c": 1})
    assert path.read_bytes() == b'epoch,a,b,c\n0,"x\ny",5,\n1,,1,\n2,,,1\n'


def test_a_file_of_ours_is_opened_and_cut_back_without_a_row_taken_apart(tmp_path, monkeypatch):
    """A million rows are opened as quickly as they are read from the disk."""
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"epoch,step,loss\n" + b"".join(b"%d,%d,0.5\n" % (i, 10 * i) for i in range(1000)))
    rows = count_rows_read(monkeypatch)
    table = Table(str(path), FIRST)
    assert table.position() == {"rows": 1000, "columns": ["epoch", "step", "loss"]}
    for kept in (1000, 998, 3, 0):
        table.rewind(kept, ["epoch", "step", "loss"])
        assert path.read_bytes().count(b"\n") == kept + 1
    table.append({"epoch": 0, "step": 0, "loss": 0.5})
    assert (rows, path.read_bytes()) == ([], b"epoch,step,loss\n0,0,0.5\n")


def test_what_is_not_taken_apart_would_be_the_same(tmp_path):
    """All short files of these bytes: either looked at cell by cell, or found to be what that would find."""
    path, plain = tmp_path / "metrics.csv", 0
    for marks in itertools.product(b'a,\n\r"', repeat=4):
        path.write_bytes(b"a,b\n" + bytes(marks))
        if (found := parsing.plain_table(str(path))) is not None:
            columns, data, number = found
            again = read_table(path)
            assert (columns, number, True) == (again[0], len(again[1]), again[2])
            assert tables.to_table(columns, again[1]) == data == path.read_bytes()
            plain += 1
    assert plain == 4


def test_lines_are_those_of_the_csv_module_whatever_stands_in_the_cells():
    cells = ["", "1", "0.5", "a b", " a", "a,b", 'a"b', '"', ",", "a\nb", "a\rb", "'", "ä"]
    for width in (1, 2, 3):
        columns = list("xyz"[:width])
        rows = [
            {name: cell for name, cell in zip(columns, row, strict=True) if cell != "'"}  # one that is not there
            for row in itertools.product(cells, repeat=width)
        ]
        for lines in (*([row] for row in rows), rows):
            text = io.StringIO(newline="")
            csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(lines)
            assert tables.to_lines(columns, lines) == text.getvalue().encode()
