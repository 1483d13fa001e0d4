"""Test that no file uses expressions that the style guide replaces."""

import ast
import io
import json
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# No file may contain these expressions, which have a plain replacement in the project's glossary.
EXPRESSIONS = re.compile(
    r"\b(behind|ahead of|at hand|anew|once more|so many|mended|mends?|alike|of itself|by themselves"
    r"|go(es)? on|going on|gone on|taken? up again|(is|are) others?|others? than|in parts|in pieces"
    r"|stands? (in|beside|there|behind)|stood (in|beside|there)|lies|begins?|began|begun"
    r"|words?|verbs?|rooms?|houses?|keepers?|bookmarks?|home|owner|says?|said|tells?|told)\b"
    r"|(?<!accumulation )\bwindow\b|\brun\.at\b"
)
HEADING = re.compile(r"[A-Z][A-Za-z_ ]{0,30}: ")
HEADLESS = re.compile(r"(What|Whether|Where|Who|The same)\b")
# If this pattern has no match in a Python file, the file has neither a banned expression nor a banned docstring.
MAY_MATCH = re.compile(rf"{EXPRESSIONS.pattern}|[\"'][\s\\]*({HEADING.pattern}|{HEADLESS.pattern})")

# Each folder may contain at most these numbers of banned expressions, of docstrings such as
# "Noun: definition", and of docstrings that start with a word such as "What". The default is 0.
LANGUAGE_LIMITS = {
    "tests": (1, 0, 0),
}


def prose_of_python(source):
    """Return the comments and strings of Python code, the parts that contain prose."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    return "\n".join(token.string for token in tokens if token.type in kinds)


def docstrings(source):
    """Yield the docstring of the module and of each class and function."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def language_of(path):
    """Count the banned expressions and the two forms of banned docstrings in a file."""
    text = path.read_text(encoding="utf-8")
    headings = headless = 0
    if path.suffix == ".py" and not MAY_MATCH.search(text):
        # Return early, because tokenizing a file takes much longer than this search.
        return Counter(expressions=0, headings=0, headless=0)
    if path.suffix == ".py":
        for docstring in docstrings(text):
            headings += bool(HEADING.match(docstring))
            headless += bool(HEADLESS.match(docstring))
        text = prose_of_python(text)
    elif path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    else:
        text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return Counter(expressions=len(EXPRESSIONS.findall(text)), headings=headings, headless=headless)


def folder_of(path):
    """Return the folder that a file is counted for: a folder of the package, or a top folder of the repository."""
    parts = path.parts[:-1]
    return "/".join(parts[:2] if parts[:1] == ("fabric_template",) else parts[:1]) or "top"


def measure_language(repository):
    files = [path for suffix in ("py", "md", "ipynb") for path in repository.glob(f"*.{suffix}")]
    for folder in ("fabric_template", "tests", "docs", "notebooks", "benchmarks", "soak"):
        files += [path for path in (repository / folder).rglob("*") if path.suffix in (".py", ".md", ".ipynb")]
    counts = {}
    for path in files:
        # Skip this file, which lists all banned expressions, and Jupyter's copies of notebooks.
        if path.name != Path(__file__).name and ".ipynb_checkpoints" not in path.parts:
            counts.setdefault(folder_of(path.relative_to(repository)), Counter()).update(language_of(path))
    return {folder: (c["expressions"], c["headings"], c["headless"]) for folder, c in sorted(counts.items())}


def worse_language(repository, limits):
    found = []
    for folder, counts in measure_language(repository).items():
        limit = limits.get(folder, (0, 0, 0))
        if any(count > most for count, most in zip(counts, limit, strict=True)):
            found.append(f"{folder}: {counts}, at most {limit}")
    return found


def test_no_folder_contains_more_banned_phrases_than_its_limit_allows():
    assert worse_language(REPOSITORY, LANGUAGE_LIMITS) == []


@pytest.fixture
def small_project(tmp_path):
    for folder in ("fabric_template/data", "tests", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "fabric_template/data/loaders.py").write_text('"""Load the data."""\n\nSIZE = 1\n')
    (tmp_path / "tests/test_a.py").write_text("A = 1\n")
    (tmp_path / "docs/a.md").write_text("# A page\n")
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "# it goes on behind the step",
        'def a():\n    """Held: what a run holds."""',
        'def a():\n    """Whether a step is due."""',
        'raise ValueError("a word that is not known")',
    ],
)
def test_the_wording_check_finds_banned_phrases_in_comments_docstrings_and_errors(small_project, line):
    limits = measure_language(small_project)
    assert worse_language(small_project, limits) == []
    path = small_project / "fabric_template/data/loaders.py"
    path.write_text(path.read_text() + line + "\n")
    assert len(worse_language(small_project, limits)) == 1
