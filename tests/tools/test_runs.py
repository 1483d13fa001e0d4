"""list_runs and the verb runs: how runs stand, as their files and locks tell; two compared; the best; a thousand at once."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from calls import calls_of
from interpreter import ready

from fabric_template import CSVLogger, FabricLoop, list_runs
from fabric_template.files.locks import one_writer
from fabric_template.tools.cli import main
from fabric_template.tools.runs import find


def make(name, version, *, rows=3, end="finished", loss=1.0, words=None, hparams=None, root="logs", **columns):
    """What a run leaves, without training."""
    logger = CSVLogger(root, name=name, version=version)
    config = {"max_epochs": 3, "max_steps": -1, "monitor": "val_loss", "mode": "min", **(words or {})}
    logger.log_hyperparams({"hparams": hparams or {}, "config": config})
    for i in range(rows):
        more = {column: values[i] for column, values in columns.items()}
        logger.log_epoch({"epoch": i, "step": 10 * (i + 1), "val_loss": loss / (i + 1), "time": 30.0, **more})
    if end is not None:
        Path(logger.log_dir, ".lock").write_text(f"17\n{end}\n" if end else "17\n")
    return Path(logger.log_dir)


def checkpoint(name, version, content=b"PK\x03\x04 something PK\x05\x06" + 18 * b"\0"):
    path = Path(f"checkpoints/{name}/version_{version}/last.ckpt")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def states(**words):
    return dict(zip(*list_runs(**words)[["version", "state"]].to_dict("list").values(), strict=True))


# ---- the list


def test_what_a_row_says():
    make("digits", 0, hparams={"lr": 0.1})
    make("digits", 1, loss=2.0, hparams={"lr": 0.2, "hidden": 8})
    Path("logs/digits/version_1/.lock").write_text("17\n18\nresumed after step 10 from a b.ckpt\nfinished\n")
    frame = list_runs()
    assert list(frame.columns) == [
        "name", "version", "state", "epochs", "metric", "best", "best_epoch", "seconds", "resumed_from", "changed", "folder"
    ]  # fmt: skip
    assert frame.astype(object).where(frame.notna(), None).to_dict("records") == [
        {
            "name": "digits", "version": version, "state": "finished", "epochs": 3, "metric": "val_loss",
            "best": best, "best_epoch": 2, "seconds": 90.0, "resumed_from": resumed, "changed": changed,
            "folder": str(Path(f"logs/digits/version_{version}").absolute()),
        }
        for version, best, resumed, changed in (
            (0, 1 / 3, None, {"lr": 0.1, "hidden": None}), (1, 2 / 3, "a b.ckpt", {"lr": 0.2, "hidden": 8})
        )
    ]  # fmt: skip


def test_states():
    """From the lock's last line; where a kill has left none, from how far it came."""
    make("run", 0)
    make("run", 1, end="failed", rows=2)
    make("run", 2, end="interrupted", rows=2)
    make("run", 3, end="", rows=2)  # SIGKILL
    make("run", 4, end="", rows=3)  # killed behind its last epoch
    make("run", 5, end="finished", rows=1)  # stopped early
    make("run", 6, end="failed", rows=3)  # a resume that was refused
    make("run", 7, end=None, rows=2)  # MiniLoop's and Lightning's: nobody says
    make("run", 8, end="", rows=0)
    make("run", 9, end="", rows=2, words={"max_epochs": None, "max_steps": 20})
    with one_writer([make("run", 10, end=None, rows=1)]):
        found = states()
    assert list(found.values()) == [
        "finished", "failed", "interrupted", "interrupted", "finished", "finished", "finished", "unknown", "interrupted",
        "finished", "running",
    ]  # fmt: skip
    assert states()[10] == "interrupted"


@pytest.mark.parametrize("content", [b"PK\x03\x04 cut off in its middle", b"", 100 * b"\0"])
def test_a_damaged_checkpoint(content):
    make("run", 0)
    checkpoint("run", 0, content)
    make("run", 1)
    checkpoint("run", 1)
    assert states() == {0: "damaged", 1: "finished"}
    with one_writer(["logs/run/version_0"]):  # it is being written
        assert states() == {0: "running", 1: "finished"}


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00garbage\n\x00\x00\n", b"<html>\n<body>\n", b'"never closed\n1,2\n', b"a,b\n1,2\n"]
)
def test_logs_that_are_none_are_damaged_and_nothing_fails(content):
    make("run", 0)
    Path("logs/run/version_0/metrics.csv").write_bytes(content)
    for name in ("hparams.yaml", "config.yaml", ".lock"):
        Path("logs/run/version_0", name).write_bytes(content)
    assert states() == {0: "damaged"}


def test_files_that_want_to_be_more_than_text(tmp_path):
    """Nothing that they name is built, and nothing unfolds without end."""
    make("run", 0)
    bombs = "&a [x,x,x,x,x,x,x,x,x]"
    for i in range(40):
        bombs += f"\nb{i}: &b{i} [" + ",".join([f"*{'a' if i == 0 else f'b{i - 1}'}"] * 9) + "]"
    Path("logs/run/version_0/hparams.yaml").write_text(
        f"hparams: !!python/object/apply:os.system ['touch {tmp_path}/bad']\n"
    )
    Path("logs/run/version_0/config.yaml").write_text(f"b: {bombs}\n")
    Path("logs/run/version_0/.lock").write_bytes(b"17\nresumed after step 99999999999999999999 from x\n\xff\n")
    found, calls = calls_of(states)
    assert found == {0: "interrupted"}
    assert calls < 1_000_000
    assert not (tmp_path / "bad").exists()


def test_a_torn_last_line_is_no_damage():
    path = make("run", 0, end="") / "metrics.csv"
    path.write_bytes(path.read_bytes() + b"3,40,0.")
    assert states() == {0: "finished"}


def test_changed_words_of_a_run_that_is_alone_are_not_the_defaults():
    make("run", 0, words={"max_epochs": 3, "seed": 7, "gradient_clip_val": None}, hparams={"lr": 0.1})
    assert find()[0].changed == {"max_epochs": 3, "monitor": "val_loss", "seed": 7}


def test_config_yaml_says_more_and_is_said_once():
    for version, hidden in ((0, 8), (1, 16)):
        folder = make("run", version, hparams={"hidden": hidden})
        config = {"model": {"class": "a:B", "hidden": hidden}, "max_epochs": 3, "about": {"git": version}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    assert [run.changed for run in find()] == [{"hidden": 8}, {"hidden": 16}]


@pytest.mark.parametrize(
    "content",
    [
        {"a": {"b": 1, "c": None}, "d": "x:y", "e": 1e-3, "f": True},
        {
            "a": {},
            "b": [1, {"c": 2}],
            "d": "two\nlines",
            "e": "2:30",
            "f": "- x",
            "g": "a: b",
            "h": "'",
            "i": "yes",
            "j": "",
        },
        {"a": {"b": {"c": {"d": 1}}}, "l": "word " * 40, "#": 1, "k#": "x #y"},
        [],
        "text",
    ],
)
def test_words_are_read_as_a_parser_reads_them(content, tmp_path):
    from fabric_template.tools import words

    text = yaml.safe_dump(content, sort_keys=False)
    Path("hparams.yaml").write_text(text)
    expected = {}
    if isinstance(content, dict):
        words._flatten("", content, expected)
    assert {name: value for name, value in words.words_of(Path()).items()} == expected


def test_the_metric_is_the_monitor_or_what_was_validated():
    make("a", 0, words={"monitor": "val_acc", "mode": "max"}, val_acc=[0.1, 0.9, 0.5])
    make("b", 0, words={"monitor": None}, train_loss=[3.0, 2.0, 1.0], val_f1=[0.1, 0.2, math.nan])
    make("c", 0, rows=0)
    found = list_runs()[["metric", "best", "best_epoch"]].to_dict("records")
    assert found[:2] == [
        {"metric": "val_acc", "best": 0.9, "best_epoch": 1},
        {"metric": "val_loss", "best": 1 / 3, "best_epoch": 2},
    ]
    assert list_runs("logs/c")["metric"].isna().all()
    assert list_runs("logs/b", metric="val_f1")["best"].tolist() == [0.2]


def test_names_in_folders_and_versions_with_names():
    make("deep/er", "last")
    make("deep", 10)
    make("deep", 9)
    assert list_runs()[["name", "version"]].values.tolist() == [["deep", 9], ["deep", 10], ["deep/er", "last"]]
    assert list_runs("logs/deep/version_9")["name"].tolist() == ["deep"]
    with pytest.raises(ValueError, match="there is no folder 'nowhere': give the root of the logs, such as logs"):
        list_runs("nowhere")


def test_lightnings_own_folders():
    folder = Path("lightning_logs/version_0")
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("epoch,step,train_loss,val_loss\n0,9,,0.5\n0,9,0.7,\n1,19,,0.4\n1,19,0.6,\n")
    (folder / "hparams.yaml").write_text("lr: 0.1\n")
    (row,) = list_runs("lightning_logs").to_dict("records")
    assert (row["state"], row["epochs"], row["metric"], row["best"], row["best_epoch"]) == (
        "unknown",
        2,
        "val_loss",
        0.4,
        1,
    )


def test_a_hundred_runs_more_are_a_hundred_times_as_much():
    """A thousand take a second or two; counted in calls, so that no machine makes it more."""
    make("run", 0, hparams={"hidden": 8, "lr": 1e-3}, words=vars(FabricLoop(accelerator="cpu", max_epochs=50).config))
    folder = Path("logs/run/version_0")
    columns = "epoch,step,train_loss,train_acc,val_loss,val_acc,lr,time\n"
    rows = columns + "".join(f"{i},{i * 10},0.123456789,0.9,{1 / (i + 1)!r},0.91,0.001,1.5\n" for i in range(50))
    hparams = (folder / "hparams.yaml").read_bytes()
    counted = []
    for numbers in (range(100), range(100, 200), range(200, 300)):
        for i in numbers:
            other = Path(f"logs/run/version_{i}")
            other.mkdir(exist_ok=True)
            (other / "metrics.csv").write_text(rows)
            (other / "hparams.yaml").write_bytes(hparams.replace(b"hidden: 8", f"hidden: {i}".encode()))
            (other / ".lock").write_text("17\nfinished\n")
            checkpoint("run", i)
        found, calls = calls_of(lambda: [run.as_dict() for run in find()])
        counted.append(calls)
        assert len(found) == numbers[-1] + 1
        assert found[-1]["changed"] == {"hidden": numbers[-1]}
    first, second, third = counted
    assert third - second == pytest.approx(second - first, rel=0.05)
    assert third - second < 100 * 7000  # each: 2,300 when this was written, half a millisecond


def test_listing_needs_no_torch():
    code = (
        "import sys; from fabric_template.tools.cli import main; main(['runs', '.']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "there are no runs in .\n"), done.stderr


# ---- runs of the loop itself


TRAIN = """
import os, time, torch
from fabric_template import FabricLoop, TensorLoader

class Slow:
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 2:
            print(os.getpid(), flush=True)
            time.sleep(10_000)

def train(resume=None, **words):
    net = torch.nn.Linear(2, 1)
    data = TensorLoader(torch.ones(8, 2), torch.zeros(8, 1), batch_size=4)
    loop = FabricLoop(accelerator="cpu", max_epochs=4, enable_progress_bar=False, enable_model_summary=False, **words)
    step = lambda net, batch: torch.nn.functional.mse_loss(net(batch[0]), batch[1])
    loop.fit(net, data, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), training_step=step, resume=resume)
"""


def test_a_run_from_its_begin_to_its_end():
    """Running while it trains; interrupted, since it was killed; resumed, and finished: from what a fit leaves."""
    command = ready([sys.executable, "-c", f"{TRAIN}\ntrain(callbacks=[Slow()])"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pid = next(int(line) for line in process.stdout if line.strip().isdigit())
        assert list_runs()[["state", "epochs"]].values.tolist() == [["running", 2]]
        assert list_runs("checkpoints").empty
        os.kill(pid, signal.SIGKILL)
    assert list_runs()[["state", "epochs"]].values.tolist() == [["interrupted", 2]]
    names = {}
    exec(TRAIN, names)
    names["train"](resume="last")
    (row,) = list_runs().to_dict("records")
    assert (row["state"], row["epochs"]) == ("finished", 4)
    assert row["resumed_from"] == "checkpoints/run/version_0/last.ckpt"


# ---- the command


def typed(capsys, *words):
    code = main(["runs", *map(str, words)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_runs_as_typed(capsys):
    make("digits", 0, hparams={"hidden": 8})
    make("digits", 1, hparams={"hidden": 16}, rows=2, end="failed", loss=2.0)
    assert typed(capsys) == (
        0,
        "run               state     epochs  best                        trained     changed\n"
        "digits/version_0  finished  3       val_loss 0.3333 in epoch 2  1 min 30 s  hidden=8\n"
        "digits/version_1  failed    2       val_loss 1 in epoch 1       1 min 0 s   hidden=16\n",
        "",
    )
    _, out, _ = typed(capsys, "logs", "--json")
    assert [(run["state"], run["best"]) for run in json.loads(out)] == [("finished", 1 / 3), ("failed", 1.0)]


def test_diff_as_typed(capsys):
    make("digits", 0, hparams={"hidden": 8}, lr=[0.1] * 3, val_acc=[0.1, 0.5, 0.4])
    make("digits", 1, hparams={"hidden": 16}, rows=2, end="failed", loss=2.0, lr=[0.1] * 3, val_acc=[0.1, 0.5])
    code, out, _ = typed(capsys, "diff", "digits/version_0", "logs/digits/version_1")
    assert (code, out) == (
        0,
        "               digits/version_0     digits/version_1\n"
        "hidden         8                    16\n"
        "state          finished             failed\n"
        "epochs         3                    2\n"
        "trained        1 min 30 s           1 min 0 s\n"
        "last val_loss  0.333333             1\n"
        "best val_loss  0.333333 in epoch 2  1 in epoch 1\n"
        "last lr        0.1                  0.1\n"
        "last val_acc   0.4                  0.5\n"
        "best val_acc   0.5 in epoch 1       0.5 in epoch 1\n"
        "\n"
        "val_loss: other from epoch 0 on, most in epoch 0, by 1\n"
        "lr: equal in all 2 epochs that are in both\n"
        "val_acc: equal in all 2 epochs that are in both\n",
    )
    found = json.loads(typed(capsys, "diff", "digits/version_0", "digits/version_1", "--json")[1])
    assert found["words"] == {"hidden": [8, 16]}
    assert found["metrics"]["val_loss"]["largest_difference"] == 1.0


def test_best_as_typed(capsys):
    make("digits", 0, val_acc=[0.1, 0.5, 0.4])
    folder = make("digits", 1, val_acc=[0.1, 0.6, 0.4])
    path = checkpoint("digits", 1)
    assert typed(capsys, "best", "--metric", "val_acc")[1] == (
        f"best        val_acc 0.6 in epoch 1\nrun         {folder.absolute()}\ncheckpoint  {path.absolute()}\n"
    )
    assert json.loads(typed(capsys, "best", "logs", "--metric", "val_loss", "--json")[1])["best"] == 1 / 3


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere"], "there is no folder 'nowhere': give the root of the logs, such as logs"),
        (
            ["diff", "a", "b"],
            "there is no run 'a': give its folder, or its name and version below logs: digits/version_0",
        ),
        (["best", "--metric", "f1"], "no run has numbers for 'f1': logged were val_loss"),
        (["--html", "no/where/page.html"], "--html 'no/where/page.html' cannot be written: No such file or directory"),
        (["best"], "best takes --metric, such as --metric val_acc"),
        (["diff", "a"], "diff takes two runs: their folders, or their names and versions"),
        (["a", "b"], "there is no 'a' 'b': expected one folder, diff or best"),
    ],
)
def test_what_cannot_be_done_is_a_line(capsys, words, error):
    make("digits", 0)
    code, out, err = typed(capsys, *words)
    assert (code, out) == (2, "")
    assert error in err
    assert "Traceback" not in err


def test_names_cannot_move_a_terminal_s_cursor(capsys):
    make("dig\x1b[2Jits", 0)
    assert "\x1b" not in typed(capsys)[1]
    assert "dig?[2Jits/version_0" in typed(capsys)[1]


def test_the_frame_of_no_runs_has_its_columns():
    os.mkdir("logs")
    assert isinstance(list_runs(), pd.DataFrame)
    assert list_runs()["state"].tolist() == []
