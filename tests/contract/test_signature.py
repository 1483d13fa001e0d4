"""FabricLoop's words are completed and shown where one types them, from one source: LoopConfig."""

import dataclasses
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
from externally import externally

from fabric_template import FabricLoop, LoopConfig

FABRIC = ["accelerator", "strategy", "devices", "num_nodes", "precision", "plugins", "loggers", "callbacks"]


def test_the_signature_is_of_loop_config_and_what_the_constructor_takes_itself():
    parameters = inspect.signature(FabricLoop).parameters
    fields = {field.name: field for field in dataclasses.fields(LoopConfig)}
    assert list(parameters) == ["fabric", *fields, *FABRIC]
    kinds = {name: one.kind for name, one in parameters.items()}
    assert kinds.pop("fabric") is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {*kinds.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert {name: one.default for name, one in parameters.items() if name in fields} == {
        name: field.default for name, field in fields.items()
    }
    code = FabricLoop.__init__.__code__  # what stands in the constructor's own line has the same names and defaults
    assert [*code.co_varnames[1 : 1 + code.co_argcount + code.co_kwonlyargcount - 1]] == ["fabric", *FABRIC]
    assert FabricLoop.__init__.__kwdefaults__ == {name: parameters[name].default for name in FABRIC}


def test_help_shows_them():
    text = pydoc.plain(pydoc.render_doc(FabricLoop))
    assert "max_epochs: 'int | None' = None" in text
    assert "seed: 'int | None' = None" in text


def test_a_notebook_completes_them():
    """In a process of its own: a shell leaves its prompts, by which one knows an interactive session."""
    pytest.importorskip("IPython.core.interactiveshell")
    codes, said = externally(complete, ranks=1, is_launched=False)
    assert codes == [0], said


def complete(rank):
    from IPython.core.completer import provisionalcompleter
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.user_ns["FabricLoop"] = FabricLoop
    with provisionalcompleter():
        found = {one.text for one in shell.Completer.completions("FabricLoop(save_", len("FabricLoop(save_"))}
    assert {"save_top_k=", "save_last=", "save_every_n_steps="} <= found


def test_an_editor_knows_them(tmp_path):
    """By the types alone: a type checker names the misspelled word, and takes the right ones."""
    pytest.importorskip("mypy")
    Path("script.py").write_text(
        "from fabric_template import FabricLoop\n"
        "FabricLoop(max_epochs=3, accelerator='cpu', callbacks=[], monitor='val_loss')\n"
        "FabricLoop(max_epoch=3)\n"
        "FabricLoop(max_epochs='three')\n"
    )
    root = Path(__file__).resolve().parents[2]
    words = ["--no-incremental", "--follow-imports=skip", "--ignore-missing-imports", "--cache-dir", str(tmp_path)]
    files = [root / "fabric_template" / name for name in ("__init__.py", "loop.py", "core/config.py")]  # and not torch
    command = [sys.executable, "-m", "mypy", *words, "script.py", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, env={"MYPYPATH": str(root), "PATH": ""})
    assert [
        line.partition(" error: ")[2] for line in done.stdout.splitlines() if re.match(r"script.py:\d+: error", line)
    ] == [
        'Unexpected keyword argument "max_epoch" for "FabricLoop"; did you mean "max_epochs"?  [call-arg]',
        'Argument "max_epochs" to "FabricLoop" has incompatible type "str"; expected "int | None"  [arg-type]',
    ], done.stdout
