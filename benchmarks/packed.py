"""Times both passes of packed sequences on a GPU, with peers and the floor: `python -m benchmarks.packed`.

The peers are torch's varlen_attn and FlashAttention-4, for the cases without mask and bias.

The run compares outputs and gradients of every system with fp64. Exit status 1 if an error is more than 1.5 times
plain PyTorch's, or a backend of ours raises. If rules refuse a call, or a peer fails, its row has the reason, and the
run does not fail.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_dmattn import BackendChoice, BackendUnsupportedError, Sequences, attention
from flash_dmattn.dispatch.config import BackendName
from flash_dmattn.masks import PreparedMask, topk_mask

from .floors import Floor, Rates, rates_of
from .systems import fa4
from .timing import Runner, gradients, measure

MIX = (8192, 6144, 4096, 3072, 2048, 2048, 1536, 1280, 1024, 1024, 768, 512, 512, 256, 128, 128)
SHORT = (48,) * 4096
RELATIVE = (1024,) * 6 + (768,) * 4 + (512,) * 8 + (256,) * 8 + (128,) * 8
TOP = (8192, 4096, 2048, 1024, 512, 512)


class Case(NamedTuple):
    """A batch of packed sequences, and the arguments of its calls.

    `bias` has one value for each score by position, (1, H, most, most), for each score of packed rows, (H, T, most), or
    for each key and key-value head, (Hk, 1, T). With `kept`, the mask of each row keeps so many keys, by one score per
    key.
    """

    name: str
    lengths: tuple[int, ...]
    heads: int
    heads_k: int
    head_dim: int
    is_causal: bool = False
    bias: str | None = None
    kept: int = 0


CASES = (
    Case("16 of 128 to 8192, causal", MIX, 16, 16, 128, is_causal=True),
    Case("the same, 32 heads on 8", MIX, 32, 8, 128, is_causal=True),
    Case("4096 of 48", SHORT, 16, 16, 64),
    Case("34 of 128 to 1024", RELATIVE, 16, 16, 64),
    Case("34 of 128 to 1024, bias by position", RELATIVE, 16, 16, 64, bias="position"),
    Case("34 of 128 to 1024, bias of packed rows", RELATIVE, 16, 16, 64, bias="rows"),
    Case("6 of 512 to 8192, causal, 1024 keys a row, bias of keys", TOP, 16, 4, 128, True, "keys", 1024),
)


class Batch:
    """The tensors of a case."""

    def __init__(self, case: Case, device: torch.device) -> None:
        random = torch.Generator(device).manual_seed(0)
        tokens, most, self.case = sum(case.lengths), max(case.lengths), case

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16)

        self.q, self.dout = (normal(tokens, case.heads, case.head_dim) for _ in range(2))
        self.k, self.v = (normal(tokens, case.heads_k, case.head_dim) for _ in range(2))
        shapes = {
            "position": (1, case.heads, most, most),
            "rows": (case.heads, tokens, most),
            "keys": (case.heads_k, 1, tokens),
        }
        self.bias = None if case.bias is None else normal(*shapes[case.bias])
        self.leaves = [x.requires_grad_() for x in (self.q, self.k, self.v, self.bias) if x is not None]
        self.edges = torch.tensor((0, *case.lengths), device=device).cumsum(0, dtype=torch.int32)
        self.sequences = Sequences.packed(self.edges, max_seqlen_q=most)
        self.mask: Tensor | None = None
        if case.kept:
            scores = torch.randn(case.heads_k, tokens, generator=random, device=device)
            self.mask = torch.zeros(case.heads_k, tokens, most, dtype=torch.bool, device=device)
            for first, length in zip(self.edges.tolist(), case.lengths, strict=False):
                own = scores[None, :, None, first : first + length]
                kept = topk_mask(own, case.kept, is_causal=case.is_causal)
                self.mask[:, first : first + length, :length] = kept[0]

    def prepared(self) -> Any:
        """Return the mask as tiles, with causality."""
        assert self.mask is not None
        rows = len(self.q)
        return PreparedMask.from_mask(
            self.mask, is_causal=self.case.is_causal, sequences=self.sequences, seqlen_q=rows, seqlen_k=rows
        )

    def call(self, mask: Any = None, backend: BackendChoice = "auto") -> Tensor:
        """Ours; a prepared mask brings its causality."""
        is_causal = self.case.is_causal and (mask is None or isinstance(mask, Tensor))
        return attention(
            self.q,
            self.k,
            self.v,
            mask,
            self.bias,
            is_causal=is_causal,
            sequences=self.sequences,
            backend=backend,
        )

    def varlen(self) -> Tensor:
        """torch's own; releases whose function has no `enable_gqa` hand grouped heads to the same kernels unasked."""
        from torch.nn.attention.varlen import varlen_attn  # torch 2.10 and later

        edges, most = self.edges, max(self.case.lengths)
        window = (-1, 0) if self.case.is_causal else (-1, -1)
        is_grouped = self.case.heads != self.case.heads_k
        has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
        grouped: dict[str, Any] = {"enable_gqa": True} if is_grouped and has_flag else {}
        out = varlen_attn(self.q, self.k, self.v, edges, edges, most, most, window_size=window, **grouped)
        assert isinstance(out, Tensor)
        return out

    def fa4(self) -> Tensor:
        """FlashAttention-4's, which returns (out, lse)."""
        reason = fa4.missing(self.q.device)
        if reason:
            raise RuntimeError(reason)
        most = max(self.case.lengths)
        out, _ = fa4.interface().flash_attn_varlen_func(
            self.q,
            self.k,
            self.v,
            cu_seqlens_q=self.edges,
            cu_seqlens_k=self.edges,
            max_seqlen_q=most,
            max_seqlen_k=most,
            causal=self.case.is_causal,
        )
        assert isinstance(out, Tensor)
        return out

    def floors(self) -> tuple[Floor, Floor]:
        """Return the floors of both passes; the mask is one byte a pair, which only the forward pass reads."""
        case = self.case
        pairs = sum(n * (n + 1) // 2 if case.is_causal else n * n for n in case.lengths)
        mask_bytes = 0 if self.mask is None else pairs * case.heads_k
        if case.kept:
            pairs = sum(min(i + 1, case.kept) for n in case.lengths for i in range(n))
        size = sum(x.numel() * x.element_size() for x in self.leaves)
        rows = 2 * self.dout.numel()
        work = 2.0 * case.head_dim * pairs * case.heads
        return Floor(2 * work, size + rows + mask_bytes), Floor(5 * work, 2 * size + 2 * rows)


class System(NamedTuple):
    """Something that computes a case."""

    name: str
    run: Callable[[], Tensor]
    is_peer: bool = False


def systems(batch: Batch, backends: Sequence[BackendName]) -> Iterator[System]:
    """Ours on each backend, with a mask also as tiles, and the peers where they have what the case needs."""
    tiles = None if batch.mask is None else batch.prepared()
    for backend in backends:
        yield System(backend, partial(batch.call, batch.mask, backend))
        if tiles is not None:
            yield System(f"{backend}, tiles", partial(batch.call, tiles, backend))
    if batch.bias is None and batch.mask is None:
        yield System("varlen_attn", batch.varlen, is_peer=True)
        yield System("fa4 varlen", batch.fa4, is_peer=True)


class Truth:
    """out and gradients in fp64, and how far plain PyTorch is from them in the dtype of the case."""

    def __init__(self, batch: Batch) -> None:
        plain = self.results(batch, partial(batch.call, batch.mask, "eager"))
        wide = copy(batch)
        wide.leaves = [x.detach().double().requires_grad_() for x in batch.leaves]
        wide.q, wide.k, wide.v = wide.leaves[:3]
        wide.bias = None if batch.bias is None else wide.leaves[3]
        wide.dout = batch.dout.double()
        self.exact = self.results(wide, partial(wide.call, wide.mask, "eager"))
        self.allowed = [1.5 * self._off(x, y) + 1e-5 for x, y in zip(plain, self.exact, strict=True)]

    @staticmethod
    def results(batch: Batch, run: Callable[[], Tensor]) -> list[Tensor]:
        """out and the gradients of all leaves."""
        out = run()
        return [out.detach(), *torch.autograd.grad(out, batch.leaves, batch.dout)]

    @staticmethod
    def _off(x: Tensor, exact: Tensor) -> float:
        return float((x.double() - exact).norm() / exact.norm().clamp(min=1e-12))

    def holds(self, batch: Batch, system: System) -> bool:
        """Return whether all errors of a system are within the rule; print the others."""
        good = True
        names = ("out", "dq", "dk", "dv", "dbias")
        for name, x, exact, allowed in zip(names, self.results(batch, system.run), self.exact, self.allowed):
            off = self._off(x, exact)
            if not off <= allowed:
                print(f"{system.name}: {name} is {off:.2e} from fp64, {allowed:.2e} allowed", file=sys.stderr)
                good = False
        return good


def run_case(case: Case, device: torch.device, backends: Sequence[BackendName], rates: Rates, rep_ms: float) -> bool:
    """Time and check a case; print a row for each system, and return whether all are right and none of ours failed."""
    batch = Batch(case, device)
    truth = Truth(batch)
    available = list(systems(batch, backends))
    runners = [_runners(batch, system) for system in available]
    for each in zip(*runners, strict=True):
        measure([runner for runner in each if runner.error is None], device, rep_ms=rep_ms, least=3, most=100)
    floors = " / ".join(f"{floor.ms(rates):.3f}" for floor in batch.floors())
    good = True
    for system, passes in zip(available, runners, strict=True):
        error = passes[0].error or passes[1].error
        if error is not None:
            good &= system.is_peer or isinstance(error, BackendUnsupportedError)
            print(
                f"| {case.name} | {system.name} | {type(error).__name__}: {str(error)[:160]} | {floors} | |", flush=True
            )
            continue
        right = truth.holds(batch, system)
        good &= right
        ms = " / ".join(f"{r.summary()['ms']:.3f}" for r in passes)
        print(f"| {case.name} | {system.name} | {ms} | {floors} | {'yes' if right else 'NO'} |", flush=True)
    if batch.mask is not None:
        making = Runner(batch.prepared)
        measure([making], device, rep_ms=rep_ms, least=3, most=100)
        print(f"| {case.name} | making the tiles | {making.summary()['ms']:.3f} | | |", flush=True)
    return good


def _runners(batch: Batch, system: System) -> tuple[Runner, Runner]:
    """Return the runners of the forward pass without gradients and of the backward pass, or with the call's error."""
    forward = Runner(torch.no_grad()(system.run))
    try:
        out = system.run()
    except Exception as refusal:
        forward.error = refusal
        return forward, Runner(system.run, error=refusal)
    return forward, Runner(partial(gradients, out, batch.leaves, batch.dout))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", nargs="+", default=["cuda", "triton"])
    parser.add_argument("--case", nargs="*", default=[""], help="words of the cases to run; all of them by default")
    parser.add_argument("--rep-ms", type=float, default=200, help="about how long each pass is timed")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    device, name = torch.device("cuda"), torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, bf16; forward / backward, ms")
    print("\n| sequences | system | ms | floor | right |\n| --- | --- | --- | --- | --- |")
    rates, good = rates_of(device, name), True
    # Graphs are not captured on the stream that is there by default.
    with torch.cuda.stream(torch.cuda.Stream()):
        for case in CASES:
            if any(word in case.name for word in args.case):
                good &= run_case(case, device, args.backend, rates, args.rep_ms)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
