"""Test that editors and help() show FabricLoop's options, which LoopConfig defines."""

import dataclasses
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_processes

from fabric_template import FabricLoop
from fabric_template.config import LoopArguments, document_fields


def test_the_signature_of_fabric_loop_lists_every_option():
    parameters = inspect.signature(FabricLoop).parameters
    fields = {field.name: field.default for field in dataclasses.fields(LoopArguments)}
    assert {name: parameter.default for name, parameter in parameters.items()} == fields
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    assert kinds.pop("fabric") is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {*kinds.values()} == {inspect.Parameter.KEYWORD_ONLY}


def test_help_of_fabric_loop_explains_each_option():
    text = pydoc.plain(pydoc.render_doc(FabricLoop))
    assert "max_epochs: 'int | None' = None" in text
    documented = document_fields()
    assert list(documented) == [field.name for field in dataclasses.fields(LoopArguments)]
    for name, explanation in documented.items():
        assert f"{name}: {explanation}" in text


def test_ipython_completes_and_explains_the_options():
    pytest.importorskip("IPython.core.interactiveshell")
    # Use a separate process, because an IPython shell changes the prompts of its process permanently.
    codes, output = run_processes(complete, ranks=1, is_launched=False)
    assert codes == [0], output


def complete(rank):
    from IPython.core.completer import provisionalcompleter
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.user_ns["FabricLoop"] = FabricLoop
    with provisionalcompleter():
        typed = "FabricLoop(save_"
        found = {item.text for item in shell.Completer.completions(typed, len(typed))}
    assert {"save_top_k=", "save_last=", "save_every_n_steps="} <= found
    shown = shell.object_inspect_mime("FabricLoop")["text/plain"]
    assert document_fields()["save_top_k"] in shown


def test_mypy_reports_wrong_names_and_types_of_fabric_loop_options(tmp_path):
    pytest.importorskip("mypy")
    Path("script.py").write_text(
        "from fabric_template import FabricLoop\n"
        "from fabric_template import nonsense\n"
        "FabricLoop(max_epochs=3, accelerator='cpu', callbacks=[], monitor='val_loss')\n"
        "FabricLoop(max_epoch=3)\n"
        "FabricLoop(max_epochs='three')\n"
    )
    root = Path(__file__).resolve().parents[2]
    options = ["--no-incremental", "--follow-imports=skip", "--ignore-missing-imports", "--cache-dir", str(tmp_path)]
    files = [str(root / "fabric_template" / name) for name in ("__init__.py", "loop.py", "config.py")]
    command = [sys.executable, "-m", "mypy", *options, "script.py", *files]
    done = subprocess.run(command, capture_output=True, text=True, env={"MYPYPATH": str(root), "PATH": ""})
    errors = [line for line in done.stdout.splitlines() if re.match(r"script.py:\d+: error", line)]
    assert [line.partition(" error: ")[2] for line in errors] == [
        'Module "fabric_template" has no attribute "nonsense"  [attr-defined]',
        'Unexpected keyword argument "max_epoch" for "FabricLoop"; did you mean "max_epochs"?  [call-arg]',
        'Argument "max_epochs" to "FabricLoop" has incompatible type "str"; expected "int | None"  [arg-type]',
    ], done.stdout
