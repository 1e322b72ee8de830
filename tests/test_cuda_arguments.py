"""Calls of the CUDA extension's operators by hand are refused where one tensor does not fit the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from cases import DEVICE
from conftest import Runner
from torch import Tensor

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

BATCH, QUERIES, KEYS, HEADS, HEADS_K, DIM = 2, 130, 136, 4, 2, 64
DTYPE = torch.bfloat16
NO_BAND = (-QUERIES, KEYS)


class Call(NamedTuple):
    """A call that the operator takes: its arguments by name, and dims that no other argument decides."""

    operator: str
    arguments: dict[str, Any]
    free: tuple[tuple[str, int], ...] = ()

    def run(self, **changes: Any) -> Any:
        return getattr(torch.ops.flash_dmattn, self.operator).default(**{**self.arguments, **changes})


def draw(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def integers(*shape: int, high: int = 2) -> Tensor:
    return torch.randint(high, shape, dtype=torch.int32, device=DEVICE)


def tensors_of_call() -> dict[str, Any]:
    return {
        "q": draw(BATCH, QUERIES, HEADS, DIM),
        "k": draw(BATCH, KEYS, HEADS_K, DIM),
        "v": draw(BATCH, KEYS, HEADS_K, DIM),
        "out": draw(BATCH, QUERIES, HEADS, DIM),
        "lse": draw(BATCH, HEADS, QUERIES, dtype=torch.float32),
    }


def tiles() -> list[Tensor]:
    mask = torch.rand(BATCH, HEADS, QUERIES, KEYS, device=DEVICE) < 0.5
    bits, _, rows, columns = torch.ops.flash_dmattn.cuda_pack_mask(mask, *NO_BAND, False)
    return [bits, rows, columns]


def intervals() -> list[Tensor]:
    start = integers(BATCH, HEADS_K, KEYS, high=QUERIES)
    order = places()[:, :, :0].contiguous()
    return torch.ops.flash_dmattn.cuda_interval_tiles(start, (start + 40).clamp_max(QUERIES), order, QUERIES)


def places() -> Tensor:
    return torch.arange(KEYS, dtype=torch.int32, device=DEVICE).expand(BATCH, HEADS_K, KEYS).contiguous()


FORWARD = {"low": -QUERIES, "high": KEYS, "softmax_scale": 0.125, "softcap": 0.0, "dropout_p": 0.0}
FORWARD |= {"outside": 0, "zero": 0}
NO_MASK: dict[str, Any] = {"mask": [], "bias": None}


def with_wide_lse(arguments: dict[str, Any]) -> dict[str, Any]:
    """Give lse of a forward pass its dtype: fp64 next to a bias."""
    return arguments if arguments["bias"] is None else {**arguments, "lse": arguments["lse"].double()}


def forward(**others: Any) -> Call:
    numbers = {**FORWARD, "num_splits": 1, "one_mask_row": False, "dropout_key": None, "sink": None, "group_shift": 0}
    numbers |= {"key_order": None, "fresh": []}
    return Call("cuda_forward_kernel", with_wide_lse({**tensors_of_call(), **numbers, **NO_MASK, **others}))


def backward(**others: Any) -> Call:
    tensors = tensors_of_call()
    tensors["dout"] = torch.randn_like(tensors["q"])
    tensors["dlse"] = torch.randn_like(tensors["lse"])
    tensors |= {f"d{name}": torch.empty_like(tensors[name]) for name in "qkv"}
    numbers = {**FORWARD, "deterministic": False, "num_dbias_chunks": 0, "dropout_key": None, "key_order": None}
    nothing = dict.fromkeys(("dbias", "dbias_sums", "delta"))
    return Call("cuda_backward_kernel", {**tensors, **numbers, **NO_MASK, **nothing, **others})


def distances() -> dict[str, Any]:
    """A bias by distance, of any number of values."""
    return {"bias": draw(BATCH, HEADS, 1, 9), "outside": 1, "zero": 4}


def backward_by_place(**others: Any) -> Call:
    bias_and_sums = {"bias": draw(*KEY_BIAS), "dbias_sums": sums(BATCH, HEADS, KEYS)}
    return backward(mask=intervals(), key_order=places(), **bias_and_sums, **others)


LENGTHS = (70, 60)
OF_SEQUENCES = {"most_q": 70, "most_k": 70, "left": 2**30, "right": 2**30, "softmax_scale": 0.125}


def sequences(*, packs: bool, **others: Any) -> dict[str, Any]:
    """Two sequences in a row of tokens, or in two entries."""
    entries, rows = (1, 130) if packs else (2, 70)
    first = [0, LENGTHS[0] if packs else 0]
    bounds = torch.tensor([[at, n, at, n] for at, n in zip(first, LENGTHS)], dtype=torch.int32, device=DEVICE)
    return {
        "q": draw(entries, rows, HEADS, DIM),
        "k": draw(entries, rows, HEADS_K, DIM),
        "v": draw(entries, rows, HEADS_K, DIM),
        "out": draw(entries, rows, HEADS, DIM),
        "lse": draw(entries, HEADS, rows, dtype=torch.float32),
        "bounds": bounds,
        "is_packed": packs,
        **OF_SEQUENCES,
        **others,
    }


def number_is_free(arguments: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """The number of sequences, where nothing else has it."""
    has_number = not arguments["is_packed"] or (arguments["bias"] is not None and arguments["bias_packing"] == 0)
    return () if has_number else (("bounds", 0),)


def forward_sequences(*, packs: bool, **others: Any) -> Call:
    defaults = {"block_table": None, "bias": None, "sink": draw(HEADS, dtype=torch.float32), "softcap": 0.0, **others}
    arguments = with_wide_lse(sequences(packs=packs, bias_packing=0) | defaults)
    return Call("cuda_forward_sequences", arguments, (("block_table", 1), *number_is_free(arguments)))


def backward_sequences(*, packs: bool, **others: Any) -> Call:
    tensors = sequences(packs=packs, bias_packing=0)
    tensors["dout"] = torch.randn_like(tensors["q"])
    tensors["dlse"] = torch.randn_like(tensors["lse"])
    tensors["delta"] = torch.empty_like(tensors["lse"])
    tensors |= {f"d{name}": torch.empty_like(tensors[name]) for name in "qkv"}
    defaults = {"bias": None, "dbias": None, "dbias_sums": None, "num_dbias_chunks": 0, **others}
    arguments = tensors | defaults
    return Call("cuda_backward_sequences", arguments, number_is_free(arguments))


def sums(*shape: int) -> Tensor:
    return torch.zeros(shape, device=DEVICE)


BIAS, ONE_BIAS, KEY_BIAS = (BATCH, HEADS, QUERIES, KEYS), (1, HEADS_K, QUERIES, KEYS), (BATCH, HEADS, 1, KEYS)
OF_POSITIONS, OF_QUERIES, OF_KEYS = (2, HEADS, 70, 72), (1, HEADS, 130, 72), (1, HEADS, 1, 130)
CALLS: dict[str, Callable[[], Call]] = {
    "forward tiles": lambda: forward(mask=tiles()[:2], bias=draw(*BIAS), sink=draw(HEADS, dtype=torch.float32)),
    "forward intervals": lambda: forward(mask=intervals()[:2], bias=draw(*KEY_BIAS)),
    "forward by place": lambda: forward(mask=intervals()[:2], bias=draw(*KEY_BIAS), key_order=places()),
    "forward dropout": lambda: forward(dropout_key=torch.zeros(2, dtype=torch.int64, device=DEVICE), dropout_p=0.1),
    "forward largest": lambda: forward(max_scores=draw(BATCH, HEADS, QUERIES, dtype=torch.float32)),
    "forward distances": lambda: forward(mask=tiles()[:2], **distances())._replace(free=(("bias", 3),)),
    "backward distances": lambda: backward(**distances())._replace(free=(("bias", 3),)),
    "backward tiles": lambda: backward(
        mask=tiles(), bias=draw(*BIAS), dbias=draw(*BIAS), delta=sums(BATCH, HEADS, QUERIES)
    ),
    "backward shared": lambda: backward(bias=draw(*ONE_BIAS), dbias=draw(*ONE_BIAS)),
    "backward by place": backward_by_place,
    "backward placed before": lambda: backward_by_place(in_order=True),
    "backward dropout": lambda: backward(dropout_key=torch.zeros(2, dtype=torch.int64, device=DEVICE)),
    "forward packed": lambda: forward_sequences(packs=True, most_k=72, bias=draw(*OF_POSITIONS)),
    "forward queries": lambda: forward_sequences(packs=True, most_k=72, bias=draw(*OF_QUERIES), bias_packing=1),
    "forward keys": lambda: forward_sequences(packs=True, bias=draw(*OF_KEYS), bias_packing=2),
    "packed largest": lambda: forward_sequences(packs=True, max_scores=draw(1, HEADS, 130, dtype=torch.float32)),
    "forward padded": lambda: forward_sequences(packs=False, most_k=72, bias=draw(*OF_POSITIONS)),
    "forward pages": lambda: forward_sequences(
        packs=False,
        k=draw(4, 64, HEADS_K, DIM),
        v=draw(4, 64, HEADS_K, DIM),
        block_table=torch.arange(4, dtype=torch.int32, device=DEVICE).view(2, 2),
    ),
    "backward packed": lambda: backward_sequences(
        packs=True, most_k=72, bias=draw(*OF_POSITIONS), dbias=draw(*OF_POSITIONS)
    ),
    "backward queries": lambda: backward_sequences(
        packs=True, most_k=72, bias=draw(*OF_QUERIES), dbias=draw(*OF_QUERIES), bias_packing=1
    ),
    "backward keys": lambda: backward_sequences(
        packs=True, bias=draw(*OF_KEYS), dbias_sums=sums(1, HEADS, 130), bias_packing=2
    ),
    "backward padded": lambda: backward_sequences(
        packs=False, bias=draw(2, HEADS, 1, 70), dbias_sums=sums(2, HEADS, 70)
    ),
    "pack": lambda: Call(
        "cuda_pack_mask",
        {"mask": integers(*BIAS).bool(), "low": -QUERIES, "high": KEYS, "has_band": False},
        tuple(("mask", dim) for dim in range(4)),
    ),
    "topk": lambda: Call(
        "cuda_topk_intervals",
        {"keys": integers(BATCH, HEADS_K, KEYS), "k": 8, "seqlen_q": QUERIES, "local": 0},
        tuple(("keys", dim) for dim in range(3)),
    ),
    "order": lambda: Call(
        "cuda_key_order",
        {"start": integers(BATCH, HEADS_K, KEYS), "stop": integers(BATCH, HEADS_K, KEYS), "seqlen_q": QUERIES},
    ),
    "tiles": lambda: Call(
        "cuda_interval_tiles",
        {**{name: integers(BATCH, HEADS_K, KEYS) for name in ("start", "stop", "order")}, "seqlen_q": QUERIES},
    ),
    "bits": lambda: Call(
        "cuda_interval_bits",
        {"bounds": integers(BATCH, HEADS_K, 256, 2), "seqlen_q": QUERIES},
        (("bounds", 0), ("bounds", 1)),
    ),
    "gather keys": lambda: Call(
        "cuda_gather_keys",
        {
            "k": draw(BATCH, KEYS, HEADS_K, DIM),
            "v": draw(BATCH, KEYS, HEADS_K, DIM),
            "bias": draw(BATCH, HEADS, 1, KEYS),
            "order": integers(BATCH, HEADS_K, KEYS),
            "bounds": integers(BATCH, HEADS_K, 256, 2),
        },
    ),
    "tiles of lists": lambda: Call(
        "cuda_listed_tiles",
        {
            "keys": integers(BATCH, HEADS_K, 2, 1),
            **{"block_q": 128, "block_k": 128, "seqlen_q": QUERIES, "seqlen_k": KEYS, "low": -QUERIES, "high": 0},
        },
        (("keys", 0), ("keys", 1), ("keys", 3)),
    ),
    "mask of keys": lambda: Call(
        "cuda_key_mask",
        {
            "mask": torch.ones(BATCH, HEADS_K, 1, KEYS, dtype=torch.bool, device=DEVICE),
            "seqlen_q": QUERIES,
            "low": -QUERIES,
            "high": 0,
            "reorder": True,
            "for_call": True,
            "k": draw(BATCH, KEYS, HEADS_K, DIM),
            "v": draw(BATCH, KEYS, HEADS_K, DIM),
            "bias": draw(BATCH, HEADS, 1, KEYS),
        },
    ),
}
# Read by their strides; of sequences q, k, v and dout are made contiguous where TMA needs it.
OF_ANY_STRIDES = {"q", "k", "v", "dout", "bias", "dlse", "block_table"}


def larger(x: Tensor, dim: int) -> Tensor:
    """One more in a dim."""
    return torch.cat((x, x.narrow(dim, 0, 1)), dim)


def changes_of(call: Call) -> dict[str, dict[str, Any]]:
    """One tensor changed at a time: a dim larger, one missing, another dtype, not contiguous."""
    changes: dict[str, dict[str, Any]] = {}

    def add(name: str, x: Tensor, put: Callable[[Tensor], dict[str, Any]]) -> None:
        for dim in range(x.dim()):
            if (name, dim) not in call.free:
                changes[f"{name}: dim {dim}"] = put(larger(x, dim))
        changes[f"{name}: missing dim"] = put(x[0])
        # Not fp64 for lse, whose digits the gradients of calls with a bias need.
        changes[f"{name}: dtype"] = put(x.to(torch.float16 if name == "lse" else torch.float64))
        if name not in OF_ANY_STRIDES and name != "mask":
            changes[f"{name}: strides"] = put(x.repeat_interleave(2, -1)[..., ::2])

    for name, value in call.arguments.items():
        if isinstance(value, Tensor):
            add(name, value, lambda x, name=name: {name: x})
        elif isinstance(value, list):
            for n, part in enumerate(value):
                add(
                    f"{name}[{n}]",
                    part,
                    lambda x, n=n, name=name, value=value: {name: [*value[:n], x, *value[n + 1 :]]},
                )
    return changes


@pytest.mark.parametrize("name", CALLS)
def test_each_tensor_changed_alone_is_refused(backend: Runner, name: str) -> None:
    torch.manual_seed(0)
    call = CALLS[name]()
    call.run()
    accepted = []
    for change, arguments in changes_of(call).items():
        try:
            call.run(**arguments)
        except RuntimeError as error:
            assert f"{call.operator}: " in str(error), (change, str(error))
        else:
            accepted.append(change)
    # Packed tokens may come without the one entry of a batch.
    tokens = ("q", "k", "v", "out", "lse", "max_scores", "dout", "dlse", "delta", "dq", "dk", "dv")
    may_miss = [name for name in call.arguments if call.arguments.get("is_packed") and name in tokens]
    assert accepted == [f"{name}: missing dim" for name in may_miss]
    call.run()


@pytest.mark.parametrize("name", ("forward tiles", "forward intervals", "forward dropout", "forward pages"))
def test_kernels_that_write_no_largest_scores(backend: Runner, name: str) -> None:
    call = CALLS[name]()
    with pytest.raises(RuntimeError, match="max_scores is for calls without a mask, bias, dropout and pages"):
        call.run(max_scores=torch.empty_like(call.arguments["lse"], dtype=torch.float32))


def test_counters_of_a_call(backend: Runner) -> None:
    """It uses them up if they are enough for the work tiles that blocks share, and leaves them as they are if not."""
    call = forward(mask=tiles()[:2], num_splits=2)
    call.run()
    wanted = call.arguments["out"].clone()
    for number in (4, 4096):
        counters = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
        call.arguments["out"].zero_()
        call.run(fresh=[counters[:number]])
        assert torch.equal(call.arguments["out"], wanted)
        assert bool(counters.any()) == (number == 4096)
    for wrong in (counters.float(), counters.repeat_interleave(2)[::2]):
        with pytest.raises(RuntimeError, match="cuda_forward_kernel: counters needs to be"):
            call.run(fresh=[wrong])


def test_keys_that_are_in_their_order_already(backend: Runner) -> None:
    """Both passes put keys in order, or get them so; then sums have to begin as zeros, which they need not before."""
    mask, keys = torch.rand(BATCH, HEADS_K, 1, KEYS, device=DEVICE) < 0.3, draw(*KEY_BIAS)
    made = torch.ops.flash_dmattn.cuda_key_mask(mask, QUERIES, -QUERIES, 0, True, False, None, None, None)
    _, _, order, *walked = made
    x = tensors_of_call()
    k, v, bias = torch.ops.flash_dmattn.cuda_gather_keys(x["k"], x["v"], keys, order, walked[0])
    tensors = {name: x[name] for name in "qkv"}
    call = forward(mask=walked[:2], bias=keys, key_order=order, num_splits=2, **tensors)  # splits count by counters
    call.run()
    results = [call.arguments[name].clone() for name in ("out", "lse")]
    counters = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    call.run(fresh=[counters, k, v, bias])
    assert all(torch.equal(call.arguments[name], y) for name, y in zip(("out", "lse"), results, strict=True))
    for wrong in ([counters, k], [counters, k, v, bias, bias], [counters, k[:, 1:], v, bias], [counters, k, v.float()]):
        with pytest.raises(RuntimeError, match=r"cuda_forward_kernel: fresh"):
            call.run(fresh=wrong)

    saved = {name: call.arguments[name] for name in ("q", "k", "v", "out", "lse")}
    pass_back = backward(mask=walked, bias=keys, key_order=order, **saved)
    names = ("dq", "dk", "dv", "dbias_sums")
    gradients = []
    for changes, begin in (({}, 7.0), ({"in_order": True, "k": k, "v": v, "bias": bias}, 0.0)):
        added = torch.full((BATCH, HEADS, KEYS), begin, device=DEVICE)
        pass_back.run(dbias_sums=added, deterministic=True, **changes)
        gradients.append([(added if name == "dbias_sums" else pass_back.arguments[name]).clone() for name in names])
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*gradients, strict=True))


def test_every_operator_is_called_here(backend: Runner) -> None:
    names = {schema.name.partition("::")[2] for schema in torch._C._jit_get_all_schemas()}
    operators = {name for name in names if name.startswith("cuda_")} - {"cuda_forward", "cuda_backward"}  # of Python
    assert {make().operator for make in CALLS.values()} == operators


def test_what_is_said_of_a_mask_of_another_call(backend: Runner) -> None:
    call = forward(mask=tiles()[:2])
    x = call.arguments
    for rows in (QUERIES - 1, 2 * QUERIES):
        others = {name: x[name][:, :1].expand(-1, rows, -1, -1).contiguous() for name in ("q", "out")}
        others["lse"] = x["lse"][..., :1].expand(-1, -1, rows).contiguous()
        wanted = f"mask[0] is (2, 4, 130, 8); it needs to be (1 or 2, a divisor of 4, {rows}, 8)"
        with pytest.raises(RuntimeError, match=re.escape(wanted)):
            call.run(**others)


@pytest.mark.parametrize(
    ("others", "wanted"),
    (
        ({"group_shift": 7}, "group_shift is 7; it may be 0 to 6"),
        ({"group_shift": -1}, "group_shift is -1; it may be 0 to 6"),
        ({"group_shift": 2}, "groups have 2 heads; group_shift 2 needs a multiple of 4"),
        ({"bias": True}, "group_shift is for calls without a mask, bias, sink and dropout"),
        ({"mask": True}, "group_shift is for calls without a mask, bias, sink and dropout"),
        ({"sink": True}, "group_shift is for calls without a mask, bias, sink and dropout"),
    ),
    ids=str,
)
def test_heads_that_cannot_be_rows_are_refused(backend: Runner, others: dict[str, Any], wanted: str) -> None:
    made = {
        "bias": lambda: draw(*BIAS),
        "mask": lambda: tiles()[:2],
        "sink": lambda: draw(HEADS, dtype=torch.float32),
    }
    call = forward(group_shift=1)
    call.run()
    with pytest.raises(RuntimeError, match=re.escape(wanted)):
        call.run(**{name: made[name]() if value is True else value for name, value in others.items()})
