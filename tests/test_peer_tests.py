"""The tests of another package run through our functions: what is left out, sampled and counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
THEIRS = """
import pytest, torch
from flash_attn import flash_attn_func
from flash_attn.bert_padding import two
from flash_attn.flash_attn_interface import USE_TRITON_ROCM

@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("size", range(1, 9))
def test_output(size, dropout_p):
    q = torch.randn(1, size, two, 8)
    out, lse, probabilities = flash_attn_func(q, q, q, dropout_p, causal=True, return_attn_probs=True)
    assert lse.shape == (1, two, size) and probabilities is None and not USE_TRITON_ROCM
    assert size < 9 and torch.allclose(out[:, 0], q[:, 0])

def test_left_alone():
    raise ValueError

def test_refused():
    flash_attn_func(*torch.zeros(3, 1, 2, 1, 8), dropout_p=0.1, return_attn_probs=True)

def test_wrong():
    assert flash_attn_func(*torch.zeros(3, 1, 2, 1, 8)).shape == (2, 1)

def test_flash_attn_generator_arg_must_be_none():
    from flash_attn.flash_attn_interface import flash_attn_gpu
"""


def test_their_tests_run_through_our_functions(tmp_path: Path) -> None:
    for name, text in {"tests/test_flash_attn.py": THEIRS, "flash_attn/bert_padding.py": "two = 2\n"}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    command = [sys.executable, str(ROOT / "tests" / "peer_tests.py"), str(tmp_path)]
    more = ["--sample", "5", "--processes", "2", "--out", str(tmp_path / "out.json"), "--", "-k", "not left_alone"]
    ran = subprocess.run([*command, *more], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "| test_output | 5 | 0 | 0 | 0 | 8 | 0 |" in ran.stdout
    assert "| test_refused | 0 | 1 | 0 | 0 | 0 | 0 |" in ran.stdout
    assert "| test_wrong | 0 | 0 | 1 | 0 | 0 | 0 |" in ran.stdout
    assert "1 failed like test_wrong: assert torch.Size([1, 2, 1, 8]) == (2, 1)" in ran.stdout
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["tests"]["test_flash_attn_generator_arg_must_be_none"] == {"left out": 1}
    assert [(name.split("::")[1], cause[:6]) for name, cause in content["failed"].items()] == [("test_wrong", "assert")]
