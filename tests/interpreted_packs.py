"""Calls with masks of sequences in Triton's interpreter, and far masks: `python interpreted_packs.py WHAT`."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import interpreter
import torch
from layouts import unbacked
from outcomes import outcome_of, report
from sequence_calls import SequenceCall, assert_accurate, draw, run
from sequence_pack_calls import NAMES, PackCall
from torch import Tensor

import flash_dmattn
from flash_dmattn import Sequences
from flash_dmattn.backends import mask_choice
from flash_dmattn.masks.prepared import operators
from flash_dmattn.nn import DynamicMaskAttention
from flash_dmattn.problem import SequenceSpec
from flash_dmattn.triton_kernels import sequence_pack

LENGTHS = (0, 1, 33, 128, 129, 150)
TILE = interpreter.Tile(64, 64, 4, 1)  # of attention, whose steps are the same time of any size


def far_masks() -> Iterator[str | None]:
    """Outcomes of masks that span up to 2^34 bytes. Few are touched; the others are never backed by memory."""
    storage = unbacked(1 << 34, torch.uint8)
    bounds = torch.tensor([[2, 9, 3, 33], [14, 5, 40, 48]], dtype=torch.int32)
    spec = SequenceSpec("packed", 2, 20, 90, 10, 48)
    rows, entries = (1, 2, 20, 48), (2, 2, 10, 48)
    for packing, shape, strides in (
        ("queries", rows, (0, 1 << 20, 1 << 29, 1)),
        ("queries", rows, (0, 1 << 20, (1 << 29) + 4, 1)),
        ("queries", rows, (0, 1 << 20, (1 << 29) + 1, 1)),
        ("queries", rows, (0, (1 << 33) + 1, 64, 1)),
        ("queries", rows, (0, 1 << 20, 1, 1 << 28)),
        ("none", entries, ((1 << 33) + 1, 4096, 64, 1)),
        ("none", entries, (1 << 33, 4096, 64, 1)),
        ("keys", (1, 2, 1, 90), (0, 1 << 20, 0, 1 << 27)),
        ("ragged", (1, 2, 1, 9 * 33 + 5 * 48), (0, 1 << 12, 0, 1 << 24)),
        ("tree", (2, 1, 10, 10), (1 << 33, 0, 1 << 29, 1 << 13)),
    ):
        mask = storage.as_strided(shape, strides)
        mask.copy_(torch.rand(shape) < 0.5)
        call = PackCall(mask, bounds, packing, spec, (30, 4), f"{packing} {shape} {strides}")  # type: ignore[arg-type]
        for name, x, y in zip(NAMES, call.packed_by(sequence_pack.pack_sequences), call.wanted(), strict=True):
            yield None if torch.equal(x, y) else f"{call.told}: {name} differs"


def has_rows(call: SequenceCall) -> bool:
    """Whether a call has a bool mask of packed rows with a value for each pair of more than one tile."""
    mask, longest = call.mask, max((n for _, n, _, _ in call.lengths), default=0)
    return isinstance(mask, Tensor) and mask.dim() == 3 and mask.shape[1] > 1 and mask.shape[2] > 128 and longest > 16


def attention_calls() -> Iterator[str | None]:
    """Outcomes of four calls with bool masks, which they pack by the kernels, once for both passes."""

    def drawn(number: int) -> SequenceCall:
        layout = random.Random(number).choice(("packed", "packed", "paged_packed"))
        return draw(number, layout, LENGTHS, interpreter.EVERY_DTYPE, (4, 16))

    def check(call: SequenceCall) -> None:
        with packed_once():
            results = run(call, "triton")
        assert_accurate(results, call)

    for call in itertools.islice(filter(has_rows, map(drawn, itertools.count())), 4):
        interpreter.set_up(TILE)
        yield outcome_of(partial(check, call), call.told)


class packed_once:
    """A context in which one mask is packed."""

    def __enter__(self) -> None:
        self.pack = mock.Mock(wraps=sequence_pack.pack_sequences)
        operators.register(lambda tensor: operators.PYTORCH._replace(pack_sequences=self.pack))

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is None:
            assert self.pack.call_count == 1, f"packed {self.pack.call_count} times"


def example(*lengths: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Sequences]:
    """q, k, v, a mask of packed rows, and its sequences."""
    generator, tokens = torch.Generator().manual_seed(len(lengths)), sum(lengths)
    q, k, v = (torch.randn(tokens, 2, 16, generator=generator, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, tokens, 150, generator=generator) < 0.3
    return q, k, v, mask, Sequences.packed(torch.tensor([0, *lengths]).cumsum(0), max_seqlen_q=150)


def transformed_calls() -> Iterator[str | None]:
    """Outcomes of calls in a compiled graph, under transforms, and of a second derivative."""
    interpreter.set_up(TILE)
    operators.register(lambda tensor: operators.PYTORCH._replace(pack_sequences=sequence_pack.pack_sequences))

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sequences: Sequences, backend: str = "triton") -> Tensor:
        return flash_dmattn.attention(q, k, v, mask, is_causal=True, sequences=sequences, backend=backend)

    def gradients(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out.square().sum(), leaves)

    graphs = []

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        names = [str(node.target) for node in graph.graph.nodes]
        graphs.append(sum("prepare_sequence_mask" in name for name in names))
        return graph

    compiled = torch.compile(call, backend=counted, fullgraph=True, dynamic=True)
    for lengths in ((130, 7), (3, 140), (20, 20, 64)):
        q, k, v, mask, sequences = example(*lengths)
        wanted = call(q, k, v, mask, sequences, "eager")
        results = compiled(q, k, v, mask, sequences)
        pairs = zip((results, *gradients(results, q, k, v)), (wanted, *gradients(wanted, q, k, v)), strict=True)
        good = all(torch.allclose(x, y, atol=1e-4, rtol=1e-4) for x, y in pairs)
        yield None if good else f"compiled {lengths}: other results"
    yield None if set(graphs) == {1} else f"masks packed in graphs: {graphs}"

    q, k, v, mask, sequences = example(130, 20)
    masks = torch.stack((mask, ~mask))
    for dims in ((0, 0), (None, 0), (0, None)):
        many = q.detach().expand(2, *q.shape) if dims[0] == 0 else q.detach()
        chosen = masks if dims[1] == 0 else mask
        results = torch.func.vmap(lambda x, m: call(x, k.detach(), v.detach(), m, sequences), in_dims=dims)(
            many, chosen
        )
        wanted = torch.stack([call(q, k, v, masks[n] if dims[1] == 0 else mask, sequences, "eager") for n in range(2)])
        yield None if torch.allclose(results, wanted, atol=1e-5) else f"mapped {dims}: other results"

    (dq,) = torch.autograd.grad(call(q, k, v, mask, sequences).sum(), q, create_graph=True)
    try:
        dq.sum().backward()
        yield "a second derivative came out"
    except NotImplementedError as refusal:
        yield None if 'backend="eager"' in str(refusal) else str(refusal)


def switched_off() -> Iterator[str | None]:
    """The outcome of a call where the one switch says that no call prepares."""
    q, k, v, mask, sequences = example(130, 20)
    never = mock.Mock(side_effect=AssertionError("a mask was packed"))
    with (
        mock.patch.object(mask_choice, "PACKS_FOR_SEQUENCES", False),
        mock.patch.object(operators, "pack_for_sequences", never),
    ):
        results = flash_dmattn.attention(q, k, v, mask, sequences=sequences, backend="triton")
    wanted = flash_dmattn.attention(q, k, v, mask, sequences=sequences, backend="eager")
    yield None if torch.allclose(results, wanted, atol=1e-5) else "other results"


def layer_calls() -> Iterator[str | None]:
    """The outcome of a layer that keeps a few keys of packed documents: its bool mask becomes tiles once a step."""
    interpreter.set_up(TILE)
    torch.manual_seed(0)
    layer = DynamicMaskAttention(32, num_heads=2, num_heads_k=1, keep_window_size=20, backend="eager")
    documents, x = Sequences.packed(torch.tensor([0, 140, 170]), max_seqlen_q=140), torch.randn(170, 32)

    def step() -> list[Tensor]:
        out = layer(x, sequences=documents)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), list(layer.parameters()))]

    wanted = step()
    layer.backend = "triton"
    with packed_once():
        results = step()
    good = all(torch.allclose(x, y, atol=1e-3, rtol=1e-4) for x, y in zip(results, wanted, strict=True))
    yield None if good else "other results"


if __name__ == "__main__":
    interpreter.admit_cpu()
    checks = {
        "far": far_masks,
        "calls": attention_calls,
        "transformed": transformed_calls,
        "off": switched_off,
        "layer": layer_calls,
    }
    sys.exit(report(checks[sys.argv[1]]()))
