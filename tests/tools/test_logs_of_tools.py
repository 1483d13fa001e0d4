"""Test that CSV files of other tools are read, plotted and ranked. The numbers in these files are made up."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot
from parameters import keep

from fabric_template import list_runs, plot_logs, read_logs

FOLDER = Path(__file__).parent / "logs_of_tools"
# Map each file to (x axis, panels, {line of the first panel: number of points}, (metric, best value, epoch)).
EXPECTED = {
    "by_hand": ("Epoch", ["Loss"], {"train": 6, "validation": 6}, ("Val Loss", 1.043, 5)),
    "fastai": ("epoch", ["loss"], {"train": 6, "validation": 6}, ("valid_loss", 1.0433, 5)),
    "hugging_face": (
        "step",
        ["loss"],
        {"loss": 8, "train_loss": 1, "validation": 2},
        ("eval_loss", 0.71341, 2),
    ),
    "keras": ("epoch", ["loss", "accuracy"], {"train": 6, "validation": 6}, ("val_accuracy", 0.61, 3)),
    "lightgbm": ("row", ["l2", "auc"], {"train": 6, "validation": 6}, ("valid_0's l2", 0.68, None)),
    "lightning": ("epoch", ["loss", "acc"], {"train": 3, "validation": 3}, ("val_loss", 1.5822, 2)),
    "mmengine": ("iter", ["loss", "loss_cls", "loss_bbox"], {"train": 8}, ("coco/bbox_mAP", 0.34, None)),
    "nnunet": ("epoch", ["losses"], {"train": 6, "validation": 6}, ("val_losses", -0.46, 5)),
    "run-version_0-tag-val_loss": ("Step", ["loss"], {"validation": 6}, ("val_loss", 1.0433, None)),
    "stable_baselines": (
        "time/total_timesteps",
        ["value_loss"],
        {"train": 6},
        ("rollout/ep_rew_mean", -35, None),
    ),
    "timm_summary": ("epoch", ["loss"], {"train": 6, "validation": 6}, ("eval_loss", 1.0433, 5)),
    "ultralytics": (
        "epoch",
        ["box_loss", "cls_loss"],
        {"train": 6, "validation": 6},
        ("val/box_loss", 1.0433, 6),
    ),
    "wandb_chart": ("Step", ["loss"], {"brisk-sun-3": 5, "calm-sea-4": 4}, ("val_loss", 0.5707, None)),
    "wandb_history": ("epoch", ["loss"], {"train": 2, "validation": 2}, ("val/loss", 0.59968, 1)),
    "xgboost": ("iteration", ["logloss"], {"train": 6, "validation": 6}, ("eval-logloss", 0.46, None)),
}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def lines_of(ax):
    return {line.get_label(): len(line.get_xdata()) for line in ax.get_lines() if line.get_label() != "best"}


def test_each_example_log_file_is_covered_by_a_test():
    assert {path.stem for path in FOLDER.iterdir()} == {*EXPECTED}


@pytest.mark.parametrize("name", keep(EXPECTED, *list(EXPECTED)[::3]))
def test_plot_logs_draws_csv_files_written_by_other_tools(name):
    x, panels, lines, _ = EXPECTED[name]
    axes = np.ravel(plot_logs(FOLDER / f"{name}.csv"))
    assert [ax.get_ylabel() for ax in axes] == panels
    assert axes[-1].get_xlabel() == x
    assert lines_of(axes[0]) == lines
    axes[0].figure.canvas.draw()


@pytest.mark.parametrize("name", EXPECTED)
def test_list_runs_finds_the_best_value_in_csv_files_of_other_tools(name):
    runs = list_runs(FOLDER / f"{name}.csv").astype(object)
    runs = runs.where(runs.notna(), None)
    metric, best, epoch = EXPECTED[name][3]
    assert runs.loc[0, ["metric", "best", "best_epoch"]].tolist() == [metric, pytest.approx(best), epoch]


def test_list_runs_finds_each_log_file_in_a_folder():
    runs = list_runs(FOLDER)
    assert runs["version"].tolist() == sorted([*(EXPECTED.keys() - {"wandb_chart"}), "brisk-sun-3", "calm-sea-4"])


@pytest.mark.parametrize(
    ("name", "column", "values"),
    [
        ("by_hand", "Val MAPE", [28.1, 20.4, 16, 13.9, 14.6, 15.1]),
        ("ultralytics", "metrics/mAP50(B)", [0.31, 0.42, 0.55, 0.61, 0.66, 0.64]),
        ("lightning", "val_acc", [0.28, 0.4, 0.52]),
        ("wandb_history", "trainer/global_step", [99, 199]),
        ("run-version_0-tag-val_loss", "Step", [19, 39, 59, 79, 99, 119]),
        ("wandb_chart", "name", ["brisk-sun-3"] * 5 + ["calm-sea-4"] * 4),
    ],
)
def test_read_logs_reads_csv_files_written_by_other_tools(name, column, values):
    assert read_logs(FOLDER / f"{name}.csv")[column].tolist() == values


def test_read_logs_reads_step_numbers_from_rows_with_missing_metrics():
    table = read_logs(FOLDER / "lightning.csv", steps=True)
    assert table["step"].tolist() == [9, 19, 29, 39, 49, 59, 69, 79, 89, 99, 109, 119]
    assert table["train_loss_step"].notna().all()
    assert table.loc[table["val_loss"].notna(), "step"].tolist() == [39, 79, 119]
    ax = plot_logs(FOLDER / "lightning.csv", x="step", metrics="loss")
    assert lines_of(ax) == {"train_loss_epoch": 3, "train_loss_step": 12, "validation": 3}


# Dialects, encodings and headers of CSV files


def write(text, name="log.csv"):
    Path(name).write_text(text)
    return name


def test_read_logs_returns_a_row_for_each_of_several_validations_in_an_epoch():
    rows = "".join(f"0,{step},{9 - step / 10},\n0,{step},,{8 - step / 10}\n" for step in (10, 20, 30))
    path = write(f"epoch,step,train_loss,val_loss\n{rows}0,40,1.0,\n1,50,0.5,\n1,50,,0.4\n")
    table = read_logs(path)
    assert table["step"].tolist() == [10, 20, 30, 50]
    assert table["val_loss"].tolist() == [7, 6, 5, 0.4]
    assert table["train_loss"].tolist() == [8, 7, 1, 0.5]
    assert read_logs(path, steps=True)["step"].tolist() == [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    "text",
    [
        "epoch,val_loss\n0,3\n1,2",
        "epoch,val_loss\r\n0,3\r\n1,2\r\n",
        " epoch , val_loss \n 0 , 3 \n 1 , 2 \n",
        "epoch;val_loss\n0;3,0\n1;2,0\n",
        "epoch\tval_loss\n0\t3\n1\t2\n",
        "# epoch,val_loss\n0,3\n1,2\n",
        "epoch,val_loss\n0,3\nepoch,val_loss\n1,2\n",
        ",epoch,val_loss\n0,0,3\n1,1,2\n",
        "\ufeffepoch,val_loss,other\n0,3,None\n1,2,nan\n",
        "\repoch,val_loss\r0,3\r1,2\r",
        "epoch val_loss\n    0      3.0\n    1      2.0\n",
        "# run of Monday\n# lr=0.1, seed=0\nepoch,val_loss\n0,3\n1,2\n",
        '#{"start": 17.5, "env": "CartPole"}\nepoch,val_loss\n0,3\n1,2\n',
        "\n\n" + "# comment\n" * 2000 + "epoch;val_loss\n0;3,0\n1;2,0\n",
        "epoch,val_loss\n[-],[nats]\n0,3\n1,2\n",
        "epoch,val_loss,train_loss\n0,3,1\nepoch,val_loss\n1,2\n",
        "epoch,val_loss\n0,3%\n1,2 %\n",
        "epoch,val_loss\n  \n0,3\n \t\n1,2\n  \n",
        'epoch;"note, mean";val_loss\n0;9,5;3,0\n1;9,5;2,0\n',
        '"epoch"\t"note"\t"val_loss"\r\n"0"\t"a;\tb, ""c"""\t"3,0"\r\n"1"\t"5"" x"\t"2,0"\r\n',
    ],
    ids=[
        *("no line break", "crlf", "padded", "semicolons", "tabs", "#", "two headers", "index", "bom", "cr"),
        *("spaces", "comments", "json comment", "long comment", "units", "shorter header", "percent"),
        *("blank lines", "comma in a name", "quotes"),
    ],
)
def test_read_logs_reads_each_csv_dialect(text):
    path = write(text)
    table = read_logs(path)
    assert table[["epoch", "val_loss"]].values.tolist() == [[0, 3], [1, 2]]
    line = next(line for line in plot_logs(path).get_lines() if line.get_label() == "validation")
    assert line.get_xydata().tolist() == [[0, 3], [1, 2]]
    assert list_runs(path)["best"].tolist() == [2]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_read_logs_reads_csv_files_in_utf_16_and_in_utf_8_with_a_bom(encoding):
    Path("log.csv").write_text("epoch\tval_loss\n0\t3,5\n1\t2,5\n", encoding)
    assert read_logs("log.csv")["val_loss"].tolist() == [3.5, 2.5]


def test_read_logs_reads_a_csv_file_with_a_second_and_longer_header_row():
    table = read_logs(write("epoch,loss\n0,3\n1,2\nepoch,loss,val_acc\n2,1,0.5\n3,0.5,0.6\n"))
    assert table["loss"].tolist() == [3, 2, 1, 0.5]
    assert table["val_acc"].tolist()[2:] == [0.5, 0.6]


# Layouts of the tables in CSV files


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("step,split,loss\n5,train,3\n5,val,4\n9,train,2\n9,val,3\n", "train_loss val_loss"),
        ("step,Phase,loss,lr\n5,train,3,1\n5,val,4,\n9,train,2,1\n9,val,3,\n", "train_loss val_loss lr"),
        ("run_id,key,value,step\na,train_loss,3,5\na,val_loss,4,5\na,train_loss,2,9\na,val_loss,3,9\n", "run_id"),
        ("step,tag,value\n5,loss/train,3\n9,loss/train,2\n5,loss/val,4\n9,loss/val,3\n", "loss/train loss/val"),
        ("step,split,metric,value\n5,train,loss,3\n5,val,loss,4\n9,train,loss,2\n9,val,loss,3\n", "val_loss"),
    ],
)
def test_read_logs_reads_csv_files_with_separate_rows_for_validation(text, columns):
    path = write(text)
    ax = plot_logs(path, metrics="loss")
    lines = {line.get_label(): line.get_xydata().tolist() for line in ax.get_lines()}
    assert lines == {"train": [[5, 3], [9, 2]], "validation": [[5, 4], [9, 3]], "best": [[9, 3]]}
    assert list_runs(path)["best"].tolist() == [3]
    assert {*columns.split()} <= {*read_logs(path)}


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        (["run"], ["a", "b"]),
        (["name", "version"], ["a/0", "b/1"]),
        (["trial_id", "x"], ["a", "b"]),
        (["fold"], ["a", "b"]),
        (["x", "seed"], ["seed=0", "seed=1"]),
    ],
)
def test_read_logs_splits_a_csv_file_into_runs_by_columns_such_as_fold(columns, names):
    frame = pd.DataFrame({"epoch": [0, 1, 0, 1], "val_loss": [3, 2, 5, 4]})
    for column, values in zip(columns, (["a", "a", "b", "b"], [0, 0, 1, 1]), strict=False):
        frame[column] = values
    frame.to_csv("all.csv", index=False)
    runs = list_runs("all.csv")
    assert (runs["version"].tolist(), runs["best"].tolist()) == (names, [2, 4])
    assert lines_of(plot_logs("all.csv")) == dict.fromkeys(names, 2)
    assert read_logs("all.csv")["name"].tolist() == [names[0]] * 2 + [names[1]] * 2


def test_read_logs_splits_a_csv_file_into_runs_by_two_columns_if_one_is_not_enough():
    rows = [f"{fold},{seed},{epoch},{fold}{seed}{epoch}\n" for fold in "01" for seed in "89" for epoch in "12"]
    table = read_logs(write("fold,seed,epoch,val_loss\n" + "".join(rows)))
    assert table["val_loss"].tolist() == [81, 82, 91, 92, 181, 182, 191, 192]
    assert table["name"].unique().tolist() == [f"fold={fold}/seed={seed}" for fold in "01" for seed in "89"]


def test_read_logs_reads_a_wandb_export_of_two_runs_with_the_same_name():
    names = [f"a - loss{end}" for end in ("", "__MIN", "__MAX")] * 2
    table = read_logs(write(",".join(["Step", *names]) + "\n0,3,3,3,5,5,5\n1,2,2,2,,,\n"))
    assert table[["name", "Step", "loss"]].values.tolist() == [["a", 0, 3], ["a", 1, 2], ["a.1", 0, 5]]
    assert list(table) == ["name", "version", "Step", "loss"]


def test_plot_logs_draws_separate_curves_if_runs_in_two_files_have_the_same_name():
    Path("exports").mkdir()
    for name, loss in (("a", 1), ("b", 5)):
        write(f"fold,epoch,val_loss\n0,0,9\n0,1,{loss}\n1,0,8\n1,1,{loss}\n", f"exports/{name}.csv")
    labels = [f"exports/fold={fold} ({name}.csv)" for fold in (0, 1) for name in "ab"]
    assert {*lines_of(plot_logs("exports"))} == {*labels}


def test_list_runs_reads_a_csv_file_with_one_row_per_run():
    path = write('"Name","State","lr","epoch","val/loss"\n"a","finished",0.1,9,0.5\n"b","finished",0.2,9,0.4\n')
    runs = list_runs(path)
    assert (runs["version"].tolist(), runs["best"].tolist()) == (["a", "b"], [0.5, 0.4])


@pytest.mark.parametrize("seeds", ["1,,", "1,1,1"])
def test_read_logs_does_not_mistake_a_seed_column_for_a_run_name(seeds):
    rows = zip("001", seeds.split(","), ["3,", ",2", "1,1"], strict=True)
    path = write("epoch,seed,train_loss,val_loss\n" + "".join(",".join(row) + "\n" for row in rows))
    assert read_logs(path)[["epoch", "train_loss", "val_loss"]].values.tolist() == [[0, 3, 2], [1, 1, 1]]


def test_read_logs_reads_a_wandb_export_with_relative_time():
    header = '"Relative Time (Process)","big - train/loss","big - train/loss__MIN","big - train/loss__MAX"\n'
    table = read_logs(write(header + '"0.5","3","2","4"\n"1.5","2","1","3"\n'))
    assert list(table) == ["name", "version", "Relative Time (Process)", "train/loss"]
    assert table["train/loss"].tolist() == [3, 2]


@pytest.mark.parametrize("text", ["epoch,val_loss\n", "", "epoch,val_loss"])
def test_plot_logs_refuses_a_file_without_rows(text):
    with pytest.raises(ValueError, match="plot_logs: got logs without numbers"):
        plot_logs(write(text))


def test_a_log_without_epochs_is_plotted_against_row_numbers():
    path = write("minutes,loss,val_loss\n2,3,4\n4,2,3\n8,1,2.5\n")
    ax = plot_logs(path)
    assert (ax.get_xlabel(), ax.get_lines()[0].get_xdata().tolist()) == ("row", [0, 1, 2])
    ax = plot_logs(path, x="minutes")
    assert (ax.get_xlabel(), ax.get_lines()[0].get_xdata().tolist()) == ("minutes", [2, 4, 8])
    with pytest.raises(ValueError, match=r"x: got 'epoch', expected .*minutes.* Write x='minutes'"):
        plot_logs(path, x="epoch")


def test_plot_logs_draws_only_the_given_file_of_a_folder():
    Path("a").mkdir()
    write("epoch,step,val_loss\n0,5,77\n", "a/steps.csv")
    for name, loss in (("metrics.csv", 1), ("results.csv", 9)):
        write(f"epoch,val_loss\n0,{loss}\n1,{loss - 1}\n", f"a/{name}")
    drawn = [plot_logs(path).get_lines()[0].get_ydata().tolist() for path in ("a/results.csv", "a", "a/metrics.csv")]
    assert drawn == [[9, 8], [1, 0], [1, 0]]
    assert read_logs("a/results.csv", steps=True)["val_loss"].tolist() == [9, 8]
    assert read_logs("a", steps=True)["val_loss"].tolist() == [77]
    labels = lines_of(plot_logs(["a/results.csv", "a/metrics.csv"]))
    assert labels == {"results": 2, f"{Path.cwd().name}/a": 2}


# Names of columns, and files with several runs


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        ("loss val_loss", {"train": 2, "validation": 2}),
        ("loss train_loss val_loss", {"loss": 2, "train_loss": 2, "validation": 2}),
        ("Loss/train Loss/val", {"train": 2, "validation": 2}),
        ("trainLoss valLoss", {"train": 2, "validation": 2}),
        ("val_0_loss val_1_loss", {"val_0_loss": 2, "val_1_loss": 2}),
        ("train val", {"train": 2, "validation": 2}),
        ("tr_loss te_loss", {"train": 2, "test": 2}),
        ("VALUE_LOSS val_VALUE_LOSS", {"train": 2, "validation": 2}),
    ],
)
def test_plot_logs_draws_train_and_validation_columns_in_one_panel(columns, lines):
    frame = pd.DataFrame({"epoch": [0, 1], **{name: [2.0, 1.0] for name in columns.split()}})
    assert lines_of(plot_logs(frame)) == lines


def test_read_logs_renames_duplicate_columns():
    file = write("epoch,loss,loss\n0,1.0,2.0\n1,0.5,1.5\n")
    table = read_logs(file)
    assert table[["loss", "loss.1"]].to_numpy().tolist() == [[1.0, 2.0], [0.5, 1.5]]


def test_read_logs_keeps_the_first_row_of_a_file_without_a_header():
    table = read_logs(write("0,1.0\n1,0.5\n"))
    assert table[["column 1", "column 2"]].to_numpy().tolist() == [[0, 1.0], [1, 0.5]]


def test_read_logs_treats_two_calls_to_fit_in_one_file_as_two_runs():
    table = read_logs(write("epoch,loss\n0,1.0\n1,0.5\n0,0.4\n1,0.3\n"))
    assert table[["name", "loss"]].to_numpy().tolist() == [
        ["fit 1", 1.0],
        ["fit 1", 0.5],
        ["fit 2", 0.4],
        ["fit 2", 0.3],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "epoch,loss\n0,1.0\n1,0.5\n2,0.4\n1,0.6\n2,0.3\n",
        "epoch,step,loss\n0,1,1.0\n1,2,0.5\n0,3,0.4\n1,4,0.3\n",
    ],
    ids=["resumed", "steps continue"],
)
def test_read_logs_reads_a_resumed_run_as_one_run(text):
    assert len({*read_logs(write(text))["name"]}) == 1
