"""What plans of Triton launches decide from the process, not from the call."""

from __future__ import annotations

import importlib.util

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SETTINGS = {
    "unset": ("pass", "ieee"),
    "older": ("torch.backends.cuda.matmul.allow_tf32 = True", "tf32"),
    "newer": ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "tf32"),
    "of all backends": ("torch.backends.fp32_precision = 'tf32'", "tf32"),
    "highest": ("torch.set_float32_matmul_precision('highest')", "ieee"),
}


@pytest.mark.parametrize(
    ("programs", "blocks", "shares"),
    [
        (8, 128, 32),
        (64, 128, 4),
        (100, 128, 2),
        (133, 128, 1),
        (4096, 1, 1),
        (1, 5, 2),
        (1, 1, 1),
        (1, 4096, 64),
        (32, 65, 8),
    ],
)
def test_shares_of_the_keys_of_few_rows_fill_two_programs_of_each_sm(programs: int, blocks: int, shares: int) -> None:
    from flash_dmattn.triton_kernels.plan_forward import num_key_shares

    assert num_key_shares(programs, blocks, 132) == shares
    most = -(-blocks // shares)
    assert shares == 1 or -(-blocks // (shares - 1)) > most  # fewer would each have more


@pytest.fixture
def precision() -> None:
    """The setting as it was, after the test: by the name that every other one can be read by."""
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision = before


@pytest.mark.parametrize("setting", SETTINGS)
def test_tf32_is_taken_where_torch_allows_it(setting: str, precision: None) -> None:
    from flash_dmattn.problem import Flags, MaskView
    from flash_dmattn.triton_kernels.plan import Call

    statement, wanted = SETTINGS[setting]
    exec(statement, {"torch": torch})
    q = torch.zeros(1, 4, 1, 16)
    assert Call(q, q, q, MaskView(), None, Flags(-1, -1, 0.25, 0.0, False)).precision == wanted
