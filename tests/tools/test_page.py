"""The page of runs in a real browser: what it shows, in which order, and that a hostile name stays a name."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_runs import make

from fabric_template.tools.cli import main
from fabric_template.tools.page import page_of, thinned
from fabric_template.tools.runs import find

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
HOSTILE = "</script><script>document.title='taken'<!script>"


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    return tmp_path_factory.mktemp("browser")


def opened(page, profile, *options):
    if BROWSER is None:
        pytest.skip("no browser is installed: apt install chromium")
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--virtual-time-budget=9999",
    ]
    done = subprocess.run([*command, f"--user-data-dir={profile}", *options, page], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def seen(page, profile, words=""):
    """The page as its own program has made it: the rows, the legend, the number of curves, the title."""
    dom = opened(f"{page.absolute().as_uri()}#{words}", profile, "--dump-dom")
    body = dom[dom.index('<tbody id="rows">') :]
    rows = re.findall(r"<tr( hidden=\"\")?>(.*?)</tr>", body, re.S)
    cells = [
        [html.unescape(cell) for cell in re.findall(r"<td[^>]*>([^<]*)</td>", row)]
        for hidden, row in rows
        if not hidden
    ]
    legend = re.search(r'<div id="legend">(.*?)</div>', dom, re.S)[1]
    names = [html.unescape(name) for name in re.findall(r"</span>([^<]*)</span>", legend)]
    return cells, names, dom.count("<polyline"), html.unescape(re.search(r'<h1 id="title">(.*?)</h1>', dom)[1]), dom


def test_the_page_in_a_browser(capsys, profile):
    for version, loss in enumerate((3.0, 1.0, 2.0)):
        make(
            "digits", version, loss=loss, hparams={"hidden": 8 * (version + 1)}, val_acc=[0.1, 0.2, 0.3 - version / 10]
        )
    make("failed", 10, end="failed", rows=1, loss=9.0)
    assert main(["runs", "--html", "runs.html"]) == 0
    assert capsys.readouterr().out == "page        runs.html: 4 runs\n"
    page = Path("runs.html")
    rows, names, curves, title, dom = seen(page, profile)
    assert rows[0] == ["digits/version_1", "finished", "3", "0.33333", "2", "1 min 30 s", "hidden=16", ""]
    assert [row[0].rpartition("_")[2] for row in rows] == ["1", "2", "0", "10"]  # by the monitor, the best first
    assert (len(names), curves, title) == (4, 4, "4 runs")
    assert dom.count("<circle") == 1  # of a run of one epoch a line would show nothing
    rows, names, curves, title, dom = seen(page, profile, "metric=val_acc&filter=digits&runs=0,2")
    assert [row[0] for row in rows] == ["digits/version_0", "digits/version_1", "digits/version_2"]
    assert (names, curves, title) == (["digits/version_0", "digits/version_2"], 2, "3 of 4 runs")
    rows, *_ = seen(page, profile, "sort=run&down=1")
    assert [row[0] for row in rows] == ["failed/version_10", "digits/version_2", "digits/version_1", "digits/version_0"]


def test_a_hostile_name_stays_a_name(profile):
    make(HOSTILE.replace("/", "∕"), 0)
    folder = make("digits", 0, hparams={HOSTILE: HOSTILE}, **{HOSTILE: [1.0, 2.0, 3.0], "__proto__": [1.0, 2.0, 3.0]})
    (folder / ".lock").write_text(f"17\nresumed after step 1 from {HOSTILE}\nfinished\n")
    runs = find()
    runs[0].name = HOSTILE  # as no folder can be called
    text = page_of(runs)
    assert HOSTILE not in text
    assert text.count("<script") == 2
    Path("runs.html").write_text(text)
    *_, dom = seen(Path("runs.html"), profile, "runs=0,1")
    assert "<title>runs</title>" in dom
    assert dom.count("<script") == 2
    assert html.escape(HOSTILE, quote=False) in dom


def test_a_thousand_runs_are_one_small_page(profile):
    make("digits", 0, rows=50)
    (one,) = find()
    metrics = {f"metric_{i}": [float(row["val_loss"]) for row in one.rows] for i in range(12)}
    for name, values in metrics.items():
        for row, value in zip(one.rows, values, strict=True):
            row[name] = repr(value)
    page = Path("many.html")
    page.write_text(page_of([one] * 1000))
    assert page.stat().st_size < 10_000_000
    rows, names, curves, title, _ = seen(page, profile)
    assert (len(rows), len(names), curves, title) == (1000, 5, 5, "1000 runs")


def test_no_runs_and_no_metrics(profile):
    Path("none.html").write_text(page_of([]))
    assert seen(Path("none.html"), profile)[:4] == ([], [], 0, "0 runs")
    make("empty", 0, rows=0)
    Path("none.html").write_text(page_of(find()))
    assert seen(Path("none.html"), profile)[0] == [
        ["empty/version_0", "finished", "0", "", "", "", "max_epochs=3, monitor=val_loss", ""]
    ]


@pytest.mark.parametrize("width", [600, 1200])
def test_nothing_is_cut_off_on_a_small_screen(width, profile):
    """The page asks its own boxes: nothing but the table's own scroll reaches beyond the window."""
    for version in range(3):
        make("a-rather-long-name-of-an-experiment", version, hparams={"hidden": version, "path": "x" * 100})
    text = page_of(find())
    probe = "document.title = document.documentElement.scrollWidth + ' ' + innerWidth;"
    Path("runs.html").write_text(
        text.replace("</body>", f"<script>window.onload = () => {{ {probe} }};</script></body>")
    )
    dom = opened(Path("runs.html").absolute().as_uri(), profile, "--dump-dom", f"--window-size={width},900")
    reaches, window = map(int, re.search(r"<title>(\d+) (\d+)</title>", dom).groups())
    assert reaches <= window
    assert window <= width


def test_what_is_fetched_is_nothing():
    make("digits", 0)
    text = page_of(find())
    assert "default-src 'none'" in text
    assert re.findall(r"(?:src|href)=|https?://(?!www\.w3\.org/2000/svg)|@import|fetch\(", text) == []
    assert json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])["metrics"] == ["val_loss"]


def test_long_curves_keep_their_ends_and_their_spikes():
    curve = [(i, 1.0) for i in range(10_000)]
    curve[4321] = (4321, 50.0)
    short = thinned(curve, 100)
    assert (len(short), short[0], short[-1]) == (100, [0, 1.0], [9999, 1.0])
    assert [4321, 50.0] in short
    assert thinned(curve[:1], 2) == [[0, 1.0]]
    assert thinned(curve[:5], 2) == [[0, 1.0], [4, 1.0]]
