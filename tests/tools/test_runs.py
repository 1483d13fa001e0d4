"""Test list_runs and the command `runs` with list, diff and best."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from fabric_template import CSVLogger, list_runs
from fabric_template.checkpoint.run_folders import RunFolders
from fabric_template.config import LoopConfig
from fabric_template.tools.cli import main

HOSTILE = "\x1b[2J</td><script>alert('x')<!--"


def make_run(
    name="digits", version=0, *, rows=3, lock="17\nfinished\n", loss=1.0, hparams=None, config=None, **columns
):
    """Write the files of a run without training. Each of the ``columns`` contains one value per row."""
    logger = CSVLogger("logs", name=name, version=version)
    options = {"max_epochs": 3, "monitor": "val_loss", "mode": "min", **(config or {})}
    logger.log_hyperparams({"hparams": hparams or {}, "config": options})
    for i in range(rows):
        extra = {column: values[i] for column, values in columns.items()}
        logger.log_epoch({"epoch": i, "step": 10 * (i + 1), "val_loss": loss / (i + 1), "time": 30.0, **extra})
    if lock is not None:
        Path(logger.log_dir, ".lock").write_text(lock)
    return Path(logger.log_dir)


def run_command(capsys, *arguments):
    code = main(["runs", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list_runs_returns_a_row_per_run():
    with open(make_run(hparams={"lr": 0.1}) / "metrics.csv", "a") as file:
        file.write("3,40,0.")
        # A killed run may leave an incomplete last line.
    make_run(version=1, loss=2.0, hparams={"lr": 0.2, "hidden": 8})
    common = {
        "name": "digits",
        "state": "finished",
        "epochs": 3,
        "metric": "val_loss",
        "best_epoch": 2,
        "seconds": 90.0,
    }
    expected = [
        {"version": 0, "best": 1 / 3, "changed": {"lr": 0.1}},
        {"version": 1, "best": 2 / 3, "changed": {"lr": 0.2, "hidden": 8}},
    ]
    folders = [{"folder": str(Path(f"logs/digits/version_{i}").absolute())} for i in (0, 1)]
    frame = list_runs()
    assert " ".join(frame.columns) == ("name version state epochs metric best best_epoch seconds changed folder")
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    assert rows == [{**common, **row, **folder} for row, folder in zip(expected, folders, strict=True)]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mode": "larger"}, r"^list_runs\(mode\): got 'larger', expected \"min\" or \"max\"\.$"),
        ({"metric": "val_los"}, r"^list_runs\(metric\): got val_los, expected one of val_loss, train_f1\.$"),
    ],
)
def test_list_runs_refuses_an_unknown_metric_or_mode(options, error):
    make_run(train_f1=[0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match=error):
        list_runs(**options)


def test_list_runs_returns_no_rows_for_an_empty_folder():
    Path("logs").mkdir()
    assert list(list_runs()["state"]) == []
    with pytest.raises(ValueError, match="got 'nowhere', expected a folder"):
        list_runs("nowhere")


@pytest.mark.parametrize(
    ("lock", "state"),
    [
        ("17\nfinished\n", "finished"),
        ("17\nfailed\n", "failed"),
        ("17\ninterrupted\n", "interrupted"),
        ("17\nfinished\n18\n", "interrupted"),
        ("17\n", "interrupted"),
        (None, "unknown"),
    ],
)
def test_list_runs_reads_the_state_of_a_run_from_its_lock_file(lock, state):
    folder = make_run(rows=2, lock=lock)
    assert list_runs()["state"].tolist() == [state]
    with RunFolders().locked([folder]):
        assert list_runs()["state"].tolist() == ["running"]


@pytest.mark.parametrize(
    ("columns", "config", "asked", "expected"),
    [
        ({"val_acc": [0.1, 0.9, 0.5]}, {"monitor": "val_acc", "mode": "max"}, None, ("val_acc", 0.9, 1)),
        ({"val_acc": [0.1, 0.9, 0.5]}, {"monitor": None}, None, ("val_loss", 1 / 3, 2)),
        ({"val_acc": [0.1, float("nan"), 0.5]}, {}, "val_acc", ("val_acc", 0.5, 2)),
        ({"score": [3.0, 1.0, 2.0]}, {"monitor": "score", "mode": "min"}, None, ("score", 1.0, 1)),
        ({"val_rmse": [3.0, 1.0, float("inf")]}, {}, "val_rmse", ("val_rmse", 1.0, 1)),
    ],
)
def test_list_runs_finds_the_best_value_of_the_monitored_or_given_metric(columns, config, asked, expected):
    make_run(config=config, **columns)
    assert list_runs(metric=asked)[["metric", "best", "best_epoch"]].values.tolist() == [list(expected)]


def test_list_runs_reads_a_run_logged_by_lightning():
    folder = Path("lightning_logs/version_0")
    folder.mkdir(parents=True)
    folder.joinpath("metrics.csv").write_text("epoch,step,train_loss,val_loss\n0,9,,0.5\n0,9,0.7,\n1,19,,0.4\n")
    folder.joinpath("hparams.yaml").write_text("lr: 0.1\n")
    columns = ["state", "epochs", "metric", "best", "best_epoch"]
    assert list_runs("lightning_logs")[columns].values.tolist() == [["unknown", 2, "val_loss", 0.4, 1]]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\n", b"<html>\n", b"", b"x: !!python/object/apply:os.mkdir [bad]\n"])
def test_list_runs_treats_damaged_files_as_empty_and_never_executes_code_in_them(content):
    make_run()
    folder = make_run(version=1)
    for name in ("metrics.csv", "hparams.yaml", "config.yaml"):
        (folder / name).write_bytes(content)
    frame = list_runs()
    assert frame[["state", "epochs"]].values.tolist() == [["finished", 3], ["finished", 0]]
    assert not Path("bad").exists()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.yaml", "model:\n  class_path: a.B\n  init_args:\n"),
        ("config.yaml", "monitor: [val_loss]\n"),
        ("hparams.yaml", "hparams:\n  1: 2\n  init_args: 5\n"),
        ("metrics.csv", "epoch,val_loss,time\n0,1,inf\n1,0.5,-inf\n2,0.4,30\ninf,2,\n"),
    ],
)
def test_list_runs_reads_runs_with_unusual_settings_or_infinite_values(file, text):
    Path(make_run(loss=1.2), file).write_text(text)
    assert list_runs()[["epochs", "best"]].values.tolist() == [[3, pytest.approx(0.4)]]


def test_list_runs_reads_options_from_hparams_yaml_even_if_config_yaml_differs():
    for version, hidden in ((0, 8), (1, 16)):
        folder = make_run(version=version, config={"max_epochs": 5 + version})
        config = {"model": {"class_path": "a.B", "init_args": {"hidden": hidden}}, "max_epochs": 3}
        config["about"] = {"git": version}
        folder.joinpath("config.yaml").write_text(yaml.safe_dump(config))
    changed = [{"hidden": 8, "max_epochs": 5}, {"hidden": 16, "max_epochs": 6}]
    assert list_runs()["changed"].tolist() == changed


# Listing runs of MiniLoop

TRAIN = """
import os, torch
from fabric_template import MiniLoop

def step(net, batch):
    if loop.current_epoch == 2:
        {}
    return net(batch).square().mean()

net = torch.nn.Linear(2, 1)
loop = MiniLoop(max_epochs=4, seed=3, accelerator="cpu")
loop.fit(net, [torch.ones(4, 2)], optimizer=torch.optim.SGD(net.parameters(), lr=0.1), training_step=step)
"""


@pytest.mark.parametrize(
    ("statement", "state"),
    [("pass", "finished"), ("raise RuntimeError", "failed"), ("os.kill(os.getpid(), 2)", "interrupted")],
)
def test_list_runs_shows_the_state_and_options_of_a_mini_loop_run(statement, state):
    errors = {"failed": RuntimeError, "interrupted": KeyboardInterrupt}
    with pytest.raises(errors[state]) if state in errors else contextlib.nullcontext():
        exec(TRAIN.format(statement), {})
    (run,) = list_runs().to_dict("records")
    assert (run["state"], run["epochs"]) == (state, 4 if state == "finished" else 2)
    options = yaml.safe_load(Path("logs/run/version_0/hparams.yaml").read_text())["config"]
    assert (options["max_epochs"], options["seed"]) == (4, 3)


# The runs command, and finding the best run


def test_the_runs_command_lists_all_runs_and_shows_the_best_run(capsys):
    make_run(hparams={"hidden": 8}, val_acc=[0.1, 0.6, 0.4])
    make_run(version=1, hparams={"hidden": 16}, rows=2, lock="17\nfailed\n", loss=2.0, val_acc=[0.1, 0.5])
    assert run_command(capsys) == (
        0,
        "run               state     epochs  metric    best     epoch  trained  changed\n"
        "digits/version_0  finished  3       val_loss  0.33333  2      0:01:30  hidden=8\n"
        "digits/version_1  failed    2       val_loss  1        1      0:01:00  hidden=16\n",
        "",
    )
    checkpoints = Path("checkpoints/digits/version_0").absolute()
    checkpoints.mkdir(parents=True)
    for name, epoch in (("a", 1), ("last", 2)):
        torch.save({"epoch": epoch, "global_step": 10 * (epoch + 1)}, checkpoints / f"{name}.ckpt")
    checkpoints.joinpath("damaged.ckpt").touch()
    folder = Path("logs/digits/version_0").absolute()
    assert run_command(capsys, "best", "--metric", "val_acc")[1] == (
        f"best        val_acc 0.6 in epoch 1\nrun         {folder}\ncheckpoint  {checkpoints / 'a.ckpt'}\n"
    )
    best = run_command(capsys, "best")[1]
    assert best == (
        f"best        val_loss 0.333333 in epoch 2\nrun         {folder}\ncheckpoint  {checkpoints / 'last.ckpt'}\n"
    )


def test_the_runs_diff_command_compares_two_runs(capsys):
    make_run(hparams={"hidden": 8}, lr=[0.1] * 3, val_acc=[0.1, 0.5, 0.4])
    make_run(version=1, rows=2, lock="17\nfailed\n", lr=[0.1] * 3, val_acc=[0.1, 0.7])
    code, out, _ = run_command(capsys, "diff", "logs/digits/version_0", "logs/digits/version_1")
    assert (code, out) == (
        0,
        "               digits/version_0    digits/version_1\n"
        "hidden         8\n"
        "state          finished            failed\n"
        "epochs         3                   2\n"
        "trained        0:01:30             0:01:00\n"
        "best val_loss  0.33333 in epoch 2  0.5 in epoch 1\n"
        "best val_acc   0.5 in epoch 1      0.7 in epoch 1\n",
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "runs: got 'nowhere', expected a folder of runs, such as logs."),
        (["logs", "more"], "runs: got logs more, expected one folder, such as"),
        (["diff", "digits/version_0"], "runs: got diff digits/version_0, expected two runs, such as"),
        (["diff", "logs/digits/version_0", "b"], "runs: got b, expected a run, such as"),
        (["--metric", "f1"], "--metric: got f1, expected one of val_loss."),
        (["best", "empty"], "runs: got empty, expected a folder with runs, such as"),
    ],
)
def test_the_runs_command_prints_errors_on_one_line(capsys, arguments, error):
    make_run()
    Path("empty").mkdir()
    code, out, err = run_command(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert error in err


def test_the_runs_diff_command_accepts_the_names_that_the_runs_command_prints(capsys):
    make_run(hparams={"hidden": 8})
    make_run("a/b", version=1)
    names = [line.split()[0] for line in run_command(capsys)[1].splitlines()[1:]]
    assert names == ["a/b/version_1", "digits/version_0"]
    code, out, _ = run_command(capsys, "diff", *names)
    assert (code, out.split()[:3]) == (0, [*names, "hidden"])


def test_the_runs_diff_command_accepts_csv_files(capsys):
    Path("exports").mkdir()
    for name, loss in (("keras", 0.5), ("other", 0.25)):
        Path("exports", f"{name}.csv").write_text(f"epoch,loss,val_loss\n0,2,1\n1,1,{loss}\n")
    for names in (["exports/keras.csv", "exports/other.csv"], ["exports/keras", "exports/other"]):
        code, out, _ = run_command(capsys, "diff", *names)
        assert (code, " ".join(out.splitlines()[-1].split())) == (0, "best val_loss 0.5 in epoch 1 0.25 in epoch 1")
    assert "exports/keras " in run_command(capsys, "exports")[1]


@pytest.mark.parametrize(
    "arguments",
    ["best logs --metric val_loss", "best --metric val_loss logs", "--mode=min best --metric val_loss logs"],
)
def test_options_of_the_runs_command_may_precede_the_folder(capsys, arguments):
    make_run()
    assert run_command(capsys, *arguments.split())[:2] == run_command(capsys, "best", "logs")[:2]


def test_the_runs_best_command_accepts_a_csv_file_written_by_keras(capsys):
    Path("keras.csv").write_text("epoch,loss,val_loss,val_loss\n0,2,3,1\n1,1,2,0.5\n")
    code, out, _ = run_command(capsys, "best", "keras.csv")
    assert (code, out.splitlines()[1]) == (0, f"run         {Path('keras.csv').absolute()}")


def test_the_runs_command_ends_quietly_if_its_output_pipe_closes():
    for version in range(300):
        make_run(version=version)
    command = [sys.executable, "-m", "fabric_template", "runs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_runs_command_wraps_long_lines_at_spaces(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    hparams = {f"option_{i}": "a-b-c/d" for i in range(6)}
    make_run(hparams=hparams)
    make_run(version=1)
    lines = run_command(capsys)[1].splitlines()
    assert max(map(len, lines)) <= 100
    found = [line[lines[0].index("changed") :] for line in lines[1:]]
    assert " ".join(found).strip() == ", ".join(f"{name}=a-b-c/d" for name in hparams)


def test_list_runs_shows_the_options_that_the_user_set():
    config = vars(LoopConfig(max_epochs=3, monitor="val_loss", seed=1).resolve())
    make_run(config={name: value for name, value in config.items() if name not in ("name", "version")})
    exec(TRAIN.format("pass").replace("seed=3", "seed=3, name='digits', gradient_clip_val=2.0"), {})
    changed = list_runs()["changed"].tolist()
    assert changed == [
        {"max_epochs": 3, "monitor": "val_loss", "seed": 1},
        {"max_epochs": 4, "gradient_clip_val": 2.0, "seed": 3, "accelerator": "cpu"},
    ]


@pytest.mark.parametrize("metric", ["val_smape", "eval/bpb", "val_brier_score", "test_wer"])
def test_the_best_value_of_an_error_metric_is_the_smallest_value(capsys, metric):
    make_run(config={"monitor": metric}, **{metric: [3.0, 1.0, 2.0]})
    assert run_command(capsys, "best")[1].startswith(f"best        {metric} 1 in epoch 1\n")


def test_finding_the_best_run_requires_a_mode_for_an_unknown_metric(capsys):
    make_run(config={"monitor": None}, val_gap=[3.0, 1.0, 2.0])
    assert list_runs(metric="val_gap")["best"].isna().all()
    assert list_runs(metric="val_gap", mode="max")["best"].tolist() == [3.0]
    code, _, err = run_command(capsys, "best", "--metric", "val_gap")
    assert (code, "--mode: not given, and the name val_gap does not show" in err) == (2, True)
    assert "val_gap 1 in epoch 1" in run_command(capsys, "best", "--metric", "val_gap", "--mode", "min")[1]
    assert run_command(capsys, "best", "--mode", "low")[0] == 2


def test_list_runs_does_not_rank_runs_by_the_learning_rate():
    logger = CSVLogger("logs", name="rates")
    logger.log_epoch({"epoch": 0, "step": 10, "lr": 0.1, "lr-SGD": 0.1, "train_loss": 2.0})
    assert list_runs()["metric"].tolist() == ["train_loss"]


def test_finding_the_best_run_requires_a_metric_if_monitors_differ(capsys):
    make_run(val_acc=[0.1, 0.5, 0.4])
    make_run(version=1, config={"monitor": "val_acc", "mode": "max"}, val_acc=[0.1, 0.7, 0.4])
    code, _, err = run_command(capsys, "best")
    assert (code, "--metric: not given, and the runs have several metrics. Write one of val_acc, val_loss" in err) == (
        2,
        True,
    )
    assert run_command(capsys, "best", "--metric", "val_acc")[1].startswith("best        val_acc 0.7 in epoch 1\n")


# Unusual names of runs and hyperparameters


def test_the_runs_command_escapes_terminal_codes_in_names(capsys):
    make_run(hparams={HOSTILE: HOSTILE})
    assert "\x1b" not in run_command(capsys)[1]


def test_list_runs_compares_the_hparams_of_runs_with_different_names():
    make_run("narrow", hparams={"width": 8, "lr": 0.1})
    make_run("wide", hparams={"width": 64, "lr": 0.1, "depth": 2})
    assert list_runs("logs")["changed"].tolist() == [{"width": 8}, {"width": 64}]
