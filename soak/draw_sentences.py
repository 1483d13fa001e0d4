"""Draw sentences at random, for a reader who has never seen the code.

python soak/draw_sentences.py [SEED] prints a Markdown table with twelve sentences of each kind: docstrings, comments,
error messages, documentation pages and README.md. The sentences of a comment or an error message are drawn together.
"""

import argparse
import ast
import io
import random
import re
import tokenize
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = sorted((REPOSITORY / "fabric_template").rglob("*.py"))
PER_KIND = 12


def split_sentences(text):
    """Return the sentences of a text, without very short ones."""
    text = " ".join(re.sub(r"(?m)^ *(>>>|\.\.\.).*$", "", text).split())
    sentences = re.split(r"(?<=[.!?]) +(?=[A-Z`])", text)
    return [sentence for sentence in sentences if len(sentence.split()) >= 4]


def docstrings(source):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        # Stop at the first example or list of arguments, because these parts are not sentences.
        yield from split_sentences(re.split(r"\n *(?:Example|Args|Attributes):", text or "")[0])


def comments(source):
    """Yield each comment at the end of a code line, and each block of other comment lines."""
    block, last = [], 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.search("noqa|type:", token.string):
            is_beside_code = not token.line.lstrip().startswith("#")
            if token.start[0] != last + 1 or is_beside_code:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            last = 0 if is_beside_code else token.start[0]
    yield " ".join(block)


def errors(lines):
    """Yield the messages as users see them."""
    yield from (line.split(": ", 2)[2] for line in lines.splitlines())


def prose(source):
    """Yield a page's sentences, except for titles and for phrases in tables."""
    text = re.sub(r"(?ms)^```.*?^```$", "\n\n", source)
    text = re.sub(r"(?m)^#.*$", "\n", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for block in re.split(r"\n\n|\n(?=[-|#\d])", text):
        cells = [block.lstrip("- ")]
        if block.startswith("|"):
            cells = block.lstrip("- ").split(" | ")
        for cell in cells:
            yield from (text for text in split_sentences(cell.strip("| \n")) if text[-1] in ".:?!")


def draw(seed):
    """Return (kind, file, sentence) for each drawn sentence."""
    pages = sorted((REPOSITORY / "docs").glob("*.md"))
    sources = {
        "docstring": (PACKAGE, docstrings),
        "comment": (PACKAGE, comments),
        "error": ([REPOSITORY / "tests" / "contract" / "wrong_inputs.txt"], errors),
        "documentation": (pages, prose),
        "README": ([REPOSITORY / "README.md"], prose),
    }
    generator, drawn = random.Random(seed), []
    for kind, (files, find) in sources.items():
        found = []
        for path in files:
            texts = find(path.read_text(encoding="utf-8"))
            found += [(kind, path.name, text) for text in texts if len(text.split()) >= 4]
        drawn += generator.sample(found, PER_KIND)
    return drawn


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    seed = parser.parse_args().seed
    print(f"| | kind | file | sentence (seed {seed}) | verdict |\n|---|---|---|---|---|")
    for number, (kind, file, text) in enumerate(draw(seed), 1):
        print(f"| {number} | {kind} | {file} | {text.replace('|', chr(92) + '|')} | |")
