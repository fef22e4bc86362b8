"""`kvpolicy check`: all files, everything wrong with each, where it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from kvpolicy import cli


@pytest.fixture
def check(monkeypatch, capsys, tmp_path):
    """Run the command on files of those texts: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*names, **files):
        for name, text in files.items():
            Path(f"{name}.yaml").write_text(text)
        monkeypatch.setattr(sys, "argv", ["kvpolicy", "check", *(names or [f"{name}.yaml" for name in files])])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code or 0, *capsys.readouterr()

    return run


def test_good_files(check):
    expected = "one.yaml: ok, h2o\ntwo.yaml: ok, protect\n"
    assert check(one="kind: h2o", two="kind: protect\nof: lru\nbudget: 64") == (0, expected, "")


def test_problems_of_all_files_are_shown_where_they_are(check):
    base = "kind: protect\nof: {kind: streaming_llm, sink: 1}\n"
    own = "extends: base.yaml\nsinks:   -1\nof:\n  sinks: x\n"
    status, out, err = check(
        "own.yaml", "good.yaml", "none.yaml", "empty.yaml", own=own, base=base, good="kind: lru", empty=""
    )
    assert (status, err) == (2, "")
    assert out == dedent("""\
        own.yaml:2:10: sinks: must be greater than or equal to 0, not -1
        sinks:   -1
                 ^
        own.yaml:4:10: of.sinks: must be a valid integer, not 'x'
          sinks: x
                 ^
        base.yaml:2:27: of.sink: unknown option 'sink'; did you mean 'sinks'? streaming_llm has: sinks, positions
        of: {kind: streaming_llm, sink: 1}
                                  ^
        good.yaml: ok, lru
        none.yaml: cannot be read: No such file or directory
        empty.yaml:1:1: is empty; it needs a policy, such as kind: h2o

        ^
        """)


@pytest.mark.parametrize(
    ("line", "caret"),
    [
        ('{"kind":\t"h2o",\t"recent": 2.0}', f"{8 * ' '}\t{6 * ' '}\t{10 * ' '}^"),
        ('{"kind": "h2o", "名": 1, "recent": 2.0}', f"{(34 + 1) * ' '}^"),
    ],
)
def test_the_caret_is_below_its_column(check, line, caret):
    _, out, _ = check(own=line)
    assert f"{line}\n{caret}\n" in out


def test_a_line_that_is_no_text_is_shown_all_the_same(check):
    Path("own.yaml").write_bytes(b"kind: h2o\r\nsinks: \xff\r\n")
    assert check("own.yaml")[1] == "own.yaml:2:1: is not text in UTF-8\nsinks: \N{REPLACEMENT CHARACTER}\n^\n"


def test_it_needs_a_file(check):
    assert check("--help")[0] == 0
    command = [sys.executable, "-m", "kvpolicy.cli", "check"]
    assert subprocess.run(command, capture_output=True).returncode == 2
