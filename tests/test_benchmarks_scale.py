"""The benchmark of context parallelism: one quick run of two processes, its report, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import __main__ as scale
from benchmarks.scale import report
from benchmarks.scale.predict import Machine, read_machine

ROOT = Path(__file__).resolve().parent.parent


def test_a_quick_run_of_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "benchmarks.scale", "--out", str(tmp_path), "--quick", "--device", "cpu", "--only", "4 on 2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "scale.json").read_text())
    assert {row["collective"] for row in content["bandwidth"]} == {"all_gather", "all_to_all"}
    ours = [row for row in content["rows"] if row["system"].startswith("ours")]
    windowed = [row["system"] for row in ours if row["case"] == "window 64, 1024, 4 on 2"]
    assert windowed == ["ours", "ours, all keys sent"]
    assert [row["system"] for row in ours[:3]] == ["ours", "ours", "ours, heads traded"]
    assert [row["case"] for row in ours] == ["causal, 256, 4 on 2"] * 3 + [
        "window 64, 1024, 4 on 2",
        "window 64, 1024, 4 on 2",
        "causal, bias (B,Hq,L,L), 128, 4 on 2",
        "top-32, bias (B,Hq,1,L), 256, 4 on 2",
        "documents of 32, 256, 4 on 2",
    ]
    for row in ours:
        names = ["out", "dq", "dk", "dv"] + (["dbias"] if "bias" in row["case"] else [])
        assert list(row["errors"]) == names and max(row["errors"].values()) < 1e-5
        assert row["right"] and row["forward_ms"] > 0 and row["backward_ms"] > 0
        both = (row["one_forward_ms"] + row["one_backward_ms"]) / 2
        assert row["efficiency"] == pytest.approx(both / (row["forward_ms"] + row["backward_ms"]))
    # On a CPU torch's own has no kernel: a row that says so, and no end of the run.
    peers = [row for row in content["rows"] if not row["system"].startswith("ours")]
    assert [row["system"] for row in peers] == [
        f"torch, flash, {method}, {form} heads"
        for method in ("allgather", "alltoall")
        for form in ("grouped", "repeated")
    ]
    assert all("failed" in row or "errors" in row for row in peers)
    assert "ours, 2 groups" in (tmp_path / "scale.md").read_text()
    assert (tmp_path / "scale.png").stat().st_size > 0


def content(**changes: Any) -> dict[str, Any]:
    row = {"case": "causal, 16384, 32 on 8", "length": 16384, "heads": 32, "kv_heads": 8, "system": "ours"}
    row |= {"head_groups": 2, "one_forward_ms": 4.0, "one_backward_ms": 10.0, "forward_ms": 2.5, "backward_ms": 6.0}
    row |= {"efficiency": 7 / 8.5, "forward_efficiency": 0.8, "errors": {"out": 1e-3, "dk": 2e-3}, "right": True}
    failed = {**row, "system": "torch, cudnn, alltoall", "head_groups": None, "failed": "RuntimeError: a | b"}
    links = [{"collective": "all_gather", "mb": 64, "ms": 0.3, "gbs": 211.0}]
    head = {"device": "NVIDIA H200", "world_size": 2, "torch": "2.11.0", "quick": False, "bandwidth": links}
    lacking = {"case": "causal, 131072, 32 on 32", "length": 131072, "heads": 32, "kv_heads": 32, "system": "one GPU"}
    lacking |= {"head_groups": None, "failed": "OutOfMemoryError: too long"}
    return {**head, "rows": [row, failed, lacking], "machine": {}, **changes}


def test_report_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "scale.json").write_text(json.dumps(content()))
    monkeypatch.setattr(sys, "argv", ["scale", "--report", str(tmp_path)])
    assert scale.main() == 0
    assert "scale.md" in capsys.readouterr().out
    page = (tmp_path / "scale.md").read_text()
    assert (
        "| causal, 16384, 32 on 8 | ours, 2 groups | 2.50 | 6.00 | 4.00 + 10.00 | 82.4% | 80.0% | 2.0e-03 (dk) |"
        in page
    )
    assert "| torch, cudnn, alltoall | failed | RuntimeError: a / b |" in page
    assert "| causal, 131072, 32 on 32 | one GPU | failed | OutOfMemoryError: too long |" in page
    assert "| 64 | all_gather | 0.300 | 211.0 |" in page


def test_the_predictor_reads_what_was_measured(tmp_path: Path) -> None:
    measured = report.machine_of(content())
    # 4 x 16384^2 x 32 x 128 x 0.5 = 2.199 TFLOP in 4 ms, and 2.5 times that in 10 ms
    assert measured == pytest.approx(
        {"nvlink_gbs": 211.0, "forward_tflops": 549.756, "backward_tflops": 549.756}, rel=1e-4
    )
    file = tmp_path / "scale.json"
    file.write_text(json.dumps(content(machine=measured)))
    assert read_machine(file) == Machine(**measured)
    assert report.machine_of(content(quick=True)) == {}


@pytest.mark.parametrize(
    ("arguments", "rank", "message"),
    [
        ([], False, "--out is needed"),
        (["--out", "x"], False, "start it with torchrun --nproc-per-node 2 -m benchmarks.scale"),
        (
            ["--out", "x", "--device", "cuda"],
            True,
            "to be off: export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1",
        ),
        (["--out", "x", "--device", "cpu"], True, "on a CPU only --quick ends in time"),
    ],
)
def test_refused(
    arguments: list[str],
    rank: bool,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in (*scale.REQUIRED, "RANK"):
        monkeypatch.delenv(name, raising=False)
    if rank:
        monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["scale", *arguments])
    with pytest.raises(SystemExit):
        scale.main()
    assert message in capsys.readouterr().err
