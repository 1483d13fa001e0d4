"""Page: all runs in one file for a browser: a table to sort and filter, and the curves of the runs that are chosen.

Nothing is fetched from anywhere. What a file says (names, words) stands in the page as JSON, and is shown as text only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files.disk import replace_file
from .columns import Column
from .runs import Listed

MOST_POINTS, MOST_NUMBERS = 300, 400_000  # of a curve, and of all of them: a page is to open at once
MOST_METRICS = 30


def write_page(runs: Sequence[Listed], path: Path, metric: str | None = None) -> None:
    """Write the page, whole or not at all."""
    text = page_of(runs, metric).encode("utf-8", "replace")
    try:
        replace_file(path, text)
    except OSError as error:
        raise ValueError(f"--html {str(path)!r} cannot be written: {error.strerror}; give another file") from error


def page_of(runs: Sequence[Listed], metric: str | None = None) -> str:
    """The page as text."""
    logged = dict.fromkeys(name for run in runs for name in run.metrics)
    kinds = sorted(map(Column.of, logged), key=lambda column: (column.split != "val", column.kind != "loss"))
    names = [column.name for column in kinds][:MOST_METRICS]
    curves = max(1, sum(name in run.metrics for run in runs for name in names))
    points = max(2, min(MOST_POINTS, MOST_NUMBERS // (2 * curves)))
    data = {
        "metrics": names,
        "low": {column.name: column.low_is_good for column in kinds[:MOST_METRICS]},
        "runs": [_plain(run, names, metric, points) for run in runs],
    }
    # "<" ends no script and begins no comment, wherever it stands in a name
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return PAGE.replace("DATA", content, 1)


def _plain(run: Listed, names: Sequence[str], metric: str | None, points: int) -> dict[str, Any]:
    """What the page knows of a run."""
    told = run.as_dict(metric)
    told["run"] = run.label
    told["changed"] = ", ".join(f"{word}={value}" for word, value in told["changed"].items())
    told["seconds"] = round(told["seconds"], 3)
    told["bests"] = {name: best for name in names if (best := run.best(name)) is not None}
    told["curves"] = {name: thinned(run.curve(name), points) for name in told["bests"]}
    return told


def thinned(curve: Sequence[tuple[int, float]], most: int) -> list[list[float]]:
    """So many points of a curve, the first and the last among them, and of each stretch the farthest out.

    Example:
        >>> thinned([(0, 3.0), (1, 2.0), (2, 9.0), (3, 1.0)], 3)
        [[0, 3.0], [2, 9.0], [3, 1.0]]
    """
    if len(curve) > most:
        inner, stretches = curve[1:-1], most - 2
        cuts = [len(inner) * i // max(stretches, 1) for i in range(stretches + 1)]
        parts = [inner[a:b] for a, b in zip(cuts, cuts[1:], strict=False) if b > a]
        middle = sum(value for _, value in curve) / len(curve)
        curve = [curve[0], *(max(part, key=lambda point: abs(point[1] - middle)) for part in parts), curve[-1]]
    return [[epoch, _short(value)] for epoch, value in curve]


def _short(value: float) -> float:
    return float(f"{value:.5g}") if math.isfinite(value) else 0.0


PAGE = r"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>runs</title>
<style>
:root { --paper: #fff; --ink: #1b1b1b; --soft: #666; --line: #ddd; --row: #f5f7fa;
 --c0: #0072B2; --c1: #D55E00; --c2: #009E73; --c3: #CC79A7; --c4: #B87F00; --c5: #56B4E9; }
@media (prefers-color-scheme: dark) {
 :root { --paper: #14171a; --ink: #e8e8e8; --soft: #9aa0a6; --line: #33383d; --row: #1d2125;
 --c0: #56B4E9; --c1: #E8703A; --c2: #2BBE93; --c3: #D98BB6; --c4: #E69F00; --c5: #F0E442; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1200px; background: var(--paper); color: var(--ink);
 font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .6rem; }
#controls { display: flex; flex-wrap: wrap; gap: .6rem 1rem; align-items: center; margin-bottom: .5rem; }
input, select, button { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--line);
 border-radius: 5px; padding: .25rem .5rem; }
#filter { flex: 1 1 12rem; min-width: 8rem; }
svg { display: block; width: 100%; height: 340px; }
svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); stroke-width: 1; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
#legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .2rem 0 1rem; font-size: .9rem; min-height: 1.4em; }
#legend span { overflow-wrap: anywhere; }
.swatch { display: inline-block; width: 1.6em; border-top: 3px solid; margin-right: .4em; vertical-align: middle; }
#scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { position: sticky; top: 0; background: var(--paper); white-space: nowrap; }
th.number { text-align: right; }
th[aria-sort=ascending] button::after { content: " \25B4"; } th[aria-sort=descending] button::after { content: " \25BE"; }
th button { border: 0; padding: 0; font-weight: 600; cursor: pointer; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.words { min-width: 9rem; max-width: 26rem; overflow-wrap: anywhere; color: var(--soft); }
td.run { overflow-wrap: anywhere; min-width: 11rem; }
tbody tr:hover { background: var(--row); }
.running { color: var(--c0); } .failed, .damaged { color: var(--c1); font-weight: 600; } .interrupted { color: var(--c4); }
@media (max-width: 900px) { .wide { display: none; } }
@media (max-width: 640px) { body { padding: .6rem; } th, td { padding: .25rem .35rem; } }
</style>
</head>
<body>
<h1 id="title">runs</h1>
<div id="controls">
<input id="filter" type="search" placeholder="filter: name, state, words" aria-label="filter">
<label>metric <select id="metric"></select></label>
<label><input id="log" type="checkbox"> log scale</label>
<button id="none" type="button">choose none</button>
</div>
<svg id="chart" role="img" aria-label="curves of the chosen runs"></svg>
<div id="legend"></div>
<div id="scroll"><table><thead><tr id="head"></tr></thead><tbody id="rows"></tbody></table></div>
<script type="application/json" id="data">DATA</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const asked = new URLSearchParams(location.hash.slice(1));
const $ = (id) => document.getElementById(id);
const svgOf = (name, attributes, parent) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return parent.appendChild(node);
};
const short = (value) => value === null || value === undefined ? "" : String(Number(value.toPrecision(5)));
const took = (s) => !s ? "" : s >= 3600 ? Math.floor(s / 3600) + " h " + Math.floor(s % 3600 / 60) + " min"
  : s >= 60 ? Math.floor(s / 60) + " min " + Math.floor(s % 60) + " s" : s.toFixed(1) + " s";
const state = { sort: asked.get("sort") || "best", down: asked.get("down") === "1", metric: asked.get("metric"),
  filter: asked.get("filter") || "", log: asked.get("log") === "1", chosen: [] };
const has = (run) => Object.hasOwn(run.bests, state.metric);
const best = (run) => has(run) ? run.bests[state.metric][0] : null;
const columns = [
  ["run", "run", (run) => run.run, "run"],
  ["state", "state", (run) => run.state, ""],
  ["epochs", "epochs", (run) => run.epochs, "number"],
  ["best", "best", best, "number"],
  ["epoch", "in epoch", (run) => has(run) ? run.bests[state.metric][1] : null, "number wide"],
  ["seconds", "trained", (run) => run.seconds, "number wide"],
  ["changed", "changed", (run) => run.changed, "words"],
  ["resumed", "resumed from", (run) => run.resumed_from || "", "words wide"],
];
if (!data.metrics.includes(state.metric)) {
  const count = {};
  for (const run of data.runs) if (run.metric) count[run.metric] = (count[run.metric] || 0) + 1;
  const known = data.metrics.filter((name) => count[name]).sort((a, b) => count[b] - count[a]);
  state.metric = known[0] || data.metrics[0] || "";
}
const lines = data.runs.map((run, index) => {
  const line = document.createElement("tr");
  const box = document.createElement("input");
  box.type = "checkbox";
  box.setAttribute("aria-label", "draw " + run.run);
  box.onchange = () => choose(index, box.checked);
  line.appendChild(document.createElement("td")).appendChild(box);
  for (const [, , , kind] of columns) line.appendChild(document.createElement("td")).className = kind;
  line.cells[2].classList.add(run.state);
  return { run, line, box, index, text: [run.run, run.state, run.changed].join(" ").toLowerCase() };
});
function choose(index, on) {
  state.chosen = state.chosen.filter((other) => other !== index);
  if (on) state.chosen.push(index);
  draw();
}
function fill() {
  for (const { run, line } of lines) columns.forEach(([name, , value], i) => {
    const told = value(run);
    line.cells[i + 1].textContent = name === "seconds" ? took(told) : typeof told === "number" ? short(told) : told;
  });
}
function order() {
  const value = columns.find(([name]) => name === state.sort)[2];
  const natural = state.sort === "best" && data.low[state.metric] === false ? -1 : 1;
  const sign = natural * (state.down ? -1 : 1);
  const missing = (told) => told === null || told === "";
  const compare = (a, b) => {
    const [x, y] = [value(a.run), value(b.run)];
    if (missing(x) || missing(y)) return missing(x) - missing(y) || a.index - b.index;
    const by = typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return sign * by || a.index - b.index;
  };
  const body = document.createDocumentFragment();
  for (const one of [...lines].sort(compare)) body.appendChild(one.line);
  $("rows").appendChild(body);
  for (const [i, [name]] of columns.entries()) {
    const up = sign > 0 ? "ascending" : "descending";
    $("head").cells[i + 1].setAttribute("aria-sort", name === state.sort ? up : "none");
  }
}
function sift() {
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  let seen = 0;
  for (const one of lines) {
    one.line.hidden = !words.every((word) => one.text.includes(word));
    seen += !one.line.hidden;
  }
  const all = lines.length + (lines.length === 1 ? " run" : " runs");
  $("title").textContent = (seen === lines.length ? "" : seen + " of ") + all;
}
function ticks(low, high, count) {
  const step = 10 ** Math.floor(Math.log10((high - low) / count));
  const wide = [1, 2, 5, 10].map((k) => k * step).find((s) => (high - low) / s <= count);
  const found = [];
  for (let at = Math.ceil(low / wide); at * wide <= high * (1 + 1e-9) && found.length < 20; at += 1) found.push(at * wide);
  return found;
}
function draw() {
  for (const one of lines) one.box.checked = state.chosen.includes(one.index);
  const chart = $("chart"), legend = $("legend");
  chart.replaceChildren();
  legend.replaceChildren();
  const shown = state.chosen.filter((index) => has(data.runs[index])), scale = state.log ? Math.log10 : (v) => v;
  const points = shown.map((index) => data.runs[index].curves[state.metric].filter(([, v]) => !state.log || v > 0));
  const all = points.flat();
  if (!all.length) {
    legend.textContent = data.metrics.length ? "choose runs in the table to see their curves" : "no metric was logged";
    return;
  }
  const width = chart.clientWidth || 800, height = 340, left = 62, right = 12, top = 22, bottom = 34;
  const reach = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  let [x0, x1] = reach(all.map(([x]) => x)), [y0, y1] = reach(all.map(([, y]) => scale(y)));
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  const room = (y1 - y0) * .06 || Math.abs(y0) * .1 || 1;
  [y0, y1] = [y0 - room, y1 + room];
  const px = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
  const py = (y) => height - bottom - (scale(y) - y0) / (y1 - y0) * (height - top - bottom);
  for (const y of ticks(y0, y1, 6)) {
    const value = state.log ? 10 ** y : y;
    svgOf("line", { class: "grid", x1: left, x2: width - right, y1: py(value), y2: py(value) }, chart);
    svgOf("text", { x: left - 8, y: py(value) + 4, "text-anchor": "end" }, chart).textContent = short(value);
  }
  for (const x of ticks(x0, x1, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger))
    svgOf("text", { x: px(x), y: height - bottom + 18, "text-anchor": "middle" }, chart).textContent = x;
  svgOf("text", { x: width - right, y: height - 2, "text-anchor": "end" }, chart).textContent = "epoch";
  svgOf("text", { x: 2, y: 12 }, chart).textContent = state.metric;
  shown.forEach((index, i) => {
    const run = data.runs[index], color = "var(--c" + i % 6 + ")";
    const style = "stroke:" + color + ";stroke-dasharray:" + ["none", "7 3", "2 2"][Math.floor(i / 6) % 3];
    const path = points[i].map(([x, y]) => px(x).toFixed(1) + "," + py(y).toFixed(1)).join(" ");
    const node = svgOf("polyline", { class: "curve", points: path, style }, chart);
    svgOf("title", {}, node).textContent = run.run;
    if (points[i].length === 1)
      svgOf("circle", { cx: px(points[i][0][0]), cy: py(points[i][0][1]), r: 4, style: "fill:" + color }, chart);
    const entry = legend.appendChild(document.createElement("span"));
    const swatch = entry.appendChild(document.createElement("span"));
    swatch.className = "swatch";
    swatch.style.borderColor = color;
    swatch.style.borderTopStyle = ["solid", "dashed", "dotted"][Math.floor(i / 6) % 3];
    entry.append(run.run);
  });
}
$("head").appendChild(document.createElement("th"));
for (const [name, title, , kind] of columns) {
  const cell = $("head").appendChild(document.createElement("th"));
  cell.className = kind;
  const button = cell.appendChild(document.createElement("button"));
  button.type = "button";
  button.textContent = title;
  button.onclick = () => { state.down = state.sort === name && !state.down; state.sort = name; order(); };
}
for (const name of data.metrics) $("metric").appendChild(document.createElement("option")).textContent = name;
$("metric").value = state.metric;
$("metric").onchange = () => { state.metric = $("metric").value; fill(); order(); draw(); };
$("filter").value = state.filter;
$("filter").oninput = () => { state.filter = $("filter").value; sift(); };
$("log").checked = state.log;
$("log").onchange = () => { state.log = $("log").checked; draw(); };
$("none").onclick = () => { state.chosen = []; draw(); };
window.onresize = draw;
if (!columns.some(([name]) => name === state.sort)) state.sort = "best";
fill();
order();
sift();
const sorted = [...$("rows").children].map((line) => lines.findIndex((one) => one.line === line));
state.chosen = asked.has("runs") ? asked.get("runs").split(",").map(Number).filter((i) => i in lines)
  : sorted.filter((i) => has(data.runs[i]) && !lines[i].line.hidden).slice(0, 5);
draw();
</script>
</body>
</html>
"""
