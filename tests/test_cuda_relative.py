"""A bias by distance on the cuda kernels: a window of values for each tile, and one value for tiles beyond them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from cases import ALL, Case, Numbers
from conftest import Runner
from draws import draw_relative

from flash_dmattn.backends.cuda import passes

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

T5 = Numbers(("1", "Hq", "1"), 65, 32, "clamp")
BASE = Case(
    batch=1, num_heads=2, num_heads_k=2, head_dim=64, dtype=torch.bfloat16, relative=T5, needs_grad=(), dlse=False
)


# Two consumers and three, the last without rows; a tile before the values, among them and behind them.
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), ((1, 1), (1, 300), (64, 8), (127, 129), (193, 257), (385, 400), (500, 130))
)
def test_lengths(backend: Runner, head_dim: int, seqlen_q: int, seqlen_k: int) -> None:
    for is_causal in (False, True):
        backend.check(BASE.with_(head_dim=head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal))


# One value for all of a call, the first or the last or none; a value that only the last tile has.
NUMBERS = (
    Numbers(("1", "1", "1"), 1, 0, "clamp"),
    Numbers(("1", "1", "1"), 1, 0, "zero"),
    Numbers(("B", "Hk", "1"), 40, 700, "clamp"),
    Numbers(("B", "Hk", "1"), 40, -700, "clamp"),
    Numbers(("B", "Hq", "1"), 40, -700, "zero"),
    Numbers(("1", "Hq", "1"), 9, 2**40, "zero"),
    Numbers(("B", "1", "1"), 30, -250, "zero"),
    Numbers(("1", "Hk", "1"), 3, 202, "clamp"),
    Numbers(("1", "Hq", "1"), 700, 340, "error"),
)


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_values_anywhere(backend: Runner, numbers: Numbers) -> None:
    case = BASE.with_(batch=2, num_heads=4, seqlen_q=260, seqlen_k=330, relative=numbers)
    for head_dim in (64, 128):
        backend.check(case.with_(head_dim=head_dim))


DIFFERENTIATED = BASE.with_(num_heads=4, needs_grad=ALL, dlse=True)


# Blocks of 128 keys, and of 128 or 64 queries.
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), ((1, 65), (63, 129), (193, 257), (385, 130)))
def test_gradients(backend: Runner, head_dim: int, seqlen_q: int, seqlen_k: int) -> None:
    case = DIFFERENTIATED.with_(head_dim=head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    for is_causal in (False, True):
        backend.check(case.with_(is_causal=is_causal), alone=True, deterministic=is_causal)
    backend.check(case.with_(needs_grad=("q", "k", "v")), alone=True)


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_gradients_of_values_anywhere(backend: Runner, numbers: Numbers) -> None:
    case = DIFFERENTIATED.with_(batch=2, seqlen_q=260, seqlen_k=330, relative=numbers)
    for head_dim in (64, 128):
        backend.check(case.with_(head_dim=head_dim), alone=True)


# More blocks than a short diagonal has tiles; heads and entries that share values, and a call without other gradients.
@pytest.mark.parametrize("chunks", (1, 3, 7))
@pytest.mark.parametrize("letters", (("1", "1", "1"), ("B", "Hk", "1")), ids="".join)
def test_blocks_share_a_diagonal(
    backend: Runner, monkeypatch: pytest.MonkeyPatch, letters: tuple[str, str, str], chunks: int
) -> None:
    monkeypatch.setattr(passes, "NUM_DBIAS_CHUNKS", chunks)
    case = DIFFERENTIATED.with_(batch=3, seqlen_q=300, seqlen_k=260, needs_grad=("bias",))
    for numbers in (Numbers(letters, 65, 32, "clamp"), Numbers(letters, 559, 259, "error")):
        backend.check(case.with_(relative=numbers), alone=True)


@pytest.mark.parametrize("head_dim", (64, 128))
def test_tiles_beyond_the_values_add_to_their_end(backend: Runner, head_dim: int) -> None:
    """Keys far before and far behind add to the first and the last value, keys beyond the last to neither."""
    case = DIFFERENTIATED.with_(batch=2, head_dim=head_dim, seqlen_q=400, seqlen_k=390)
    for numbers in (Numbers(("1", "Hq", "1"), 3, 1, "clamp"), Numbers(("B", "1", "1"), 200, 150, "clamp")):
        backend.check(case.with_(relative=numbers), alone=True)


def test_one_score_has_another_value(backend: Runner) -> None:
    """The value of the first query and the last key is in the first tile, and the query attends to nothing else."""
    numbers = Numbers(("1", "1", "1"), 2, -198, "clamp")
    for head_dim in (64, 128):
        case = BASE.with_(head_dim=head_dim, seqlen_q=200, seqlen_k=128, relative=numbers)
        inputs = case.build()
        backend.check(case, replace(inputs, bias=torch.tensor([[[[0.0, 1e4]]]]).to(inputs.q)))


BESIDE = {
    "softcap": {"softcap": 2.0},
    "tiny scale": {"softmax_scale": 1e-7},
    "sink": {"sink": "normal"},
    "window": {"window_size": (70, 20)},
    "mask": {"mask": ("B", "Hq", "Lq", "Lk"), "mask_kind": "empty_rows"},
    "padding": {"mask": ("B", "1", "1", "Lk")},
    "tiles without a score": {"mask": ("B", "Hq", "Lq", "Lk"), "mask_kind": "empty_tiles"},
    "-inf": {"bias_kind": "inf"},
    "great values": {"bias_kind": "huge"},
    "values in fp32": {"bias_dtype": torch.float32},
    "values in fp16": {"bias_dtype": torch.float16},
    "great scores": {"logits": 30.0},
}


@pytest.mark.parametrize("other", BESIDE)
def test_another_argument(backend: Runner, other: str) -> None:
    case = BASE.with_(batch=2, seqlen_q=200, seqlen_k=420, **BESIDE[other])
    for numbers in (T5, Numbers(("B", "1", "1"), 5, 2, "clamp")):
        backend.check(case.with_(relative=numbers))
        if not case.softcap:
            backend.check(case.with_(relative=numbers, needs_grad=ALL), alone=True)


@pytest.mark.parametrize("seed", range(12))
def test_random_numbers(backend: Runner, seed: int) -> None:
    rng = random.Random(seed)
    sizes = {"seqlen_q": rng.choice((1, 64, 129, 200, 385)), "seqlen_k": rng.choice((1, 65, 128, 200, 390))}
    window = rng.choice((None, None, (90, 40), (-1, 3)))
    case = BASE.with_(
        **sizes,
        batch=2,
        num_heads=4,
        head_dim=rng.choice((64, 128)),
        is_causal=rng.random() < 0.5,
        window_size=window,
        softcap=rng.choice((0.0, 0.0, 3.0)),
        seed=seed,
    )
    values = {"window_size": window, "is_causal": case.is_causal, **sizes}
    case = case.with_(relative=draw_relative(rng, values, ("1",)) or T5)
    backend.check(case)
    if not case.softcap:
        differentiated = case.with_(needs_grad=ALL, dlse=rng.random() < 0.5)
        backend.check(differentiated, alone=case.seqlen_k > 32)  # of fewer keys triton makes the gradients, by a rule


def test_the_gradient_of_a_sink_alone(backend: Runner) -> None:
    """Only delta is computed, which reads no bias."""
    case = BASE.with_(seqlen_q=200, seqlen_k=300, sink="normal", needs_grad=("sink",))
    backend.check(case, alone=True)


def test_values_of_any_strides(backend: Runner) -> None:
    case = BASE.with_(seqlen_q=200, seqlen_k=300)
    inputs = case.build()
    assert inputs.bias is not None
    every_third = inputs.bias.new_full((*inputs.bias.shape[:3], 3 * inputs.bias.shape[3]), torch.nan)[..., ::3]
    case = case.with_(needs_grad=ALL)
    backend.check(case, inputs, replace(inputs, bias=every_third.copy_(inputs.bias)))
