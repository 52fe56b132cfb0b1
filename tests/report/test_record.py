"""What training writes and says about itself."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import weft
from weft import Mesh, P, lang
from weft.api.parallelize import parallelize
from weft.api.traced_step import measured_line
from weft.cli import app
from weft.core.errors import PlanError
from weft.cost.timeline import Seen, Task, Timeline
from weft.dynamic.watch import Costs, PhaseTime
from weft.record.progress import Printer, line, partings
from weft.record.run import Run, load, median, parse
from weft.report.of_run import of_run
from weft.runtime.trace import Statement, Trace, marked

pytestmark = pytest.mark.timeout(400)  # the pages take a while to make on a busy machine

CODE = """def step(inputs):  # GPT, rank at dp 0
    i_x = inputs['x']  # [4]
    t0 = torch.matmul(i_x, i_x)  # [4]
    t1 = comm.all_reduce(t0, on.dp, 'sum')  # [4]
    del t0
    def k0(chunk, a):  # one of 2 chunks
        b = a + 1
        return (b, )
    t2, t3, = in_chunks(k0, 2, [], [i_x], [])
    t1 = t1.wait()
    return {'y': t1}
"""


def seen(step: float, memory: float, **causes: float) -> Seen:
    tasks = (Task("matmul", "compute", 0.25, (), "compute"), Task("all_reduce", "communication", 0.5, (), "dp"))
    return Seen(step, memory, causes, Timeline(tasks, (0.0, 0.25), (0.25, 0.75)), [(0.0, 10.0), (0.5, 20.0)])


def made(ms: float = 100.0, wait: float = 0.0, **more: object) -> Run:
    own: dict[str, object] = {
        "name": "GPT", "kind": "training", "plan": "dp2", "program": "abc", "machine": "here", "cluster": "", "mesh": {"dp": 2},
        "unit": "tokens", "per_step": 1000.0, "flops": 1e10, "peak_flops": 1e12,
        "steps": {"ms": [500.0, 200.0, ms, ms, ms], "wait_ms": [0.0, wait, wait, wait, wait], "loss": [2.0] * 5},
        "predicted": seen(100.0, 1.0, compute=80.0, dp=20.0), "measured": seen(ms, 1.0, compute=80.0, dp=20.0),
    }  # fmt: skip
    return Run(**{**own, **more})  # type: ignore[arg-type]


# --- the file


def test_a_run_is_read_back_as_it_was(tmp_path: Path) -> None:
    batches = {"samples": 1, "vertices": 1, "edges": 2, "batches": 1, "least": 1, "policy": "depth", "rounds": [["a", 1, 2]]}
    run = made(schedule=batches, verbs=[{"step": "fuse", "same": True}])
    assert load(run.save(tmp_path / "deep" / "run").parent).data() == run.data()
    assert load(tmp_path / "deep" / "run" / "run.json").data() == run.data()
    assert [p.name for p in (tmp_path / "deep" / "run").iterdir()] == ["run.json"]


def test_a_run_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    data = made().data()
    with pytest.raises(PlanError, match=r'cannot read the run .*\n(.*\n)*.*parallelize\(\.\.\., record="run/"\)'):
        load(tmp_path)
    with pytest.raises(PlanError, match="is not a run"):
        parse([])
    with pytest.raises(PlanError, match="another version"):
        parse({**data, "weft_run": 9})
    with pytest.raises(PlanError, match="unknown colour"):
        parse({**data, "colour": 1})
    with pytest.raises(PlanError, match=r"needed\s+flops"):
        parse({k: v for k, v in data.items() if k != "flops"})


def test_the_first_steps_do_not_count() -> None:
    run = made(100.0, wait=25.0)
    assert run.step_ms == 100.0 and run.per_second == pytest.approx(1000 / 0.125)
    assert run.mfu == pytest.approx(1e10 / 0.125 / 1e12)
    assert made(peak_flops=0.0).mfu is None
    assert (median([]), median([3.0]), median([1.0, 2.0])) == (0.0, 3.0, 1.5)


# --- the words


def test_a_line_says_speed_and_prediction() -> None:
    assert line(made(110.0)) == "step 5, 110.0 ms, 9,091 tokens/s, MFU 9.1%, predicted 100.0 ms (+10%), memory 1.0 GB, predicted 1.0 GB (+0%)"
    assert list(partings(made(110.0))) == []


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (seen(130.0, 1.0, compute=110.0, dp=20.0), "a step takes 130.0 ms, 30% longer than predicted: compute is slower (+30.0 ms)"),
        (seen(130.0, 1.0, compute=80.0, dp=50.0), "a step takes 130.0 ms, 30% longer than predicted: communication along dp is slower (+30.0 ms)"),
    ],
)
def test_a_slow_step_says_why(measured: Seen, words: str) -> None:
    assert list(partings(made(130.0, measured=measured))) == [words]


def test_a_fast_step_says_so_too() -> None:
    run = made(70.0, measured=seen(70.0, 1.0, compute=50.0, dp=20.0))
    assert list(partings(run)) == ["a step takes 70.0 ms, 30% less than predicted: compute is faster (-30.0 ms)"]


def test_a_traced_step_that_was_slower_is_scaled_to_the_usual_one() -> None:
    run = made(130.0, measured=seen(260.0, 1.0, compute=220.0, dp=40.0))
    assert "compute is slower (+30.0 ms)" in next(iter(partings(run)))


def test_memory_and_input_are_told() -> None:
    assert list(partings(made(100.0, measured=seen(100.0, 1.5, compute=80.0, dp=20.0)))) == ["memory is 1.5 GB, 50% more than the 1.0 GB predicted"]
    assert list(partings(made(100.0, wait=40.0))) == ["training waits for input: 40.0 ms between steps of 100.0 ms"]


def test_a_parting_is_printed_once_each_line_whole() -> None:
    out = io.StringIO()
    printer, run = Printer(out, every=0.0), made(130.0, measured=seen(130.0, 1.0, compute=110.0, dp=20.0))
    printer.report(run)
    printer.report(run)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and all(text.startswith("weft: ") for text in lines)


# --- the trace


def test_every_statement_gets_a_mark() -> None:
    text, statements = marked(CODE)
    assert [(s.made, s.axis, s.waits) for s in statements] == [("t0", "", False), ("t1", "dp", False), ("t2", "", False), ("t1", "", True)]
    assert text.count("_mark(") == 5 and text.index("_mark(4") < text.index("return {'y'")
    assert statements[0] == Statement("t0", "torch.matmul(i_x, i_x)  # [4]")
    assert "        b = a + 1" in text and "_mark" not in text[text.index("def k0") : text.index("return (b")]


def test_recording_changes_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(**how: object) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        x, y = torch.randn(6, 8), torch.randn(6, 4)

        def loss(m: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return (m(batch["x"]) - batch["y"]).square().mean()

        step = parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), {"x": x, "y": y}, **how)  # type: ignore[arg-type]
        losses = [float(step({"x": x, "y": y})) for _ in range(7)]
        if step.recorder is not None:
            step.recorder.close()
        return losses

    assert train() == train(record=str(tmp_path))
    assert "weft: step 7, " in capsys.readouterr().err
    run = load(tmp_path)
    assert run.unit == "samples" and run.per_step == 6 and len(run.steps["ms"]) == 7
    assert run.measured is not None and run.predicted is not None
    assert sum(run.measured.causes_ms.values()) == pytest.approx(run.measured.step_ms, rel=1e-3)
    assert sum(run.predicted.causes_ms.values()) == pytest.approx(run.predicted.step_ms, rel=1e-3)
    assert max(b for _, b in run.measured.memory) == pytest.approx(run.measured.memory_gb * 1e9)
    held = sum(4 * torch.Size(t["shape"]).numel() for t in run.tensors)
    assert held <= run.measured.memory_gb * 1e9 < 4 * held
    assert next(v["same"] for v in run.verbs) is True


def test_what_is_predicted_of_a_run_is_what_plans_are_priced_by(pages: dict[str, Path]) -> None:
    run = load(pages["gpt-run"].parent / "gpt")
    own = next(a for a in run.alternatives if a["plan"] == run.plan)
    assert run.predicted is not None and own["step_ms"] == pytest.approx(run.predicted.step_ms)
    assert {t["role"] for t in run.tensors} == {"param", "state", "batch"}
    assert {c["axis"] for c in run.communication} == {"dp"}
    assert run.measured is not None and {t.stream for t in run.measured.line.tasks} == {"compute", "communication", "phase", "layer"}
    for seen in (run.predicted, run.measured):  # both in the same bands
        bands = {kind: list(dict.fromkeys(t.name for t in seen.line.tasks if t.stream == kind)) for kind in ("phase", "layer")}
        assert bands["phase"] == ["forward", "backward", "optimizer"] and {"blocks.0", "blocks.1"} <= set(bands["layer"])
    assert "fused" in run.measured.causes_ms and "fused" in run.predicted.causes_ms


# --- dynamic models


def test_costs_of_rounds_are_a_line() -> None:
    pieces = [PhaseTime("v+", "rounds", n, n / 1e3, 2e-5 + n * 1e-6) for n in (1, 4, 9)] + [PhaseTime("v+", "back", 9, 0.02, 9e-6)]
    costs = Costs.of(pieces, 0.05, 100)
    assert costs.phases["v+", "rounds"] == pytest.approx((2e-5, 1e-6))
    assert costs.phases["v+", "back"] == pytest.approx((0.0, 1e-6))
    assert costs.around["prepare"] == pytest.approx(1e-5)


def test_a_dynamic_step_is_predicted_then_traced(pages: dict[str, Path]) -> None:
    run = load(pages["tree-lstm-run"].parent / "trees")
    assert run.predicted is not None and run.measured is not None
    rounds = [sum(t.cause == "rounds" for t in s.line.tasks) for s in (run.predicted, run.measured)]
    assert rounds[0] == rounds[1] == run.schedule["batches"]
    assert {a["plan"].split(":")[0] for a in run.alternatives} == {"auto", "depth", "agenda", "lookahead"}
    assert replace(run, steps={"ms": []}).step_ms == 0.0


# --- the command


def test_the_command_writes_page_and_trace(pages: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(pages["gpt-run"].parent / "gpt"), "--out", str(out), "--json"])
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert done.exit_code == 0 and told["page"] == str(out) and told["bytes"] == out.stat().st_size < 2_000_000
    assert Path(told["trace"]).is_file()


def test_the_command_says_what_it_needs() -> None:
    done = CliRunner().invoke(app, ["report", "nowhere.json"])
    assert done.exit_code == 1 and "cannot read the plan nowhere.json" in done.output


# --- pipelines


def test_a_step_in_stages_is_predicted_and_traced_pass_by_pass(pages: dict[str, Path]) -> None:
    run = load(pages["pipeline-run"].parent / "line")
    assert run.predicted is not None and run.measured is not None and run.mesh == {"pp": 2, "dp": 1}
    for seen_ in (run.predicted, run.measured):
        for stage in ("stage 0", "stage 1"):
            own = [(t.name, t.cause) for t in seen_.line.tasks if t.stream == stage]
            passes = [name for name, cause in own if cause in ("forward", "backward")]
            assert sorted(passes) == sorted(f"{kind} {k}" for kind in ("forward", "backward") for k in range(4))
        assert sum(seen_.causes_ms.values()) == pytest.approx(seen_.step_ms, rel=1e-3)
        assert max(b for _, b in seen_.memory) == pytest.approx(seen_.memory_gb * 1e9)
    assert run.predicted.memory_gb == pytest.approx(run.measured.memory_gb, rel=0.2)
    assert run.unit == "tokens" and run.per_step == 8 * 32
    at = {t["name"]: t["places"]["pp"] for t in run.tensors if t["role"] == "param"}
    assert set(at.values()) == {"O(0)", "O(1)"} and at["tokens.weight"] == "O(0)"
    orders = ("", "gpipe,", "interleaved,", "zero-bubble,", "1f1b-eager,", "zero-bubble-eager,", "zero-bubble-v,", "dual-pipe-v,")
    assert {a["plan"] for a in run.alternatives} == {f"pp2,{order}micro4" for order in orders}
    message = next(c for c in run.communication if c["kind"] == "message")
    assert (message["axis"], message["count"]) == ("pp", 8)


def test_no_stage_reads_what_was_not_made_yet(pages: dict[str, Path]) -> None:
    run = load(pages["pipeline-run"].parent / "line")
    assert run.measured is not None
    line = run.measured.line
    when = {(t.stream, t.name): (a, b) for t, a, b in zip(line.tasks, line.start, line.end, strict=True)}
    for k in range(4):
        assert when["stage 0", f"forward {k}"][1] <= when["stage 1", f"forward {k}"][0] + 1e-6
        assert when["stage 1", f"backward {k}"][1] <= when["stage 0", f"backward {k}"][0] + 1e-6


def test_recording_changes_no_step_in_micro_batches(tmp_path: Path) -> None:
    def train(**how: object) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        batch = {"x": torch.randn(6, 8), "y": torch.randn(6, 4)}

        def loss(m: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return (m(batch["x"]) - batch["y"]).square().mean()

        step = parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), batch, plan="micro3", **how)  # type: ignore[arg-type]
        losses = [float(step(batch)) for _ in range(7)]
        if step.recorder is not None:
            step.recorder.close()
        return losses

    assert train() == train(record=str(tmp_path), progress=False)
    run = load(tmp_path)
    assert run.per_step == 6 and run.measured is not None and {t.stream for t in run.measured.line.tasks} == {"stage 0"}


def test_noise_is_refused_in_micro_batches() -> None:
    model = nn.Linear(4, 4)
    batch = {"x": torch.randn(4, 4)}
    with pytest.raises(PlanError, match=r"(?s)micro2 runs micro-batches.*needed\s+noise=False"):
        parallelize(model, lambda m, b: m(b["x"]).sum(), torch.optim.SGD(model.parameters(), lr=0.1), batch, plan="micro2", noise=True)


def test_two_runs_side_by_side_and_a_run_that_is_watched(tmp_path: Path) -> None:
    """One page of both, and a page that loads itself again while the run is watched; the watch ends by itself."""
    run_folder, other = tmp_path / "first", tmp_path / "other"
    made(measured=seen(110.0, 2.0, compute=60.0, dp=50.0)).save(run_folder)
    made(ms=90.0).save(other)
    done = CliRunner().invoke(app, ["report", str(run_folder), str(other), "-o", str(tmp_path / "both.html")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "both.html").read_text()
    assert "first and other" in text and 'http-equiv="refresh"' not in text
    watched = CliRunner().invoke(app, ["watch", str(run_folder), "--patience", "0.3", "--every", "0.1", "-o", str(tmp_path / "live.html")])
    assert watched.exit_code == 0 and "step " in watched.stdout and "no news for 0.3 s" in watched.stderr
    assert (tmp_path / "live.html").exists()


def test_waiting_for_ranks_that_start_later_is_no_communication() -> None:
    """An all_reduce of a few bytes that another rank starts 0.3 s later is a wait for that rank, and communication of 0.01 s."""
    p = weft.trace(lambda g: {"loss": lang.all_reduce(g, "dp") * 2.0}, Mesh(dp=2), g=lang.f32(2, dp=P()))
    work, started, waited = Statement("t0", "comm.all_reduce(g, on.dp)", "dp"), 0.1, 0.41
    trace = Trace([work, Statement("t0", "t0.wait()", waits=True), Statement("t1", "mul(t0)")], [0.0, started, waited], [started, waited, 0.5])
    drawn, causes = measured_line(p, trace, {"t0": 0.4})
    assert causes == pytest.approx({"dp": 10.0, "peers": 400.0, "compute": 90.0})
    (solid,) = (t for t in drawn.tasks if t.stream == "communication" and t.cause == "dp")
    assert solid.seconds == pytest.approx(0.01)
    assert measured_line(p, trace)[1] == pytest.approx({"dp": 410.0, "compute": 90.0})


def test_cards_and_timeline_tell_one_time() -> None:
    """A traced step is slower than others; it is drawn as long as they are."""
    facts = of_run(made(130.0, measured=seen(260.0, 1.0, compute=220.0, dp=40.0)))
    assert facts.figures[0].value == "130 ms" and sum(facts.causes_ms["measured"].values()) == pytest.approx(130.0)
