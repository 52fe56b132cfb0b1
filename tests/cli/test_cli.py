"""The command as a user meets it: help is light, errors are text, `--json` is the last line of stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from weft.cli import COMMANDS, Group, app, bench, doctor
from weft.cli.output import console, emit, results
from weft.core.errors import PlanError

runner = CliRunner()


def test_help_lists_every_command() -> None:
    shown = runner.invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert [name for name in COMMANDS if name not in shown.output] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    assert runner.invoke(app, [name, "--help"]).exit_code == 0


def test_the_command_line_does_not_import_torch() -> None:
    done = _python("import sys, weft.cli; print(*sorted({name.split('.')[0] for name in sys.modules}))")
    assert not {"torch", "triton", "numpy", "highspy", "scipy", "z3"} & set(done.stdout.split())


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "weft", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "Usage: weft " in done.stdout


def test_weft_errors_end_as_text_on_stderr() -> None:
    failing = _app_with(PlanError("no plan fits", needed="70 GB", found="40 GB", try_="more devices"))
    result = runner.invoke(failing, ["go"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "PlanError: no plan fits\n\n  needed  70 GB\n  found   40 GB\n  try     more devices\n"


def test_other_errors_are_bugs_and_keep_their_traceback() -> None:
    result = runner.invoke(_app_with(KeyError("oops")), ["go"])
    assert isinstance(result.exception, KeyError)


def _app_with(error: Exception) -> typer.Typer:
    failing = typer.Typer(cls=Group)
    failing.callback()(lambda: None)

    @failing.command()
    def go() -> None:
        raise error

    return failing


# --- output


def test_emit_is_one_line_and_last(capsys: pytest.CaptureFixture[str]) -> None:
    console.print("a notice")
    emit({"name": "wéft\n", "rows": [{"count": 3, "ms": 1.5}], "ok": True, "none": None})
    out, err = capsys.readouterr()
    assert err == "a notice\n"
    assert out.count("\n") == 1
    assert json.loads(out) == {"name": "wéft\n", "rows": [{"count": 3, "ms": 1.5}], "ok": True, "none": None}


def test_results_go_to_stdout_unless_it_carries_json(capsys: pytest.CaptureFixture[str]) -> None:
    results().print("word " * 60)
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and err == "", "where no terminal is, lines are not broken"
    made = runner.invoke(app, ["diff", "--help"])
    assert made.exit_code == 0
    table = runner.invoke(app, ["doctor"])
    assert "python" in table.stdout and table.stderr == ""
    table = runner.invoke(app, ["doctor", "--json"])
    assert "python" in table.stderr and table.stdout.count("\n") == 1


def test_version_and_bare_command() -> None:
    import weft

    assert runner.invoke(app, ["--version"]).stdout == f"weft {weft.__version__}\n"
    bare = runner.invoke(app, [])
    assert bare.exit_code == 0 and "Usage" in bare.stdout
    assert "--install-completion" in runner.invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_of_one_style(name: str) -> None:
    """Sentences begin with a capital letter, and `--json` has one wording."""
    import typer as t

    command = t.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    for p in command.params:
        words = getattr(p, "help", "") or ""
        odd = words and not (words[0].isupper() or words.startswith(("torchtitan", "fp32", "adamw", "compiled")))
        assert not odd and (not words or len(words.rstrip(".")) > 3), (name, p.name, words)
        assert "[" not in words, f"{name}: rich takes [...] in {words!r} for markup and leaves it out; give show_default="
        if p.name == "json":
            assert words == "Print the result as one JSON object."


@pytest.mark.parametrize("three", [3, np.int64(3), torch.tensor(3), np.array(3)])
def test_integers_stay_integers(three: object, capsys: pytest.CaptureFixture[str]) -> None:
    emit({"count": three, 4: (three,)})
    assert capsys.readouterr().out == '{"count": 3, "4": [3]}\n'


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), np.float32("-inf"), torch.tensor(float("nan"))])
def test_what_json_cannot_say_is_refused_by_its_place(bad: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"\$\.rows\[1\]\.ms is -?(nan|inf), which JSON cannot say"):
        emit({"rows": [{}, {"ms": bad}]})
    with pytest.raises(TypeError, match=r"\$\.at is a PosixPath"):
        emit({"at": Path(".")})
    assert capsys.readouterr().out == ""


# --- bench


@pytest.fixture
def benches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a bench of its own name, one file with two, and a helper."""
    folder = tmp_path / f"benches_{tmp_path.name}"
    folder.mkdir()
    one = (
        "from weft.cli.output import emit\n"
        "def register(app):\n"
        "    @app.command()\n    def {0}():\n        emit({{'bench': '{0}'}})\n"
    )
    (folder / "adam.py").write_text(one.format("adam"))
    (folder / "two.py").write_text(one.format("left") + "\n    app.command('right-one')(left)\n")
    (folder / "helper.py").write_text("x = 1\n")
    monkeypatch.setattr(bench, "FOLDER", folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


@pytest.mark.parametrize("name", sorted(bench.FORMER))
def test_benches_answer_to_their_former_names(name: str) -> None:
    shown, now = (runner.invoke(app, ["bench", n, "--help"], env={"COLUMNS": "200"}) for n in (name, bench.FORMER[name]))
    assert shown.exit_code == 0 and "--json" in shown.output
    assert shown.output.replace(name, "").split() == now.output.replace(bench.FORMER[name], "").split()


def test_benches_are_found_in_files(benches: Path) -> None:
    shown = runner.invoke(app, ["bench", "--help"])
    assert all(name in shown.output for name in ("adam", "left", "right-one"))
    assert "helper" not in shown.output
    assert json.loads(runner.invoke(app, ["bench", "adam"]).stdout) == {"bench": "adam"}
    assert json.loads(runner.invoke(app, ["bench", "right-one"]).stdout) == {"bench": "left"}
    assert "No such command 'middle'" in runner.invoke(app, ["bench", "middle"]).output


def test_only_the_bench_asked_for_is_imported(benches: Path) -> None:
    (benches / "aaa.py").write_text("raise RuntimeError('imported')\n")
    assert runner.invoke(app, ["bench", "adam"]).exit_code == 0
    assert "imported" in str(runner.invoke(app, ["bench", "left"]).exception)


def test_a_missing_bench_folder_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "bench")
    result = runner.invoke(app, ["bench", "adam"])
    assert result.exit_code == 1
    assert "benchmarks are not installed with the package" in result.stderr
    assert f"needed  a folder {tmp_path / 'bench'}" in result.stderr
    assert "try     clone the repository" in result.stderr


# --- doctor


def test_doctor_says_one_line_per_check() -> None:
    result = runner.invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == (1 if report["fail"] else 0)
    assert [check["name"] for check in report["checks"]][:2] == ["python", "torch"]
    assert report["ok"] + report["warn"] + report["fail"] == len(doctor.CHECKS) == len(report["checks"])
    assert all(check["advice"] for check in report["checks"] if check["status"] != "ok")
    assert all(f"{check['name']:<14} {check['found']}" in result.stderr for check in report["checks"])


def test_a_failed_check_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda: doctor.Finding("python", "fail", "3.6", "use [3.11]"),))
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0] == "fail  python         3.6"
    assert result.stdout.splitlines()[1].strip() == "-> use [3.11]"


def test_doctor_knows_packages_that_are_absent_broken_or_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_weft_probe.py").write_text("raise ImportError('no symbol')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    look = doctor._package
    assert look("x", "weft-nowhere", advice="a") == doctor.Finding("x", "warn", "not installed", "a")
    assert look("x", "torch", "broken_weft_probe", advice="a").found.endswith("does not import: ImportError: no symbol")
    assert look("x", "torch", advice="a", low=(99, 0)).status == "fail"
    assert look("x", "torch", advice="a", high=(1, 0)).status == "warn"


def test_doctor_says_how_to_survive_amx_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(doctor, "_read", lambda path: "flags : avx512f amx_tile amx_bf16")
    monkeypatch.setattr(doctor, "_try", lambda argv: (-4, ""))
    assert doctor.bf16() == doctor.Finding("bf16 on CPU", "warn", "a matmul dies of SIGILL", doctor.BF16_ADVICE)
    monkeypatch.setattr(doctor, "_try", lambda argv: (0, ""))
    assert doctor.bf16().status == "warn"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    assert doctor.bf16().status == "ok"


def test_doctor_tries_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    assert "false cannot build a shared library" in doctor.compiler().found


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_listed_modules(name: str) -> None:
    assert callable(getattr(import_module(f"weft.cli.{name}"), name))


def _python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
