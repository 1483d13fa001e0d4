"""Test the HTML page that `runs --html` writes."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from parameters import keep

from fabric_template import CSVLogger
from fabric_template.tools.cli import main
from fabric_template.tools.runs_page import MOST_POINTS

FOLDER = Path(__file__).parent / "logs_of_tools"
FILES = sorted(FOLDER.iterdir())
HOSTILE = "\x1b[2J</td></script><script>alert('x')<!-- data --><!--\u2028&amp;\"'"

SHORT = "</td><b onclick='x'>&lt;"


class PageParser(HTMLParser):
    """Collect the tags of a page, the cells of its table, and its data."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.headers, self.rows, self.place = [], [], [], None
        self.data = ""
        self.feed(text)
        self.data = json.loads(self.data)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.place = "data" if attributes.get("id") == "data" else tag
        if tag == "tr" and "data-run" in attributes:
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append(["", attributes.get("data-order")])

    def handle_endtag(self, tag):
        self.place = None

    def handle_data(self, text):
        if self.place == "td":
            self.rows[-1][-1][0] += text
        elif self.place == "button" and not self.rows:
            self.headers.append(text)
        elif self.place == "data":
            self.data += text


def write_run(name="digits", version=0, rows=3, hparams=None, **columns):
    logger = CSVLogger("logs", name=name, version=version)
    logger.log_hyperparams({"hparams": hparams or {}, "config": {"monitor": "val_loss"}})
    for i in range(rows):
        row = {"epoch": i, "step": 10 * (i + 1), "train_loss": 2.0, "val_loss": 1 / (i + 1), "time": 30}
        logger.log_epoch(row | {name: values[i] for name, values in columns.items()})
    return logger


def make_page(*arguments):
    assert main(["runs", *arguments, "--html", "pages/runs.html"]) == 0
    return PageParser(Path("pages/runs.html").read_text("utf-8"))


def column(page, name):
    place = page.headers.index(name) - 1
    return [row[place] for row in page.rows]


def curves(page, title):
    (panel,) = [panel for panel in page.data["panels"] if panel["title"] == title]
    return {(curve["run"], curve["column"]): curve for curve in panel["curves"]}


def test_the_runs_page_has_a_row_for_each_run_and_a_chart_for_each_metric(capsys):
    write_run(hparams={"lr": 1e-05, "layers": [1, 2]}, val_acc=[0.1, 0.5, 0.4], lr=[3.0, 2.0, 1.0])
    write_run(version=10, rows=2, hparams={"lr": 0.1}, val_acc=[0.1, 0.7], lr=[3.0, 2.0])
    page = make_page()
    assert capsys.readouterr().out == "page        pages/runs.html: 2 runs\n"
    names = ["name", "version", "state", "epochs", "metric", "best", "at epoch", "time", "layers", "lr"]
    assert sorted(page.headers[1:]) == sorted(names)
    assert column(page, "version") == [["0", "0.0"], ["10", "10.0"]]
    assert column(page, "best") == [["0.33333", f"{1 / 3}"], ["0.5", "0.5"]]
    assert column(page, "at epoch") == [["2", "2.0"], ["1", "1.0"]]
    assert column(page, "time") == [["0:01:30", "90.0"], ["0:01:00", "60.0"]]
    assert column(page, "lr") == [["1e-05", "1e-05"], ["0.1", "0.1"]]
    assert column(page, "layers") == [["[1, 2]", None], ["", None]]
    panels = [(panel["title"], panel["is_main"]) for panel in page.data["panels"]]
    assert panels == [("loss", True), ("acc", True), ("lr", False)]
    assert (page.data["x"], page.data["thinned"]) == ("epoch", None)
    assert page.data["labels"] == ["digits/version_0", "digits/version_10"]
    losses = curves(page, "loss")
    assert {key: curve["split"] for key, curve in losses.items()} == {
        (run, f"{split}_loss"): name for run in (0, 1) for split, name in (("train", "train"), ("val", "validation"))
    }
    assert (losses[1, "val_loss"]["x"], losses[1, "val_loss"]["y"]) == ([0, 1], [1, 0.5])
    assert curves(page, "acc")[0, "val_acc"]["best"] == [1, 0.5]


def test_the_runs_page_shows_html_in_a_run_name_as_text():
    write_run(
        hparams={HOSTILE: HOSTILE, SHORT: SHORT, "path": "https://example.com"}, **{f"val_{HOSTILE}": [1.0, 2.0, 3.0]}
    )
    write_run(version=1)
    write_run("<b>", rows=0)
    page = make_page()
    text = Path("pages/runs.html").read_text("utf-8")
    assert (page.tags.count("script"), page.tags.count("b")) == (2, 0)
    assert column(page, "other options")[1][0] == f"{HOSTILE}={HOSTILE}"
    assert column(page, SHORT) == [["", None], [SHORT, None], ["", None]]
    drawn = [curve["column"] for panel in page.data["panels"] for curve in panel["curves"]]
    assert f"val_{HOSTILE}" in drawn
    assert "<b>" in [row[0][0] for row in page.rows]
    assert re.findall(r"@import|url\(|(?:src|href)=(?!\"data:)", text) == []
    assert text.count("https:") == text.count("https://example.com")


def test_the_runs_page_puts_long_values_and_extra_options_into_one_column():
    for version in (0, 1):
        options = {f"option_{i}": version for i in range(10)}
        write_run(version=version, hparams={"path": f"/data/{version}" * 9} | options)
    page = make_page()
    assert page.headers[-2:] == ["option_7", "other options"]
    assert column(page, "option_7") == [["0", "0.0"], ["1", "1.0"]]
    assert column(page, "other options")[1][0] == f"path={'/data/1' * 9}, option_8=1, option_9=1"


def test_the_runs_page_omits_values_that_are_not_finite():
    write_run(val_loss=[math.nan, math.inf, -math.inf], train_loss=[math.inf, 2.0, math.nan])
    write_run(version=1, rows=0)
    page = make_page()
    assert column(page, "best") == [["", None], ["", None]]
    (curve,) = curves(page, "loss").values()
    assert (curve["x"], curve["y"]) == ([1], [2])


@pytest.mark.parametrize("rows", [None, 0])
def test_the_runs_page_has_no_panels_for_runs_without_csv_rows(rows):
    Path("logs").mkdir()
    if rows is not None:
        write_run(rows=rows)
    page = make_page()
    assert (len(page.rows), page.data["panels"]) == (0 if rows is None else 1, [])


@pytest.mark.parametrize("path", keep(FILES, *FILES[::3]), ids=lambda path: path.stem)
def test_the_runs_page_shows_a_csv_file_from_another_tool(path):
    page = make_page(str(path))
    assert len(page.rows) == len(page.data["labels"]) == (2 if path.stem == "wandb_chart" else 1)
    assert page.data["panels"][0]["is_main"]
    assert all(curve["y"] for panel in page.data["panels"] for curve in panel["curves"])


def test_the_runs_page_shows_a_folder_of_csv_files_from_other_tools():
    page = make_page(str(FOLDER))
    assert len(page.rows) == len(list(FOLDER.iterdir())) + 1


@pytest.mark.parametrize("arguments", [("--html", "logs"), ("best", "--html", "runs.html")])
def test_the_html_option_cannot_be_combined_with_a_folder_or_a_subcommand(capsys, arguments):
    write_run()
    assert main(["runs", *arguments]) == 2
    assert "--html: got " in capsys.readouterr().err
    assert not Path("runs.html").exists()


def test_the_runs_page_draws_long_curves_with_fewer_points():
    steps = np.arange(2_000)
    values = np.sin(steps / 500)
    cells = zip(steps, values, values, values, strict=True)
    lines = ["step,train_loss,val_loss,val_acc", *(",".join(map(str, row)) for row in cells)]
    Path("long").mkdir()
    for number in range(40):
        Path("long", f"{number}.csv").write_text("\n".join(lines))
    page = make_page("long")
    for curve in curves(page, "loss").values():
        assert len(curve["x"]) == len(curve["y"]) <= page.data["thinned"]
        assert curve["x"][0] == 0
    points = sum(len(curve["x"]) for panel in page.data["panels"] for curve in panel["curves"])
    assert points <= MOST_POINTS
    assert Path("pages/runs.html").stat().st_size < 2_000_000
    text = Path("pages/runs.html").read_text()
    assert f"long curves are drawn with at most {page.data['thinned']} of their points" in text


def test_the_runs_page_draws_a_step_based_run_from_steps_csv():
    logger = CSVLogger("logs", name="gpt", version=0)
    for step in range(1, 101):
        logger.log_metrics({"train_loss": 100.0 - step}, step)
        if step % 50 == 0:
            logger.log_epoch({"epoch": 0, "step": step, "val_loss": 10.0 - step / 50, "samples_per_second": 5.0})
    page = make_page()
    assert (page.data["x"], column(page, "at step")) == ("step", [["100", "100.0"]])
    (panel,) = [panel for panel in page.data["panels"] if panel["title"] == "loss"]
    found = [(curve["split"], curve.get("is_average", False), len(curve["x"])) for curve in panel["curves"]]
    assert found == [("raw", False, 100), ("train", True, 100), ("validation", False, 2)]
