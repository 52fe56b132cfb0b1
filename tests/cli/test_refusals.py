"""Whatever is typed, the command answers in words and with a status: no traceback, no endless work, nothing found out too late."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli import app

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Things that are no programs, rules, models or plans."""
    from weft.programs.catalog import example

    here = tmp_path_factory.mktemp("files")
    (here / "folder").mkdir()
    (here / "bytes").write_bytes(b"\x00\xa2\xff program mlp\n")
    good = example("mlp").make().text
    (here / "good.txt").write_text(good)
    (here / "attribute.txt").write_text(re.sub(r"gelu\((%\w+)\)", r"gelu(\1, foo=3)", good))
    (here / "return.txt").write_text(re.sub(r"return out=\S+", "return out=3.0", good))
    (here / "digits.txt").write_text(f"program p(dp={'9' * 5000})\n")
    head = "program p(dp=2)\n  %x = input()   f32[4, 4] dp:R\n"
    (here / "item.txt").write_text(f"{head}  %0 = item(%x, index=9)   f32[4] dp:R\n  return out=%0\n")
    (here / "syntax.py").write_text("def make(:\n    pass\n")
    (here / "raises.py").write_text("import torch\n\nraise ValueError('mine')\n")
    (here / "make.py").write_text("def breaks():\n    return {}['model']\n\n\ndef one():\n    return 3\n\n\ndef two():\n    return 1, 'x'\n")
    (here / "empty").write_text("")
    (here / "open.json").write_text('{"rule": [')
    (here / "hub").mkdir()
    (here / "hub" / "config.json").write_text("{}")
    (here / "false.txt").write_text("wrong: relu(x) == x for x[i]\n")
    (here / "locked").mkdir(mode=0o500)
    return here


CASES = {
    "check folder mlp": "cannot read .*folder", "check bytes mlp": "bytes is not text",
    "check attribute.txt good.txt": "gelu cannot be run as the program says",
    "check item.txt item.txt": "IndexError", "check return.txt good.txt": "3.0 is no value of the program", "check digits.txt mlp": "line 1 of program p",
    "verify --rules folder": "cannot read .*folder", "verify --rules bytes": "bytes is not text", "tune bytes": "bytes is not text",
    "tune folder": "cannot read .*folder", "discover --state folder": "cannot write .*folder", "discover --state good.txt": "holds no verdicts",
    "discover --out /nope/x": "no folder /nope", "discover --world nope": "no world named 'nope'", "calibrate --ranks a,b": "between 'a,b' processes",
    "calibrate --ranks=-1": "between '-1' processes", "calibrate --ranks 99999999999": "numbers of 2 to 1024", "calibrate --out /nope/x": "no folder /nope",
    "run --hosts 2 --meet-at x syntax.py": "hosts cannot meet at 'x'", "run --hosts 2 --meet-at x:99999999 syntax.py": "hosts cannot meet",
    "run --hosts 2 --host 2 syntax.py": "there is no host 2", "run --timeout -3 syntax.py": "cannot be waited for|a rank cannot be waited for -3",
    "plan syntax.py:make --cluster 1x2xA100": r"SyntaxError: invalid syntax \(syntax.py, line 1\)",
    "plan raises.py:make --cluster 1x2xA100": r"ValueError: mine \(raises.py, line 3\)", "plan gpt2 --cluster 1x8xH100 --memory 0GB": "more than 0 bytes",
    "plan make.py:breaks --cluster 1x2xA100":
    r"make.py:breaks raised an error needed a function that returns \(model, loss, batch\).*KeyError: 'model' \(make.py, line 2\)",
    "plan make.py:one --cluster 1x2xA100": "did not return .model, loss, batch.*found int", "plan make.py:two --cluster 1x2xA100": r"found \(int, str\)",
    "plan hub --cluster 1x2xA100": "try hf:.*hub", "plan hf:Qwen/Qwen3 --cluster 1x2xA100": "hf download Qwen/Qwen3 config.json --local-dir Qwen3",
    "plan gpt2 --cluster 1x8xh10": "no device named 'h10'.*try H100",
    "plan gpt2 --cluster 1x8xH100 --export torchtitn": "no system named 'torchtitn'.*try torchtitan",
    "plan gpt2 --cluster 1x8xH100 --memory 80": "80 without a unit try 80GB", "watch nowhere --patience 0": "no run in nowhere",
    "plan gpt2 --cluster 1x8xH100 --memory 1.2.3GB": "more than 0 bytes", "plan gpt2 --cluster 1x8xH100 --out /nope/x": "no folder /nope",
    "simulate gpt2 --cluster 1x8xH100 --pp 99999999999": "pp of at most 4,096", "simulate gpt2 --cluster 1x8xH100 --dp 99999999999": "dp of at most",
    "simulate gpt2 --cluster 1x8xH100 --micro-batch 99999999999999999999": "micro batch of at most",
    "simulate gpt2 --cluster 1x8xH100 --batch 2147483648": "too many passes", "simulate gpt2 --cluster 99999999x99999999xH100": "no cluster is that large",
    "simulate gpt2 --cluster 1x8xH100 --seq 99999999999999999999": "--seq of at most", "plan gpt2 --cluster 1x8xH100 --seq 2147483649": "--seq of at most",
    "simulate gpt2 --cluster 1x8xH100 --pp 2 --schedule nope": "no schedule named 'nope'.*1f1b", "calibrate --device tpu": "needed cpu",
    "plan gpt2 --cluster 1x8xH100 --seq 0": "--seq of 1 or more found 0", "fits gpt2 --gpu H100 --batch 0": "--batch of 1 or more found 0",
    "simulate gpt2 --cluster 1x8xH100 --plan dp4tp2": "no plan 'dp4tp2'.*try dp4,tp2",
    "simulate gpt2 --cluster 1x8xH100 --plan dp4,tp2 --zero 1": "one or the other found --plan dp4,tp2 with --zero",
    "simulate gpt2 --cluster 1x8xH100 --plan dp8,zero3:embed.*": "names parameters or modules needed degrees",
    "plan meta-llama/Llama-3-8B --cluster 1x8xH100": "try llama3-8b .*try hf download meta-llama/Llama-3-8B config.json",
    "run folder": "a folder",
    "verify --rules empty": "no rules in", "verify --rules open.json": "not JSON", "check empty empty": "needed a first line",
    "fits folder --gpu H100": "no Hugging Face",
    "price nowhere.toml --cluster 1x8xH100": "cannot read .*No such file", "price folder --cluster 1x8xH100": "cannot read .*Is a directory",
    "plan folder --cluster 1x2xA100": "try hf:.*folder, once", "plan hf: --cluster 1x2xA100": "needed a folder with a config.json",
    "plan gpt2 --cluster 1x8xH100 --dtensor bytes": "cannot read the plan",
    "report bytes": "not JSON", "report nowhere.json": "cannot read the plan", "explain folder": "cannot read the plan", "diff bytes bytes": "not JSON",
}  # fmt: skip


@pytest.mark.parametrize("line", CASES)
@pytest.mark.filterwarnings("ignore")
def test_it_is_refused_in_words(line: str, files: Path) -> None:
    words = [str(files / w) if (files / w.partition(":")[0]).exists() and "/" not in w and w != "." else w for w in line.split()]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert re.search(CASES[line], " ".join(done.output.split())), done.output
    assert "Traceback" not in done.output


def test_a_refuted_rule_is_status_1_and_the_seed_is_the_one_given(files: Path) -> None:
    done = CliRunner().invoke(app, ["verify", "--rules", str(files / "false.txt"), "--seed", "5", "--workers", "1"])
    assert done.exit_code == 1, done.output
    assert "1 refuted" in done.output and "seed 5" in done.output


def weft(*words: str, **more: object) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-m", "weft", *words], stderr=subprocess.PIPE, text=True, env=env, **more)  # type: ignore[call-overload, no-any-return]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
@pytest.mark.parametrize("words", [("show", "mlp"), ("diff", "--json")])
def test_output_that_finds_no_room_is_told(words: tuple[str, ...], tmp_path: Path) -> None:
    if words[0] == "diff":
        from tests.plan.test_files import planned_text

        (tmp_path / "plan.json").write_text(planned_text())
        words = (*words, str(tmp_path / "plan.json"), str(tmp_path / "plan.json"))
    with open("/dev/full", "w") as full:
        done = weft(*words, stdout=full)
        _, said = done.communicate(timeout=100)
    assert done.returncode == 1
    assert "No space left on device" in said and "Traceback" not in said and "Exception ignored" not in said


SLEEPS = """
import os, sys, time
import torch.distributed as dist
if sys.argv[1] == "exit":
    sys.exit(int(sys.argv[2]) if os.environ["RANK"] == "1" else 0)
if sys.argv[1] == "words":
    sys.exit("words of my own" if os.environ["RANK"] == "1" else None)
open(sys.argv[2] + os.environ["RANK"], "w").write(str(os.getpid()))
time.sleep(300)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_says_so_in_one_line(number: int, status: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SLEEPS)
    run = weft("run", "-n", "2", str(tmp_path / "script.py"), "sleep", str(tmp_path / "rank"), stdout=subprocess.PIPE, start_new_session=True)
    marks = [tmp_path / f"rank{r}" for r in range(2)]
    deadline = time.monotonic() + 90
    while not all(m.exists() and m.read_text() for m in marks) and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.05)
    os.killpg(run.pid, number)  # as a terminal does
    _, said = run.communicate(timeout=60)
    assert run.returncode == status, said
    assert f"stopped by {signal.Signals(number).name}: all ranks of this host were ended" in said
    assert "Traceback" not in said and len(said.splitlines()) == 1, said
    for mark in marks:
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)


@pytest.mark.parametrize(("how", "status", "words"), [(("exit", "3"), 3, "rank 1 ended with status 3"), (("words",), 1, "words of my own")])
def test_a_ranks_own_status_is_passed_on(how: tuple[str, ...], status: int, words: str, tmp_path: Path, commands: Path) -> None:
    (tmp_path / "script.py").write_text(SLEEPS)
    command = [str(commands / "weft"), "run", "-n", "2", str(tmp_path / "script.py"), *how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90)
    said = run.stderr
    assert run.returncode == status, said
    assert words in said and "Traceback" not in said
