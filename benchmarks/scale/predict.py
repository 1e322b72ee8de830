"""The predictor: time, efficiency and memory of context-parallel attention from one GPU's speed and link bandwidths.

    python -m benchmarks.scale.predict --lengths 32768 131072 --gpus 2 8
    python -m benchmarks.scale.predict --machine scale.json     # as benchmarks.scale has measured

A prediction, not a measurement: it knows no congestion, no stragglers and no rounding of clocks.

It is of one layer, forward and backward. W GPUs are `inner` x `outer`: the inner ones, in a node, trade heads
(Ulysses); the outer ones gather keys and values, of all heads at once. Seconds, bytes, FLOP; n = B L, and e = 2 bytes a
value:

    FLOP      forward 4 n L Hq D density, backward 2.5 times that; each GPU does 1 / W of it, at the rate of one GPU,
              stretched by the last wave: (tiles / SMs + 1/4) / (tiles / SMs), 128 rows of a head to a tile
    wire      bytes / bandwidth + latency + per_peer x peers, per collective
    traded    (inner - 1) / inner (n / W) heads D e: q, k, v, out forward; the same, dout and gradients backward
    gathered  (outer - 1) / outer n 2 (Hk / inner) D e; and as much again, of dK and dV, out of the backward pass; of a
              window, of documents or of padded entries the share that a rank reads; lists may name any key, and gather
              all
    balance   computing takes as long as on the rank with most of it; of documents of one length, in a contiguous layout
              where ranks have whole ones, else in zigzag; of padded entries in zigzag
    calls     computing takes at least the host's time for the calls of a rank, if there are more than two: padded
              entries make one each for each run of rows, and so do documents with dropout
    order     copies of these keys: 1 forward, to the order of positions; 6 backward, of keys and of fp32 sums
    forward   host_forward + wires + computing + order, one after the other: gathering a group of heads while the one
              before is computed has gained nothing wherever it was measured
    backward  the same without its host, and at least host_backward; host_gather more where keys are gathered

The host's times count for a call that begins when every rank is idle. Where the host runs ahead of the GPU, as in a
step of many layers, they are about 0.

Efficiency is the time of one GPU over W times the time of W. Source of the wire:
Hockney, The communication challenge for MPP (1994).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flash_dmattn.distributed import SequenceLayout
from flash_dmattn.distributed.documents import Spans
from flash_dmattn.distributed.exchange import CLEAR_SHARE, share_moved
from flash_dmattn.distributed.slices import plan

Strategy = Literal["gather", "ulysses", "2d"]
STRATEGIES: tuple[Strategy, ...] = ("gather", "ulysses", "2d")

_BYTES = 2  # of a value in 16 bits
_TILE = 128  # rows of a head that a block computes at a time
_BACKWARD = 2.5  # FLOP of the backward pass over FLOP of the forward pass
_ORDER_BACKWARD = 6.0  # copies of all gathered keys, measured on two H100 and on four H200


@dataclass(frozen=True)
class Machine:
    """The speed of one GPU and of its links.

    Attributes:
        forward_tflops, backward_tflops: TFLOP/s of attention on one GPU; as measured on an H200, causal, head dim 128.
        nvlink_gbs: GB/s that a rank sends to others of its node.
        network_gbs: GB/s that a rank sends to other nodes: 85 % of a NIC of 400 Gb/s each.
        copy_gbs: GB/s of memory, read and written.
        latency_us, per_peer_us: microseconds of a collective, and for each peer in it.
        launch_us: of an attention call.
        host_forward_us, host_backward_us, host_gather_us: microseconds of the host as above; as measured on four H200.
        sms: multiprocessors of a GPU.
        node: GPUs of a node.
        lists_forward_tflops, lists_backward_tflops: of calls over lists of single keys, which each query reads for
            itself; as measured on an H200 with 16 query heads to a key head (docs/notes/lists.md).
        dropout_forward_tflops, dropout_backward_tflops: of causal calls with dropout, which are bound by drawing bits;
            as measured on an H200 at head dim 64 (docs/notes/scale.md).
        host_call_us: microseconds of the host for one of many calls of a rank, which hide behind the GPU where it is
            slower; 45 as measured on one core without launches, and about ten of these.
    """

    forward_tflops: float = 723.0
    backward_tflops: float = 648.0
    nvlink_gbs: float = 300.0
    network_gbs: float = 42.0
    copy_gbs: float = 4300.0
    latency_us: float = 25.0
    per_peer_us: float = 1.5
    launch_us: float = 12.0
    host_forward_us: float = 1400.0
    host_backward_us: float = 4200.0
    host_gather_us: float = 1200.0
    sms: int = 132
    node: int = 8
    lists_forward_tflops: float = 101.0
    lists_backward_tflops: float = 48.0
    dropout_forward_tflops: float = 165.0
    dropout_backward_tflops: float = 273.0
    host_call_us: float = 100.0


@dataclass(frozen=True)
class Layer:
    """One attention call: `length` L, heads Hq and Hk, head dim D, batch B; `density` of allowed scores.

    `window` is how many keys before its own a causal query sees, 0 for all. `document` is the length of causal
    documents that the sequence is packed of, 0 for one. `shortest` is the length of the shortest entry of a padded
    batch, whose lengths go up to `length` in equal steps, 0 without padding. `listed` is how many keys each query
    lists, 0 without lists. `dropout` says whether probabilities are dropped. `density` is not derived from these.
    """

    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    batch: int = 1
    density: float = 0.5
    window: int = 0
    document: int = 0
    listed: int = 0
    dropout: bool = False
    shortest: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each entry.

        >>> Layer(40, batch=3, shortest=20).lengths, Layer(40, shortest=20).lengths, Layer(40, batch=2).lengths
        ((20, 30, 40), (40,), (40, 40))
        """
        shorter, steps = self.length - (self.shortest or self.length), max(1, self.batch - 1)
        return tuple(self.length - shorter * step // steps for step in reversed(range(self.batch)))

    @property
    def spans(self) -> Spans:
        """The documents or padded entries, as a call has them."""
        if self.shortest:
            return Spans(tuple(length for length in self.lengths for _ in range(2)), "padded")
        step = self.document
        begins = range(0, self.length, step) if step else ()
        bounds = tuple(bound for begin in begins for bound in (begin, min(begin + step, self.length)))
        return Spans(bounds, ("packed" if self.dropout else "masked") if step else "")

    def calls(self, outer: int) -> int:
        """Return the most calls that a rank makes in a pass.

        >>> Layer(4096, document=256).calls(2), Layer(4096, document=256, dropout=True).calls(2)
        (1, 8)
        """
        layout, spans = self.layout(outer), self.spans
        return max(len(plan(layout, rank, self.length, (self.window or -1, 0), spans)) for rank in range(outer))

    def layout(self, outer: int) -> SequenceLayout:
        """Return who has which positions among `outer` ranks."""
        fits = self.document and self.length % (outer * self.document) == 0
        return (SequenceLayout.contiguous if fits else SequenceLayout.zigzag)(self.length, outer)

    def share(self, outer: int) -> float:
        """Return the share that is moved, of the keys that an all_gather would move among `outer` ranks."""
        layout = self.layout(outer)
        share = share_moved(layout, layout, (self.window or -1, 0), self.spans)
        return share if share <= CLEAR_SHARE else 1.0

    def balance(self, outer: int) -> float:
        """Return the work of the rank with most of it over the mean, of documents or padded entries; 1 without.

        >>> Layer(4096, document=1024).balance(4), Layer(4096, document=2048).balance(4)
        (1.0, 1.0)
        """
        if not self.document and not self.shortest:
            return 1.0
        loads = [
            sum(self._pairs(stop) - self._pairs(start) for start, stop in runs) for runs in self.layout(outer).intervals
        ]
        return max(loads) * outer / sum(loads)

    @property
    def causal_density(self) -> float:
        """The share of all scores that causality leaves to documents or padded entries.

        >>> Layer(4, document=2).causal_density, Layer(4, batch=2, shortest=2).causal_density  # of 16, and of 32
        (0.375, 0.40625)
        """
        return self._pairs(self.length) / (self.length**2 * (self.batch if self.shortest else 1))

    def _pairs(self, row: int) -> int:
        """Count the pairs of the queries before a row, each with the keys of its document or entry up to itself."""
        if self.shortest:
            used = [min(row, length) for length in self.lengths]
            return sum(length * (length + 1) // 2 for length in used)
        number, rest = divmod(row, self.document)
        return number * self.document * (self.document + 1) // 2 + rest * (rest + 1) // 2


def density_of(length: int, window: int) -> float:
    """Return the share of all scores that a causal window leaves, or lists of one key more.

    >>> density_of(4, 1)  # 7 of 16: 1 + 2 + 2 + 2
    0.4375
    """
    seen = min(window, length - 1) + 1
    return (length * seen - seen * (seen - 1) / 2) / length**2


class Prediction(NamedTuple):
    """Time and memory of a layer on `gpus` GPUs.

    Attributes:
        inner: how many GPUs trade heads.
        forward, backward: seconds.
        efficiency: the time of one GPU, over `gpus` times the time of both passes.
        transient: bytes of gathered and traded tensors at once.
    """

    inner: int
    forward: float
    backward: float
    efficiency: float
    transient: float


def one_gpu(machine: Machine, layer: Layer) -> tuple[float, float]:
    """(forward, backward) seconds on one GPU.

    >>> forward, backward = one_gpu(Machine(forward_tflops=500, backward_tflops=500), Layer(1000, density=1.0))
    >>> f"{forward:.3e} {backward:.3e}"  # 4 x 1000 x 1000 x 32 x 128 FLOP
    '3.277e-05 8.192e-05'
    """
    flop = 4.0 * layer.batch * layer.length**2 * layer.heads * layer.head_dim * layer.density
    rates = machine.forward_tflops, machine.backward_tflops
    if layer.listed:
        rates = machine.lists_forward_tflops, machine.lists_backward_tflops
    elif layer.dropout:
        rates = machine.dropout_forward_tflops, machine.dropout_backward_tflops
    return flop / (rates[0] * 1e12), _BACKWARD * flop / (rates[1] * 1e12)


def wire(machine: Machine, volume: float, peers: int, gbs: float) -> float:
    """Seconds that a collective among `peers` ranks takes in which each sends `volume` bytes.

    >>> wire(Machine(latency_us=20, per_peer_us=1), 1e9, 4, 100) == 1e9 / 100e9 + 20e-6 + 4e-6
    True
    """
    if peers <= 1:
        return 0.0
    return volume / (gbs * 1e9) + (machine.latency_us + machine.per_peer_us * peers) * 1e-6


def predict(machine: Machine, layer: Layer, gpus: int, inner: int = 1) -> Prediction | None:
    """Return the prediction for one way of sharing a layer; None where its sizes do not allow that.

    Args:
        machine, layer: as they are.
        gpus: W.
        inner: ranks of a node that trade heads; the W / inner others gather keys and values.
    """
    if gpus % inner or layer.length % (2 * _TILE * (gpus // inner)) or inner > machine.node:
        return None
    outer, kv_heads = gpus // inner, max(1, layer.kv_heads // inner)
    shares = layer.kv_heads % inner == 0 or inner % layer.kv_heads == 0
    if layer.heads % inner or not shares or (layer.listed and inner == gpus > 1):  # lists are rows, which stay
        return None
    n, dim = layer.batch * layer.length, layer.head_dim
    copy = machine.copy_gbs * 1e9

    def traded(heads: int) -> float:
        return (inner - 1) / inner * (n / gpus) * heads * dim * _BYTES

    def trade(*volumes: float) -> float:
        return sum(wire(machine, volume, inner, machine.nvlink_gbs) for volume in volumes)

    volume_in, volume_out = traded(layer.heads + 2 * max(layer.kv_heads, inner)), traded(layer.heads)
    forward = trade(volume_in, volume_out) + 2 * (volume_in + volume_out) / copy
    backward = trade(*[traded(3 * layer.heads + 2 * layer.kv_heads)] * 2)

    every_key = 2 * n * kv_heads * dim * _BYTES  # K and V of one inner rank
    moved = layer.share(outer) * (outer - 1) / outer * every_key
    keys = moved + every_key / outer  # what a rank holds
    link = machine.nvlink_gbs if gpus <= machine.node else machine.network_gbs
    gather = wire(machine, moved, outer, link)
    order = 2 * keys / copy if outer > 1 else 0.0
    tiles = layer.batch * (layer.length / outer / _TILE) * (layer.heads / inner)
    stretch = (tiles / machine.sms + 0.25) / (tiles / machine.sms) * layer.balance(outer)
    alone = [seconds / gpus * stretch + 2 * machine.launch_us * 1e-6 for seconds in one_gpu(machine, layer)]
    host_forward, host_backward = machine.host_forward_us * 1e-6, machine.host_backward_us * 1e-6
    host_gather = machine.host_gather_us * 1e-6 if outer > 1 else 0.0
    calls = layer.calls(outer) if outer > 1 else 1
    if calls > 2:  # the host's time of a pass has two
        alone = [max(seconds, calls * machine.host_call_us * 1e-6) for seconds in alone]
    if gpus == 1:
        host_forward = host_backward = 0.0  # an ordinary call
    forward += host_forward + gather + alone[0] + order
    backward = max(backward + 2 * gather + alone[1] + _ORDER_BACKWARD * order, host_backward) + host_gather
    transient = (6 * keys if outer > 1 else 0.0) + (volume_in + volume_out if inner > 1 else 0.0)
    efficiency = sum(one_gpu(machine, layer)) / gpus / (forward + backward)
    return Prediction(inner, forward, backward, efficiency, transient)


def best(machine: Machine, layer: Layer, gpus: int, strategy: Strategy) -> Prediction | None:
    """Return the fastest way that a strategy allows; None where no way fits the sizes of the layer.

    Args:
        strategy: "gather" keys and values; "ulysses", heads only; or "2d", heads within a node and keys between them.
    """
    inners: Iterable[int] = {"gather": (1,), "ulysses": (gpus,), "2d": (1, 2, 4, 8, 16)}[strategy]
    predictions = [x for inner in inners if (x := predict(machine, layer, gpus, inner)) is not None]
    return min(predictions, key=lambda x: (x.forward + x.backward, *x), default=None)


def table(machine: Machine, layers: Sequence[Layer], gpus: Sequence[int]) -> str:
    """Return a markdown table with a row for each layer, number of GPUs and strategy that is possible."""
    header: tuple[str, ...] = ("length", "heads", "GPUs", "strategy", "inner x outer", "forward ms", "backward ms")
    header += ("efficiency", "transient GB")
    rows = [header, ("---",) * len(header)]
    for layer, count, strategy in itertools.product(layers, gpus, STRATEGIES):
        if strategy == "2d" and count <= machine.node:
            continue  # in one node it is one of the other two, or slower
        x = best(machine, layer, count, strategy)
        where = (str(layer.length), f"{layer.heads} on {layer.kv_heads}", str(count), strategy)
        if x is None:
            rows.append((*where, "does not divide", *("",) * 4))
            continue
        times = (f"{x.forward * 1e3:.2f}", f"{x.backward * 1e3:.2f}", f"{x.efficiency:.1%}")
        rows.append((*where, f"{x.inner} x {count // x.inner}", *times, f"{x.transient / 1e9:.2f}"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def read_machine(path: str | Path) -> Machine:
    """Return a machine from JSON: its fields by name, or an object that has them under "machine"; the rest is as above.

    Raises:
        ValueError: a name that `Machine` does not have, or a value that is no positive number.
    """
    content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    content = content.get("machine", content) if isinstance(content, dict) else content
    names = {field.name for field in fields(Machine)}
    if not isinstance(content, dict) or not content.keys() <= names:
        raise ValueError(
            f"{path} has {content if not isinstance(content, dict) else sorted(content)}; it needs {sorted(names)}"
        )
    for name, value in content.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"{path} has {value!r} for {name}; it needs a positive number")
    return replace(Machine(), **content)


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.predict", description=__doc__.split("\n")[0])
    integers: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--lengths", nargs="+", default=[32768, 65536, 131072], help="of the sequence", **integers)
    parser.add_argument("--gpus", nargs="+", default=[2, 8], help="numbers of GPUs", **integers)
    parser.add_argument("--heads", default=32, help="query heads", **integers)
    parser.add_argument("--kv-heads", nargs="+", default=[8, 32], help="key-value heads", **integers)
    parser.add_argument("--head-dim", default=128, help="of q, k and v", **integers)
    parser.add_argument("--batch", default=1, help="sequences", **integers)
    parser.add_argument("--density", default=0.5, type=float, help="of allowed scores; 0.5 is causal")
    parser.add_argument("--window", default=0, help="keys before its own that a query sees, 0: all", **integers)
    parser.add_argument("--document", default=0, help="tokens of each packed document, 0: one sequence", **integers)
    parser.add_argument("--shortest", default=0, help="tokens of the shortest padded entry, 0: no padding", **integers)
    parser.add_argument("--listed", default=0, help="keys that each query lists, 0: no lists", **integers)
    parser.add_argument("--dropout", action="store_true", help="probabilities are dropped")
    parser.add_argument("--machine", metavar="FILE", help="JSON with measured fields of Machine")
    for field in fields(Machine):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=float, metavar="X", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = (*options.lengths, *options.gpus, options.heads, *options.kv_heads, options.head_dim, options.batch)
    forms = {name: getattr(options, name) for name in ("window", "document", "shortest", "listed")}
    for name, value in forms.items():
        if value < 0:
            parser.error(f"--{name} is {value}; it needs to be at least 1, or 0 for none")
    if sum(value > 0 for value in forms.values()) > 1:
        parser.error("--window, --document, --shortest and --listed are forms of a call; it needs to be one of them")
    if options.shortest > min(options.lengths):
        parser.error(f"--shortest is {options.shortest}; it needs to be at most each of --lengths, {options.lengths}")
    seen = options.window or options.listed - 1
    if min(sizes) < 1 or not 0 < options.density <= 1:
        parser.error("sizes need to be at least 1, and density above 0 and at most 1")
    if any(options.heads % kv_heads for kv_heads in options.kv_heads):
        parser.error(f"--heads is {options.heads}; it needs to be a multiple of each of --kv-heads, {options.kv_heads}")
    machine = Machine()
    try:
        machine = read_machine(options.machine) if options.machine else machine
    except (OSError, ValueError) as error:
        parser.error(str(error))
    overrides = {field.name: getattr(options, field.name) for field in fields(Machine)}
    machine = replace(machine, **{name: value for name, value in overrides.items() if value is not None})
    layers = [
        Layer(
            length,
            options.heads,
            kv_heads,
            options.head_dim,
            options.batch,
            density_of(length, seen) if seen >= 0 else options.density,
            dropout=options.dropout,
            **forms,
        )
        for length in options.lengths
        for kv_heads in options.kv_heads
    ]
    layers = [
        replace(layer, density=layer.causal_density) if layer.document or layer.shortest else layer for layer in layers
    ]
    print(", ".join(f"{field.name} {getattr(machine, field.name):g}" for field in fields(Machine)), end="\n\n")
    print(table(machine, layers, options.gpus))


if __name__ == "__main__":
    main()
