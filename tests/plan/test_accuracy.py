"""Rows of measured and published runs: read, filled in, predicted, summed up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench._rows import Row, Unreadable, read
from bench.accuracy import percentile, predict, spearman
from weft.cli import app

ITERATIONS = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
    "data parallelism,pipeline parallelism,iteration time (ms)\n"
)
PUBLISHED = (
    "source,gpu,gpus,layers,hidden,heads,kv_heads,ffn,vocab,seq,global_batch,micro_batch,tp,pp,dp,cp,"
    "layers_per_virtual_stage,recompute,dtype,zero,metric,value,network_gbps_per_gpu\n"
)
# Narayanan 2021, table 1; Korthikanti 2022, table 5.
SC21 = "SC21 145.6B,A100-80,1536,80,12288,96,96,49152,51200,2048,2304,2,8,8,24,1,5,full,fp16,0,TFLOPs_per_gpu(96BslH^2(...)),148,200\n"
K22 = "K22 22B,A100-80,8,48,6144,64,64,24576,51200,2048,4,4,8,1,1,1,,selective+sequence parallel,fp16,0,iteration_s,1.10,200\n"
BLANKS = "someone 175B,A100-80,256,96,12288,128,,,,2048,768,,8,8,4,1,,,bf16,,iteration_s,40.0,\n"
MODERN = (
    "someone 8B,H100,16,32,4096,32,8,14336,128256,65536,4,1,1,1,1,16,,selective,fp8,"
    "fsdp without reshard after forward,TFLOPs_per_gpu(model),500,\n"
)


def rows(tmp_path: Path, text: str) -> list[Row | Unreadable]:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    return read(path)


@pytest.mark.parametrize("line", [SC21, K22])
def test_published_steps_are_predicted(tmp_path: Path, line: str) -> None:
    (row,) = rows(tmp_path, PUBLISHED + line)
    assert isinstance(row, Row)
    assert row.predict() == pytest.approx(row.measured, rel=0.12)


def test_blanks_are_filled_and_said(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, PUBLISHED + BLANKS)
    assert isinstance(row, Row)
    assert set(row.assumed) >= {"micro_batch", "vocab", "kv_heads", "ffn", "recompute", "zero", "network_gbps_per_gpu"}
    assert row.shape.gated is False, "175B has a plain feed-forward"
    assert row.predict() == pytest.approx(40.0, rel=0.15)


def test_settings_of_other_files(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, PUBLISHED + MODERN)
    assert isinstance(row, Row)
    assert (row.setting.dtype, row.setting.zero, row.setting.gather_once, row.setting.cp) == ("fp8", 3, True, 16)
    assert row.predict() > 0


@pytest.mark.parametrize(
    "line",
    [
        SC21.replace(",8,8,24,1,5", ",8,8,7,1,5"),  # dp that does not fill the devices
        SC21.replace(",2304,2,8", ",2300,2,8"),  # a batch of no whole micro-batches
        SC21.replace(",1536,80", ",1524,80").replace(",8,8,24,1,5", ",2,6,127,1,5"),  # no whole nodes of eight
        K22.replace("A100-80", "A100-40").replace(",0,iteration_s", ",distributed optimizer,iteration_s"),
        SC21.replace("A100-80", "NVIDIA A100-SXM4-80GB"),
        SC21.replace(",1536,80,12288", ',1536.0,80,"12,288"'),
        SC21.replace(",12288,96,96,", ",12288,90,90,"),  # heads that tp does not divide
    ],
)
def test_odd_rows_are_predicted_all_the_same(tmp_path: Path, line: str) -> None:
    (row,) = rows(tmp_path, PUBLISHED + line)
    assert isinstance(row, Row), row
    assert row.predict() > 0


@pytest.mark.parametrize(
    ("line", "cell", "said"),
    [
        (SC21.replace("A100-80", ""), "gpu", "A100 (not stated)"),
        (SC21.replace(",1536,80,", ",1536,,"), "layers", "80 (for a size of 1.46e+11)"),
        (SC21.replace(",80,12288,96,", ",80,,,"), "hidden", "12288 (for a size of 1.46e+11)"),
        (SC21.replace(",2048,2304,2,", ",,,2,"), "global_batch", "1536 (not stated: four micro-batches a stage, one where there is one stage)"),
    ],
)
def test_what_is_not_stated_is_assumed_and_said(tmp_path: Path, line: str, cell: str, said: str) -> None:
    (row,) = rows(tmp_path, PUBLISHED + line)
    assert isinstance(row, Row), row
    assert row.assumed[cell] == said
    assert row.predict() > 0


def test_a_device_that_is_not_known_is_no_other_device(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, PUBLISHED + SC21.replace("A100-80", "Z900"))
    assert not isinstance(row, Row) and "no profile of the device 'Z900'" in row.reason


def test_iteration_rows_with_blanks(tmp_path: Path) -> None:
    """Whatever is blank or has no column is assumed; only a row without a measurement is of no use."""
    text = "# GPUs,micro batch,hidden size,# layers,tensor parallelism,data parallelism,iteration time (ms),gpu\n"
    named, bare, none = rows(tmp_path, text + "16,,3072,30,2,,900,H100\n16,4,3072,30,2,5,900,\n16,4,3072,30,2,8,,\n")
    assert isinstance(named, Row) and isinstance(bare, Row)
    assert named.cluster.device.name == "H100" and named.setting.dp == 8
    assert bare.assumed["data parallelism"] == "8 (what is left of the devices; 5 does not fill them)"
    assert {"sequence length", "attention heads", "global batch"} <= set(bare.assumed)
    assert named.predict() < bare.predict()
    assert isinstance(none, Row) and "iteration time (ms) is blank" in none.lacks
    told = predict(none)
    assert told["error"] is None and told["measured"] is None and told["predicted"] > 0 and told["reason"] == none.lacks


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (SC21.replace("148,200", "many,200"), "value is 'many', not a number"),
        (SC21.replace("TFLOPs_per_gpu(96BslH^2(...))", "furlongs"), "no metric named 'furlongs'"),
        (SC21.replace("SC21 145.6B", "SC21").replace(",1536,80,", ",1536,,"), "layers is blank and no size is named"),
        (SC21.replace(",1536,80,", ",some,80,"), "gpus is 'some', not a number"),
        (SC21.replace(",1536,80,", ",1e400,80,"), "gpus is inf, no whole number"),
        ("SC21 145.6B,A100-80,1536\n", "metric is blank"),
    ],
)
def test_an_unreadable_row_says_why(tmp_path: Path, line: str, reason: str) -> None:
    bad, good = rows(tmp_path, PUBLISHED + line + SC21)
    assert isinstance(bad, Unreadable)
    assert reason in bad.reason
    assert isinstance(good, Row)


def test_a_file_as_others_save_it(tmp_path: Path) -> None:
    """A mark of byte order, Windows line ends, spaces in the header, letters of another code: all are read."""
    text = "\ufeff" + PUBLISHED.replace(",gpu,", ", gpu ,") + SC21 + "," * 22 + "\n\n" + K22
    path = tmp_path / "rows.csv"
    path.write_bytes(text.replace("\n", "\r\n").encode() + b"caf\xe9 22B," + K22.split(",", 1)[1].encode())
    first, blank, second, third = read(path)
    assert isinstance(first, Row) and isinstance(second, Row) and isinstance(third, Row) and isinstance(blank, Unreadable)
    assert first.case == "rows:2 SC21 145.6B" and second.case == "rows:5 K22 22B"
    assert third.predict() == second.predict()
    assert rows(tmp_path, "") == []
    (odd,) = rows(tmp_path, "a,b\n1,2\n")
    assert isinstance(odd, Unreadable) and odd.reason == "neither format has the columns a, b"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        (MODERN.replace("fp8", "FP8 (e4m3)"), "dtype", "fp8"), (MODERN.replace("H100", "A100").replace("fp8", "mxfp8"), "dtype", "bf16"),
        (MODERN.replace("fp8", "bfloat16"), "dtype", "bf16"), (MODERN.replace("fsdp without reshard after forward", "FSDP2"), "zero", 3),
        (MODERN.replace("fsdp without reshard after forward", "ZeRO-2"), "zero", 2), (MODERN.replace(",selective,", ",None,"), "recompute", "none"),
        (MODERN.replace("H100,16,", "H100,,"), "cp", 16), (MODERN.replace("TFLOPs_per_gpu(model)", "mfu_PERCENT"), "tp", 1),
        (MODERN.replace(",500,", ",500,400 Gb/s"), "tp", 1), (MODERN.replace(",1,1,1,1,16,,", ",1,1,16,1,1,1,"), "virtual", 2),
        (MODERN.replace("H100,16,32,", "H100,16,30,").replace(",1,1,1,1,16,,", ",1,1,16,1,1,1,"), "virtual", 2),  # ends of their own
        (MODERN.replace("H100,16,32,", "H100,16,31,").replace(",1,1,1,1,16,,", ",1,1,16,1,1,1,"), "virtual", 1),
    ],
)  # fmt: skip
def test_words_of_other_files(tmp_path: Path, line: str, name: str, value: object) -> None:
    (row,) = rows(tmp_path, PUBLISHED + line)
    assert isinstance(row, Row), row
    assert row.setting.named(name) == value and row.predict() > 0


def test_iteration_rows(tmp_path: Path) -> None:
    """A model that fits on one device is taken to be trained without recompute, a larger one with."""
    small, large = rows(tmp_path, ITERATIONS + "8,16,4,1024,16,24,1024,2,2,2,150.0\n64,512,4,3072,32,30,2048,4,16,1,4764\n")
    assert isinstance(small, Row) and isinstance(large, Row)
    assert small.setting.recompute == ""
    assert large.setting.recompute == "full"
    assert large.shape.vocab % (128 * 4) == 0
    assert large.predict() == pytest.approx(4764, rel=0.15)


def test_the_command_predicts_all_it_can_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    lines = [f"8,{16 * n},4,1024,16,24,1024,2,2,2,{150.0 * n}\n" for n in range(1, 6)]
    path.write_text(ITERATIONS + "".join(lines) + "8,16,4,1024,16,24,1024,2,2,3,150.0\n8,x,4,1024,16,24,1024,2,2,2,1.0\n")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench accuracy: begin -->\nold\n<!-- bench accuracy: end -->\nafter\n")
    result = CliRunner().invoke(app, ["bench", "accuracy", "--rows", str(path), "--json", "--doc", str(page)])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.splitlines()[-1])
    assert [r["error"] is None for r in said["rows"]] == [False] * 5 + [True] * 2
    assert all("reason" in r for r in said["rows"][5:])
    group = said["groups"]["rows: 24x1024 s1024 on 8"]
    assert group["count"] == 5
    assert group["rank_correlation"] == pytest.approx(1.0)
    assert said["groups"]["rows"]["unreadable"] == 2
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text


def test_a_file_that_is_not_there() -> None:
    result = CliRunner().invoke(app, ["bench", "accuracy", "--rows", "nowhere.csv"])
    assert result.exit_code == 1
    assert "no file nowhere.csv" in result.output


def test_statistics() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(0.866, abs=1e-3)
    assert spearman([1, 1], [1, 2]) is None
    assert percentile([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.9) == pytest.approx(9)
