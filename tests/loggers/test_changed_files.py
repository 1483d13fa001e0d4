"""Test resuming runs whose CSV files another program has changed."""

from pathlib import Path

import pytest
from runs import Plain, fit, logs_of, val_loader

from fabric_template import read_logs
from fabric_template.loggers.read_logs import read_table

OPTIONS = {"val": val_loader, "log_every_n_steps": 2}


def run(root, **options):
    return fit(root, Plain, **{**OPTIONS, **options})


@pytest.fixture
def cut(tmp_path):
    """Return the folder of a run of three epochs whose last epoch was not saved."""
    run(tmp_path, max_epochs=2)
    checkpoint = tmp_path / "checkpoints/run/version_0/last.ckpt"
    content = checkpoint.read_bytes()
    run(tmp_path, max_epochs=3, resume="last")
    checkpoint.write_bytes(content)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    run(root, max_epochs=4)
    return root


def with_carriage_returns(lines):
    lines[:] = [line + "\r" for line in lines[:-1]] + lines[-1:]


def with_byte_order_mark(lines):
    lines[0] = "\ufeff" + lines[0]


def with_blank_lines(lines):
    lines[2:2] = ["", ""]


def with_quotes(lines):
    lines[1] = ",".join(f'"{cell}"' for cell in lines[1].split(","))


def with_semicolons(lines):
    lines[:] = [line.replace(",", ";").replace(".", ",") for line in lines]


DIALECTS = [with_carriage_returns, with_byte_order_mark, with_blank_lines, with_quotes, with_semicolons]


@pytest.mark.parametrize("change", DIALECTS)
def test_resuming_keeps_rows_that_another_program_saved_in_a_different_csv_dialect(cut, whole, change):
    for path in (cut / "logs").rglob("*.csv"):
        lines = path.read_text().split("\n")
        change(lines)
        path.write_bytes("\n".join(lines).encode())
    run(cut, max_epochs=4, resume="last")
    assert logs_of(cut) == logs_of(whole)
    assert list((cut / "logs").rglob("*.changed*")) == []


def with_stray_quote(lines):
    lines[1] = '"' + lines[1]


def with_long_cell(lines):
    lines[1] += '"' + "9" * 140_000


def with_comment(lines):
    lines[1] += ", look here"


@pytest.mark.parametrize("change", [with_stray_quote, with_long_cell, with_comment])
def test_resuming_keeps_the_csv_rows_before_and_after_a_damaged_row(cut, whole, change):
    for path in (cut / "logs").rglob("*.csv"):
        lines = path.read_text().split("\n")
        change(lines)
        path.write_text("\n".join(lines))
    texts = {path.name: path.read_text() for path in (cut / "logs").rglob("*.csv")}
    with pytest.warns(UserWarning, match=r"\.csv: another program changed this file"):
        _, _, rows = run(cut, max_epochs=4, resume="last")
    assert rows["epoch"].tolist() == [0, 1, 2, 3]
    for name, text in texts.items():
        path = cut / "logs/run/version_0" / name
        assert path.with_name(f"{name}.changed").read_text() == text
        found, expected = (read_table(root / "logs/run/version_0" / name) for root in (cut, whole))
        assert found.columns == expected.columns
        for row, other in zip(found.rows[1:], expected.rows[1:], strict=True):
            assert row | {"time": "", "waiting": ""} == other | {"time": "", "waiting": ""}


def test_resuming_removes_rows_after_the_checkpoint_even_if_a_user_edited_the_csv_file(cut, whole):
    """The user has deleted a row from metrics.csv and duplicated rows in steps.csv."""
    folder = cut / "logs/run/version_0"
    for name in ("metrics.csv", "steps.csv"):
        lines = (folder / name).read_text().split("\n")
        if name == "metrics.csv":
            del lines[1]
        else:
            lines[2:2] = lines[2:4]
        (folder / name).write_text("\n".join(lines))
    with pytest.warns(UserWarning, match=r"\.csv: another program changed this file\. .* The run restores its"):
        _, _, rows = run(cut, max_epochs=4, resume="last")
    assert rows["epoch"].tolist() == [1, 2, 3]
    steps = read_logs(cut / "logs", steps=True)["step"].tolist()
    assert steps == [2, 4, 6, 4, 6, *range(8, 41, 2)]
    assert logs_of(cut)[0].split("\n")[1:] == logs_of(whole)[0].split("\n")[2:]


@pytest.mark.parametrize("name", ["metrics.csv", "steps.csv"])
def test_resume_keeps_csv_rows_if_another_program_rounded_numbers(cut, name):
    """A spreadsheet program may round numbers when it saves a file."""
    path = cut / "logs/run/version_0" / name
    header, *lines = path.read_text().splitlines()
    rounded = [",".join(f"{float(cell):.4g}" for cell in line.split(",")) for line in lines]
    path.write_text("\n".join([header, *rounded, ""]))
    with pytest.warns(UserWarning, match=rf"{name}: another program changed this file"):
        _, _, rows = run(cut, max_epochs=4, resume="last")
    assert rows["epoch"].tolist() == [0, 1, 2, 3]
    assert read_logs(cut / "logs", steps=True)["step"].tolist() == list(range(2, 41, 2))


def test_resuming_accepts_text_that_a_user_wrote_in_the_monitored_column(cut):
    path = cut / "logs/run/version_0/metrics.csv"
    header, first, *lines = path.read_text().splitlines()
    column = header.split(",").index("val_loss")
    cells = first.split(",")
    cells[column] = "see notes"
    path.write_text("\n".join([header, ",".join(cells), *lines, ""]))
    loop, _, _ = run(cut, max_epochs=4, resume="last", monitor="val_loss")
    assert "val_loss" in str(loop.ending())


def test_resume_backs_up_a_metrics_csv_that_the_run_did_not_write(cut):
    path = cut / "logs/run/version_0/metrics.csv"
    path.write_text("month,sales\n1,2\n")
    with pytest.warns(UserWarning, match=r"Rows .* copied to metrics\.csv\.changed and steps\.csv\.changed\."):
        _, _, rows = run(cut, max_epochs=4, resume="last")
    assert rows["epoch"].tolist() == [2, 3]
    assert path.with_name("metrics.csv.changed").read_text() == "month,sales\n1,2\n"


@pytest.mark.parametrize("name", ["metrics.csv", "steps.csv"])
def test_resuming_warns_if_one_csv_file_is_missing_and_keeps_the_rows_of_the_other(cut, name):
    Path(cut, "logs/run/version_0", name).unlink()
    with pytest.warns(UserWarning, match=rf"{name}: the rows from before the checkpoint are missing"):
        _, _, rows = run(cut, max_epochs=4, resume="last")
    assert rows["epoch"].tolist() == ([2, 3] if name == "metrics.csv" else [0, 1, 2, 3])
    steps = read_logs(cut / "logs", steps=True)["step"].tolist()
    assert steps[-10:] == list(range(22, 41, 2))
    assert (2 in steps) == (name == "metrics.csv")


def test_training_keeps_csv_rows_added_by_another_program(tmp_path, whole):
    class Edits:
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 2:
                for path in tmp_path.rglob("*.csv"):
                    path.write_bytes(path.read_bytes() + b'"9,9,9\n' + b"8" * 150_000 + b"\n")

    run(tmp_path, max_epochs=4, callbacks=[Edits()])
    for found, expected in zip(logs_of(tmp_path), logs_of(whole), strict=True):
        lines = [line for line in found.split("\n") if not line.startswith(("9", "8" * 9))]
        assert lines == expected.split("\n")
