"""A CSV table is whole after each row, also with new columns and after edits by another program."""

import pytest
from fabric_template.files import disk
from fabric_template.record.parsing import read_table
from fabric_template.record.tables import Table

FIRST = ("epoch", "step")


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """Hundreds of them would be seconds."""
    monkeypatch.setattr(disk.fs, "fsync", lambda fd: None)


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
