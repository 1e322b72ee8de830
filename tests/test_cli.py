"""The command line: what each subcommand prints and exits with, with a working torch and with a broken one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flash_dmattn
from flash_dmattn.__main__ import main
from flash_dmattn.explanation import explain_problem

ROOT = Path(__file__).resolve().parent.parent
EXPLAIN = "explain --q 2,4096,16,64 --kv-heads 4 --dtype bf16 --bias 1,16,4096,4096 --bias-grad --arch sm_80"


def command(*words: str, path: str = str(ROOT), **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_DMATTN_")}
    return subprocess.run(
        [sys.executable, "-m", "flash_dmattn", *words],
        env=inherited | {"PYTHONPATH": path} | environment,
        text=True,
        capture_output=True,
        timeout=300,
    )


def exit_status(line: str) -> int:
    try:
        return main(line.split())
    except SystemExit as leaving:
        assert isinstance(leaving.code, int)
        return leaving.code


def test_no_arguments_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    for name in ("info", "explain", "demo"):
        assert re.search(rf"^ +{name}  ", printed, re.MULTILINE), printed


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("--version") == 0
    assert capsys.readouterr().out == f"flash_dmattn {flash_dmattn.__version__}\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("explain", "the following arguments are required: --q"),
        ("explain --q 2,3,4", "q is (2, 3, 4); it needs 4 sizes or more: batch, seqlen_q, num_heads, head_dim"),
        ("explain --q 2,x,4,8", "argument --q: '2,x,4,8' needs to be integers separated by commas"),
        ("explain --q 2,-3,4,8", "argument --q: '2,-3,4,8' has -3; it needs integers of at least 0"),
        ("explain --q 2,4,4,8 --seqlen-k -3", "argument --seqlen-k: '-3' has -3; it needs integers of at least 0"),
        ("explain --q 2,4,4,8 --bias-grad", "--bias-grad is given without --bias"),
        ("explain --q 2,4,4,8 --window -2,0", "argument --window: '-2,0' has -2; it needs integers of at least -1"),
        ("explain --q 2,4,4,8 --window 3", "argument --window: '3' has 1 integers; it needs two"),
        ("explain --q 2,4,4,8 --dtype int8", "dtype is 'int8'; it needs to be one of fp16"),
        ("explain --q 2,4,4,8 --backend a,b,c", "backend is 'a,b,c'; it needs to be one name, or forward and backward"),
        ("explain --q 2,4,4,8 --backend flex,eager", "'flex' is one differentiable function"),
        ("explain --q 2,4,4,8 --arch H100", "--arch is 'H100'; it needs to be 'cpu' or the architecture of a GPU"),
        ("calibrate --device tpu", "argument --device: 'tpu' needs to be the index of a GPU, from 0, or cpu"),
        ("calibrate --device -1", "argument --device: '-1' needs to be the index of a GPU, from 0, or cpu"),
        (
            "explain --q 2,4,4,8 --colour red",
            "explain: error: unrecognized arguments: --colour red; usage: python -m flash_dmattn explain [-h] --q",
        ),
        (
            "calibrate --arch H100",
            "unrecognized arguments: --arch H100; usage: python -m flash_dmattn calibrate [-h] [--seconds",
        ),
        ("frobnicate", "invalid choice: 'frobnicate'"),
    ],
)
def test_invalid_arguments_are_one_line_and_exit_2(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(line) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.startswith("python -m flash_dmattn") and printed.err.count("\n") == 1, printed.err


def test_explain_prints_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EXPLAIN.split()) == 0
    expected = explain_problem(
        q=(2, 4096, 16, 64), kv_heads=4, dtype="bf16", device="sm_80", bias=(1, 16, 4096, 4096), bias_grad=True
    )
    assert capsys.readouterr().out == f"{expected}\n"


def test_explain_hands_every_argument_on(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "explain --q 2,64,8,32 --kv-heads 2 --seqlen-k 96 --head-dim-v 16 --dtype fp32 --arch cpu --mask 1,1,64,96 "
        "--bias 2,8,64,1 --bias-dtype fp16 --grad --bias-grad --causal --window -1,7 --softcap 20 --softmax-scale 0.5 "
        "--deterministic --return-lse --sink --dropout 0.25 --backend eager,eager --json"
    )
    assert main(line.split()) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = explain_problem(
        q=(2, 64, 8, 32),
        kv_heads=2,
        seqlen_k=96,
        head_dim_v=16,
        dtype="fp32",
        device="cpu",
        mask=(1, 1, 64, 96),
        bias=(2, 8, 64, 1),
        bias_dtype="fp16",
        grad=True,
        bias_grad=True,
        is_causal=True,
        softmax_scale=0.5,
        softcap=20.0,
        window_size=(-1, 7),
        deterministic=True,
        return_lse=True,
        sink=True,
        dropout_p=0.25,
        backend=("eager", "eager"),
    )
    assert printed == json.loads(json.dumps(expected.to_dict()))
    assert (printed["forward"], printed["backward"]) == ("eager", "eager")


def test_explain_of_a_call_that_would_raise_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("explain --q 2,64,8,32 --arch cpu --backend cuda") == 0
    assert "backend='cuda' would raise" in capsys.readouterr().out


def test_explain_defaults_to_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("explain --q 1,64,8,32") == 0
    here = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "cpu"
    assert f"bfloat16 on {here}," in capsys.readouterr().out.splitlines()[0]


def test_info_names_versions_backends_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with flash_dmattn.config(disabled="flex"):
        assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for line in (rf"flash_dmattn +{flash_dmattn.__version__}, ", rf"torch +{re.escape(torch.__version__)} \("):
        assert re.search(f"^{line}", printed, re.MULTILINE), printed
    assert re.search(r"^backend eager +usable$", printed, re.MULTILINE), printed
    assert re.search(r"^backend flex +not usable: it is switched off", printed, re.MULTILINE), printed
    assert re.search(r"^disabled +flex$", printed, re.MULTILINE), printed
    column = printed.index(flash_dmattn.__version__)
    for line in filter(None, printed.splitlines()):
        assert line[column - 2 : column] == "  " and line[column] != " ", f"not aligned: {line!r}"


def test_info_json_is_json_alone() -> None:
    done = command("info", "--json", FLASH_DMATTN_BACKEND="eager", FLASH_DMATTN_DISABLE="flex")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report["backends"]) == {"cuda", "triton", "flex", "sdpa", "eager", "reference"}
    assert report["backends"]["eager"]["usable"] and not report["backends"]["flex"]["usable"]
    assert report["settings"] == {
        "default_backend": "eager",
        "disabled": ["flex"],
        "fallback": "warn",
        "invariant": False,
        "error": None,
        "unknown": {},
    }
    assert report["environment"]["FLASH_DMATTN_BACKEND"] == "eager"
    for name, actual in report["backends"].items():
        if not actual["usable"] and name != "flex":
            assert actual["reason"] and actual["exception"], f"{name} does not say why: {actual}"


@pytest.mark.parametrize("words", (["flash_dmattn", "info"], ["benchmarks", "list"]), ids=" ".join)
def test_a_reader_that_has_left_ends_the_command_without_a_word(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    actual = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (actual.returncode, actual.stderr) == (1, "")


def test_info_shows_an_environment_that_no_import_accepts() -> None:
    wrong = {"FLASH_DMATTN_BACKEND": "eagre", "FLASH_DMATTN_BACKENDS": "triton", "FLASH_DMATTN_XYZ": "1"}
    done = command("info", **wrong)
    assert done.returncode == 0, done.stderr
    for line in (
        "error +FLASH_DMATTN_BACKEND names 'eagre'; it needs to be one of .*; did you mean 'eager'",
        "unknown +FLASH_DMATTN_BACKENDS is read by nothing; did you mean FLASH_DMATTN_BACKEND\\?$",
        " +FLASH_DMATTN_XYZ is read by nothing$",
    ):
        assert re.search(f"^{line}", done.stdout, re.MULTILINE), done.stdout
    refused = command("explain", "--q", "1,8,2,16", FLASH_DMATTN_BACKEND="eagre")
    assert (refused.returncode, refused.stdout) == (1, "")
    message = r"python -m flash_dmattn explain: error: FLASH_DMATTN_BACKEND names 'eagre'; .*\n"
    assert re.fullmatch(message, refused.stderr), refused.stderr


def test_info_shows_what_its_output_cannot_encode(tmp_path: Path) -> None:
    profile = tmp_path / "käse.json"
    profile.write_text('{"format": "\\ud800"}')
    profile.chmod(0o600)
    done = command("info", FLASH_DMATTN_PROFILE=str(profile), PYTHONUTF8="0", PYTHONIOENCODING="ascii:strict")
    assert done.returncode == 0, done.stderr
    assert "k\\xe4se.json has format '\\ud800'" in done.stdout


def fake_nvidia_smi(folder: Path, script: str) -> str:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPUs of this machine, so the driver is not asked")
def test_info_names_a_gpu_that_torch_does_not_see(tmp_path: Path) -> None:
    search = fake_nvidia_smi(tmp_path, "echo '570.1, NVIDIA H200, 9.0, 143771'")
    done = command("info", PATH=search)
    assert re.search(r"^driver +570\.1$", done.stdout, re.MULTILINE), done.stdout
    gpu = r"^GPUs +0: NVIDIA H200, sm_90, 140\.4 GiB, seen by the driver but not by torch$"
    assert re.search(gpu, done.stdout, re.MULTILINE), done.stdout


def test_info_says_why_there_is_no_driver(tmp_path: Path) -> None:
    done = command("info", PATH=fake_nvidia_smi(tmp_path, "echo NVIDIA-SMI has failed; exit 9"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^driver +none: nvidia-smi says: NVIDIA-SMI has failed$", done.stdout, re.MULTILINE), done.stdout


@pytest.fixture
def no_torch(tmp_path: Path) -> str:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')")
    return f"{tmp_path}{os.pathsep}{ROOT}"


def test_info_works_with_a_broken_torch(no_torch: str) -> None:
    plain, as_json = command("info", path=no_torch), command("info", "--json", path=no_torch)
    assert plain.returncode == as_json.returncode == 0, plain.stderr + as_json.stderr
    assert re.search(r"^torch +cannot be used: OSError: libtorch_cpu.so: cannot open", plain.stdout, re.MULTILINE)
    report = json.loads(as_json.stdout)
    assert report["torch"] == {"error": "OSError: libtorch_cpu.so: cannot open shared object file"}
    assert report["flash_dmattn"]["version"] == flash_dmattn.__version__


@pytest.mark.parametrize("words", [["info", "--verify"], EXPLAIN.split(), ["demo"]])
def test_what_needs_torch_says_so_in_one_line(words: list[str], no_torch: str) -> None:
    done = command(*words, path=no_torch)
    assert done.returncode == 1
    assert "error: torch cannot be imported: libtorch_cpu.so" in done.stderr and done.stderr.count("\n") == 1


def test_demo_gets_the_rest_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    demo = SimpleNamespace(main=lambda argv: seen.append(argv) or 7)
    monkeypatch.setitem(sys.modules, "flash_dmattn.examples.demo", demo)
    assert main(["demo", "--help", "--steps", "3"]) == 7
    assert seen == [["--help", "--steps", "3"]]
