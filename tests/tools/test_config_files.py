"""A --config file is trusted like a program, but not with the memory; and a run's name is one plain name on one line."""

from pathlib import Path

import pytest
import yaml
from runs import fit

from fabric_template.core.config import is_name
from fabric_template.tools import cli


def laugh(levels, width, leaf="lol"):
    lines = [f"a0: &a0 [{leaf}, {leaf}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join([*lines, f"model: {{hidden: *a{levels - 1}}}"])


BOMBS = {
    "a billion laughs": laugh(9, 10),
    "one long text, often": f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]",
    "deeper than a number can say": laugh(400, 10),
    "in itself": "a: &a [*a]",
    "merged": "a0: &a0 {k: 1}\n"
    + "\n".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 9)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_aliases_that_unfold_are_refused_before_they_do(tmp_path, capsys, kind, monkeypatch):
    Path("run.yaml").write_text(BOMBS[kind])
    built = []
    monkeypatch.setattr(yaml, "safe_load", built.append)
    assert cli.main(["fit", "--config", "run.yaml"]) == 2
    assert built == []
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("--config run.yaml: its aliases unfold to more than 10,000,000 characters; write less of them")
    )


def test_aliases_of_good_use_stay(tmp_path, capsys):
    Path("run.yaml").write_text(
        "max_epochs: &two 2\nlimit_train_batches: *two\nlimit_val_batches: *two\nlogger: false\n"
    )
    words = ["--enable_checkpointing", "false", "--enable_model_summary", "false", "--enable_progress_bar", "false"]
    assert cli.main(["fit", "--config", "run.yaml", *words]) == 0


def test_help_says_what_a_file_may_do(capsys):
    assert cli.main(["fit", "--help"]) == 0
    assert "It is trusted like a program: the classes that it names are imported and run." in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    "text", ["two\nlines", "bell\a", "tab\t", "\x7f", "\u2028", "\u202egpj.exe", "\0", "a/b", "", ".."]
)
def test_a_name_is_one_plain_line(tmp_path, text):
    assert not is_name(text)
    for word in ("name", "version"):
        with pytest.raises(ValueError, match="a folder's name") as error:
            fit(tmp_path, **{word: text})
        assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["run", "größe 2", "実験", "a.b-c_d=3"])
def test_other_names_may_be_in_any_language(text):
    assert is_name(text)
