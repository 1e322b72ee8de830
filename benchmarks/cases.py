"""The one table of cases that every suite draws from: shapes, masks, biases and what is swept, without tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from flash_dmattn.biases import ByDistance
from flash_dmattn.explanation import Explanation, explain_description, explain_problem

Pass = Literal["forward", "backward", "step"]
MaskKind = Literal["keys", "topk", "blocks", "band", "random", "documents", "padding", "windows", "lists"]

TILE = 128
PASSES: tuple[Pass, ...] = ("forward", "backward", "step")
# Dims of a mask or bias: b batch, h query heads, k key-value heads, i queries, j keys; one that is missing is 1.
MASK_FORMS = {
    "keys": "bkj",
    "topk": "bkij",
    "blocks": "bkij",
    "band": "ij",
    "documents": "bij",
    "padding": "bj",
    "windows": "bij",
    "lists": "bkij",
}


class MaskRule(NamedTuple):
    """How a mask is made, by kind.

    * "keys": the `size` highest scored keys, the same for every query.
    * "topk": for every query the `size` highest scored keys of its causal prefix.
    * "blocks": tiles of `size`, each kept with probability `density`, and the diagonal.
    * "band": keys at most `size` away.
    * "documents": `size` packed documents of random lengths.
    * "padding": batch elements with random lengths of at least 1/`size` of the whole.
    * "random": each pair with probability `density`.
    * "windows": batch elements are windows of images that have `size` x `size` windows, shifted by half a window. In
      the windows of the last row and column, tokens from the two sides of an image's border do not see each other.
    * "lists": for each list of `block[0]` queries `size` random blocks of `block[1]` keys of its causal prefix.
    """

    kind: MaskKind
    size: int = 0
    density: float = 0.1
    form: str = ""
    block: tuple[int, int] = (1, 1)

    @property
    def dims(self) -> str:
        """Return the dims of the mask as letters; only "random" has them from `form`."""
        return self.form or MASK_FORMS[self.kind]

    def __str__(self) -> str:
        said = {
            "keys": f"{self.size} keys kept",
            "topk": f"top {self.size} per query",
            "blocks": f"{self.size}-blocks, density {self.density:g}",
            "band": f"band of ±{self.size}",
            "documents": f"{self.size} documents",
            "padding": f"padded lengths from L/{self.size}",
            "windows": f"shifted windows, {self.size} x {self.size} an image",
            "random": f"random, density {self.density:g}",
            "lists": f"lists of {self.size} blocks of {self.block[0]} x {self.block[1]}",
        }
        return said[self.kind]


@dataclass(frozen=True)
class Case:
    """One attention call, with the gradients of q, k, v and, where it has one, of the bias.

    Attributes:
        group: "workload", "short", "mla", "graph", "d512", "relative", "fp32", "decode", "speculative", "lists",
            "memory", "form", "model", or the name of a sweep, such as "length".
        x: in a sweep, the value of the swept quantity.
        seqlen: the number of keys, and of queries unless `queries` is set.
        head_dim_v: the head dim of v and out where it is not `head_dim`.
        bias: the letters of its dims, or None. With "bkj" it is also the score by which "keys" and "topk" select. "hd"
            is a bias by distance, see `reach`.
        reach: of a bias by distance: distances of so much and beyond share a value. T5 has 128.
        layers: the number of layers of a model whose attention is this call; None for a single call.
        passes: the timed passes.
        dtype: of all tensors.
        allows_tf32: whether torch's float32 matmul precision is "high" and not "highest" while the case runs.
        all_systems: whether slow systems are timed, too; one workload of each kind does that.
        quick: whether `--quick` keeps the case.
    """

    name: str
    group: str
    batch: int
    heads: int
    heads_k: int
    seqlen: int
    head_dim: int
    is_causal: bool = False
    mask: MaskRule | None = None
    bias: str | None = None
    queries: int | None = None
    head_dim_v: int | None = None
    x: float | str | None = None
    reach: int = 128
    layers: int | None = None
    passes: tuple[Pass, ...] = PASSES
    dtype: Literal["bf16", "fp32"] = "bf16"
    allows_tf32: bool = False
    all_systems: bool = False
    quick: bool = False

    @property
    def seqlen_q(self) -> int:
        return self.seqlen if self.queries is None else self.queries

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def shape(self) -> str:
        """B,Hq,Hk,L,D as tables have it; two lengths or head dims where they differ."""
        lengths = f"{self.seqlen}" if self.queries is None else f"{self.queries}x{self.seqlen}"
        dims = f"{self.head_dim}" if self.head_dim_v is None else f"{self.head_dim}/{self.head_dim_v}"
        return f"{self.batch},{self.heads},{self.heads_k},{lengths},{dims}"

    def shape_of(self, form: str) -> tuple[int, ...]:
        """Return the 4-D shape of a mask or bias of these dims; (1, H, distances) of a bias by distance."""
        heads = self.heads if "h" in form else self.heads_k if "k" in form else 1
        if "d" in form:
            return 1, heads, 2 * self.reach + 1
        return (
            self.batch if "b" in form else 1,
            heads,
            self.seqlen_q if "i" in form else 1,
            self.seqlen if "j" in form else 1,
        )

    @property
    def what(self) -> str:
        """In words, for tables."""
        parts = [] if self.layers is None else [f"decoder of {self.layers} layers"]
        if self.dtype == "fp32":
            parts.append(f"fp32, {'high' if self.allows_tf32 else 'highest'}")
        parts += ["causal"] if self.is_causal else []
        if self.mask is not None:
            parts.append(f"mask {spelled(self.mask.dims)}: {self.mask}")
        if self.bias is not None:
            parts.append(f"bias {spelled(self.bias)}")
        return ", ".join(parts) or "full"

    @property
    def takes_gradients(self) -> bool:
        return self.passes != ("forward",)

    def explain(self, device: str, *, gradients: bool | None = None, return_lse: bool = False) -> Explanation:
        """Explain the call on "cpu" or, for example, "sm_90".

        Layers of a model have their mask as an `IntervalMask`.

        The forward pass is timed with `gradients=False`. None means the gradients of the case.
        """
        grad = self.takes_gradients if gradients is None else gradients
        explanation = explain_problem(
            (self.batch, self.seqlen_q, self.heads, self.head_dim),
            kv_heads=self.heads_k,
            seqlen_k=self.seqlen,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            device=device,
            mask=None if self.mask is None else self.shape_of(self.mask.dims),
            mask_prepared=self.layers is not None,
            bias=None if self.bias is None else self.shape_of(self.bias),
            by_distance=ByDistance(self.reach, "clamp", False) if self.bias == "hd" else None,
            is_causal=self.is_causal,
            return_lse=return_lse,
            grad=grad,
            bias_grad=grad and self.bias is not None,
        )
        problem = explanation.problem._replace(flags=explanation.problem.flags._replace(allows_tf32=self.allows_tf32))
        if self.layers is not None:
            problem = problem._replace(mask_form="intervals")
        return explanation if problem == explanation.problem else explain_description(problem, "auto")

    def reduced(self, seqlen: int) -> Case:
        """The same kind of call, small enough for a CPU: at most `seqlen` keys, 2 batch elements, 4 heads, 32 dims.

        A model keeps 2 of its layers.
        """
        heads = min(self.heads, 4)
        keys, fixed = seqlen // 6, {"documents": 3, "padding": 2, "windows": 2}
        size = {"keys": keys, "topk": keys, "band": seqlen // 4, "blocks": TILE, **fixed}
        rule = self.mask and self.mask._replace(size=size.get(self.mask.kind, 0))
        if rule is not None and rule.kind == "lists":
            rule = rule._replace(size=4)
        return replace(
            self,
            batch=min(self.batch, 2),
            heads=heads,
            heads_k=max(1, heads * self.heads_k // self.heads),
            seqlen=min(self.seqlen, seqlen),
            reach=min(self.reach, seqlen - 1),
            queries=self.queries and min(self.queries, seqlen),
            head_dim=min(self.head_dim, 32),
            head_dim_v=self.head_dim_v and min(self.head_dim_v, 16),
            layers=self.layers and min(self.layers, 2),
            mask=rule,
        )


def spelled(form: str) -> str:
    """Return the dims of a form as the documentation writes them: "bkj" is (B,Hk,1,L)."""
    heads = "Hq" if "h" in form else "Hk" if "k" in form else "1"
    if "d" in form:
        return f"(1,{heads},distances)"
    return f"({'B' if 'b' in form else '1'},{heads},{'L' if 'i' in form else '1'},{'L' if 'j' in form else '1'})"


def _workloads() -> Iterator[Case]:
    def case(
        name: str,
        *sizes: int,
        causal: bool = False,
        mask: MaskRule | None = None,
        bias: str | None = None,
        all_systems: bool = False,
        quick: bool = False,
    ) -> Case:
        batch, heads, heads_k, seqlen, head_dim = sizes
        made = Case(name, "workload", batch, heads, heads_k, seqlen, head_dim, causal, mask, bias)
        return replace(made, all_systems=all_systems, quick=quick)

    top, row = MaskRule("topk", 1024), "bkj"
    kept = MaskRule("keys", 1024)
    yield case("dense-d64", 4, 32, 32, 4096, 64)
    yield case("dense-d128", 4, 16, 16, 4096, 128, all_systems=True)
    yield case("causal-d64", 1, 32, 32, 16384, 64, causal=True)
    yield case("causal-d128", 1, 16, 16, 16384, 128, causal=True)
    yield case("causal-gqa", 4, 32, 8, 4096, 128, causal=True, all_systems=True, quick=True)
    yield case("bias-bhll-d64", 4, 16, 16, 2048, 64, bias="bhij", all_systems=True, quick=True)
    yield case("bias-bhll-d128", 1, 16, 16, 4096, 128, bias="bhij")
    yield case("bias-1hll-d64", 8, 16, 16, 2048, 64, bias="hij", all_systems=True)
    yield case("keys-2k", 1, 2, 1, 2048, 64, causal=True, mask=kept, bias=row)
    yield case("keys-8k", 1, 2, 1, 8192, 64, causal=True, mask=kept, bias=row, all_systems=True)
    yield case("keys-32k", 1, 2, 1, 32768, 64, causal=True, mask=kept, bias=row)
    yield case("topk-8k", 1, 16, 4, 8192, 128, causal=True, mask=top, bias=row, all_systems=True, quick=True)
    yield case("topk-16k", 1, 16, 4, 16384, 128, causal=True, mask=top, bias=row)
    yield case("blocks", 1, 16, 4, 16384, 128, mask=MaskRule("blocks", TILE), all_systems=True)
    yield case("band", 1, 16, 4, 16384, 128, mask=MaskRule("band", 1024), all_systems=True)


def _sweeps() -> Iterator[Case]:
    for length in (512, 1024, 2048, 4096, 16384):
        yield Case(f"length-{length}", "length", 16384 // length, 16, 16, length, 128, True, x=length)
    for dim in (64, 96, 128, 192, 256):
        yield Case(f"head-dim-{dim}", "head dim", 2, 2048 // dim, 2048 // dim, 4096, dim, True, x=dim)
    for heads_k in (32, 8, 4, 1):
        yield Case(f"heads-{heads_k}", "key-value heads", 1, 32, heads_k, 4096, 128, True, x=heads_k)
    for batch in (1, 4, 16):
        yield Case(f"batch-{batch}", "batch", batch, 16, 16, 1024, 64, bias="hij", x=batch)
    for density in (0.02, 0.1, 0.3, 1.0):
        rule = MaskRule("blocks", TILE, density)
        yield Case(f"density-{density:g}", "density", 1, 16, 4, 8192, 128, mask=rule, x=density)
    rules = (
        MaskRule("padding", 2),
        MaskRule("documents", 16),
        MaskRule("band", 1024),
        MaskRule("random", 0, 0.1, "bkij"),
        MaskRule("keys", 1024),
    )
    for rule in rules:
        yield Case(f"mask-{rule.kind}", "mask kind", 2, 16, 4, 4096, 64, mask=rule, x=rule.kind)
    for form in ("bhij", "bij", "hij", "ij", "bhj", "hj"):
        yield Case(f"bias-{form}", "bias class", 2, 16, 16, 2048, 128, True, bias=form, x=spelled(form))


def _short() -> Iterator[Case]:
    """Rows of 49 to 1024 keys, many of them: proteins, images, padded text, and one call of nearly no work."""

    def case(
        name: str,
        *sizes: int,
        mask: MaskRule | None = None,
        bias: str | None = None,
        queries: int | None = None,
        quick: bool = False,
    ) -> Case:
        batch, heads, seqlen, head_dim = sizes
        made = Case(f"short-{name}", "short", batch, heads, heads, seqlen, head_dim, mask=mask, bias=bias)
        return replace(made, queries=queries, quick=quick)

    padding, shared = MaskRule("padding", 4), "hij"
    yield case("pair-256", 256, 4, 256, 32, bias=shared)
    yield case("pair-64", 64, 4, 256, 32, bias=shared)
    for length in (384, 512, 768):
        yield case(f"pair-{length}", length, 4, length, 32, bias=shared)
    yield case("triangle", 256, 4, 256, 32, mask=padding, bias=shared, quick=True)
    for name, *sizes in (("2048", 2048, 6, 49, 32), ("256", 256, 12, 49, 32), ("64-keys", 2048, 12, 64, 32)):
        rule = MaskRule("windows", 8 if sizes[0] == 2048 else 2)
        yield case(f"window-{name}", *sizes, bias=shared)
        yield case(f"shifted-{name}", *sizes, mask=rule, bias=shared)
    yield case("vit-197", 64, 12, 197, 64)
    yield case("beit-197", 64, 12, 197, 64, bias=shared)
    yield case("beit-577", 32, 16, 577, 64, bias=shared)
    yield case("encoder-1k", 32, 16, 1024, 64, mask=padding)
    yield case("encoder-512", 64, 12, 512, 64, mask=padding)
    yield case("encoder-128", 128, 12, 128, 64, mask=padding)
    yield case("t5", 32, 12, 512, 64, mask=padding, bias=shared)
    yield case("t5-cross", 32, 12, 512, 64, mask=padding, queries=128)
    yield case("small", 1, 2, 128, 64)


def _mla() -> Iterator[Case]:
    """Head dims 192 and 128, which multi-head latent attention has in training and prefill."""

    def case(name: str, batch: int, heads: int, seqlen: int, causal: bool = True) -> Case:
        return Case(f"mla-{name}", "mla", batch, heads, heads, seqlen, 192, causal, head_dim_v=128)

    yield case("1k", 8, 16, 1024)
    yield case("4k", 2, 32, 4096)
    yield case("16k", 1, 16, 16384)
    yield case("4k-full", 2, 16, 4096, causal=False)


def _graph() -> Iterator[Case]:
    """A bias for each entry, head and pair, with its gradient: graphs and molecules, whose lengths nothing divides."""

    def case(name: str, *sizes: int, mask: MaskRule | None = None) -> Case:
        batch, heads, seqlen, head_dim = sizes
        return Case(f"graph-{name}", "graph", batch, heads, heads, seqlen, head_dim, mask=mask, bias="bhij")

    yield case("65", 512, 8, 65, 16)
    yield case("129", 256, 32, 129, 24)
    yield case("129-padded", 256, 32, 129, 24, mask=MaskRule("padding", 4))
    yield case("250", 64, 16, 250, 64)
    yield case("513", 16, 16, 513, 32)


def _wide() -> Iterator[Case]:
    """Head dim 512, which Gemma 4 has in every sixth layer: plain calls, and what a mask or a bias adds to them."""

    def case(name: str, heads_k: int, mask: MaskRule | None = None, bias: str | None = None) -> Case:
        return Case(f"d512-{name}", "d512", 1, 32, heads_k, 8192, 512, True, mask, bias)

    yield case("causal", 32)
    yield case("causal-mask", 32, MaskRule("documents", 1))  # causality as a mask: the same pairs, read from memory
    yield case("gqa", 4)
    yield case("documents", 4, MaskRule("documents", 16))
    yield case("padding", 4, MaskRule("padding", 4))
    yield replace(case("bias", 4, None, "hij"), seqlen=4096)
    yield Case("d512-one-query", "d512", 8, 32, 4, 65536, 512, queries=1, passes=("forward",))


def _relative() -> Iterator[Case]:
    """T5's bias as a table, and a value for each distance of a call."""

    def case(name: str, *sizes: int, causal: bool = False, reach: int = 128) -> Case:
        batch, heads, seqlen, head_dim = sizes
        made = Case(f"relative-{name}", "relative", batch, heads, heads, seqlen, head_dim, causal, bias="hd")
        return replace(made, reach=reach)

    yield case("t5-512", 32, 12, 512, 64)
    yield case("t5-2k", 8, 16, 2048, 64)
    yield case("t5-16k-causal", 1, 16, 16384, 64, causal=True)
    yield case("t5-16k-causal-d128", 1, 16, 16384, 128, causal=True)
    yield case("t5-32k", 1, 16, 32768, 64)
    yield case("all-2k", 8, 16, 2048, 64, reach=2047)
    yield case("all-16k-causal", 1, 16, 16384, 64, causal=True, reach=16383)


def _fp32() -> Iterator[Case]:
    """Calls in fp32 under both of torch's precisions: proteins, speech, images, and plain ones."""

    def case(
        name: str, *sizes: int, mask: MaskRule | None = None, bias: str | None = None, quick: bool = False
    ) -> Iterator[Case]:
        batch, heads, seqlen, head_dim = sizes
        made = Case(f"fp32-{name}", "fp32", batch, heads, heads, seqlen, head_dim, mask=mask, bias=bias, dtype="fp32")
        yield replace(made, quick=quick)
        yield replace(made, name=f"{made.name}-high", allows_tf32=True)

    padding, shared = MaskRule("padding", 4), "hij"
    for length in (128, 256, 384):
        yield from case(f"triangle-{length}", length, 4, length, 32, mask=padding, bias=shared)
    for samples in (8, 48):
        yield from case(f"af3-{samples}", samples, 16, 512, 48, bias=shared, quick=samples == 8)
    for length in (384, 512, 768):
        yield from case(f"boltz-{length}", 1, 16, length, 24, mask=padding, bias=shared)
    yield from case("msa-rows", 128, 8, 384, 32, mask=padding, bias=shared)
    for name, *sizes in (("2k", 4, 16, 2048, 64), ("8k", 1, 16, 8192, 64)):
        yield from case(f"plain-{name}", *sizes)
        yield from case(f"bias-{name}", *sizes, bias=shared)
    yield from case("esm", 8, 20, 1024, 64, mask=padding)
    yield from case("conformer", 16, 8, 512, 64, mask=padding, bias="bhij")  # positions relative to each query
    yield from case("swinv2", 256, 8, 256, 32, bias=shared)
    yield from case("d128", 8, 16, 1024, 128)


def _decode() -> Iterator[Case]:
    for length in (8192, 65536):
        name, quick = f"decode-{length // 1024}k", length == 8192
        yield Case(name, "decode", 8, 32, 8, length, 128, queries=1, passes=("forward",), quick=quick)
    kept = MaskRule("keys", 2048)
    yield Case("decode-keys-64k", "decode", 8, 32, 8, 65536, 128, mask=kept, queries=1, passes=("forward",))


def _speculative() -> Iterator[Case]:
    """Yield a few causal queries on long keys: drafted tokens that a model checks at once."""

    def case(queries: int, batch: int, seqlen: int, head_dim: int = 128) -> Case:
        name = f"speculative-{queries}" + ("" if head_dim == 128 else f"-d{head_dim}")
        made = Case(name, "speculative", batch, 32, 8, seqlen, head_dim, True, queries=queries)
        return replace(made, passes=("forward",))

    yield case(2, 16, 16384)
    yield case(4, 1, 65536)
    yield case(8, 16, 16384)
    yield case(8, 16, 16384, 64)
    yield case(64, 8, 8192)


def _lists() -> Iterator[Case]:
    """Lists of keys and of blocks; and beside each the same call of all earlier keys, which lists have to beat."""
    for name, heads, heads_k, size, block in (
        ("keys", 32, 2, 1024, (1, 1)),
        ("blocks", 32, 2, 16, (1, 64)),
        ("tiles", 16, 4, 16, (TILE, TILE)),
    ):
        plain = Case(f"lists-{name}-dense", "lists", 1, heads, heads_k, 16384, 128, True)
        yield replace(plain, name=f"lists-{name}", mask=MaskRule("lists", size, block=block))
        yield plain


def _memory() -> Iterator[Case]:
    # The predecessor reports that the memory of this call's backward pass fell from 448 to 320 MB.
    yield Case("predecessor", "memory", 1, 2, 1, 4096, 64, True, bias="hj", quick=True)
    yield Case("memory-dense", "memory", 1, 32, 8, 8192, 128, True)
    yield Case("memory-bias-bhll", "memory", 4, 16, 16, 2048, 64, bias="bhij")
    yield Case("memory-bias-1hll", "memory", 8, 16, 16, 2048, 64, bias="hij", quick=True)
    yield Case("memory-topk", "memory", 1, 16, 4, 8192, 128, True, MaskRule("topk", 1024), "bkj")


def _models() -> Iterator[Case]:
    rule, sizes = MaskRule("topk", 1024), (1, 16, 4, 8192, 128)
    yield Case("decoder-topk-8k", "model", *sizes, True, rule, "bkj", layers=12, passes=("step",), quick=True)


def _forms() -> Iterator[Case]:
    """Small calls of every form, whose whole score matrices fit in fp64; lengths that no tile divides."""

    def form(name: str, mask: MaskRule | None = None, bias: str | None = None, **rest: object) -> Case:
        sizes = {"batch": 2, "heads": 8, "heads_k": 4, "seqlen": 384, "head_dim": 64, **rest}
        return Case(f"form-{name}", "form", mask=mask, bias=bias, **sizes)  # type: ignore[arg-type]

    yield form("full", quick=True)
    yield form("causal", is_causal=True)
    yield form("causal-d128-odd", is_causal=True, seqlen=509, head_dim=128)
    yield form("d256", heads=4, heads_k=4, head_dim=256, is_causal=True)
    yield form("d512", heads=4, heads_k=4, head_dim=512, is_causal=True)
    yield form("one-key-value-head", heads_k=1, is_causal=True)
    yield form("few-queries", queries=130, is_causal=True, seqlen=509)
    yield form("decode", queries=1, seqlen=1024)
    kinds: tuple[MaskKind, ...] = ("topk", "keys")
    for kind in kinds:
        yield form(kind, MaskRule(kind, 100), "bkj", is_causal=True, quick=kind == "topk")
    yield form("blocks", MaskRule("blocks", TILE, 0.3))
    yield form("band", MaskRule("band", 100))
    yield form("documents", MaskRule("documents", 5), is_causal=True)
    yield form("padding", MaskRule("padding", 2), quick=True)
    for dims in ("bhij", "bkij", "ij", "bj"):
        yield form(f"random-{dims}", MaskRule("random", 0, 0.5, dims), seqlen=509)
    for dims in ("bhij", "hij", "bij", "ij", "bhj", "hj"):
        yield form(f"bias-{dims}", bias=dims, heads=4, heads_k=4, quick=dims in ("bhij", "hj"))
    yield form("bias-odd", bias="bhij", seqlen=509, is_causal=True)
    yield form("relative", bias="hd", heads=4, heads_k=4, reach=100)
    yield form("mask-and-bias", MaskRule("random", 0, 0.5, "bkij"), "bhij")


CASES = (
    *(*_workloads(), *_short(), *_mla(), *_graph(), *_sweeps(), *_wide(), *_relative(), *_fp32()),
    *(*_decode(), *_speculative(), *_lists(), *_memory(), *_models(), *_forms()),
)
GROUPS = {
    "equivalence": ("form",),
    "performance": (
        "workload",
        "short",
        "mla",
        "graph",
        "length",
        "head dim",
        "key-value heads",
        "batch",
        "density",
        "mask kind",
        "bias class",
        "d512",
        "relative",
        "fp32",
        "decode",
        "speculative",
        "lists",
    ),
    "memory": ("memory",),
    "model": ("model",),
}


def cases_of(suite: str, only: list[str] | None = None, quick: bool = False) -> list[Case]:
    """Return the cases of a suite whose name or group contains one of `only`; with `quick` those marked so."""
    chosen = [case for case in CASES if case.group in GROUPS[suite]]
    if only is not None:
        chosen = [case for case in chosen if any(part in case.name or part in case.group for part in only)]
    return [case for case in chosen if case.quick] if quick else chosen
