"""A sample of the Triton kernels, compiled for each GPU that they are meant for, and what is said of these GPUs.

`python tests/compile_everything.py` compiles all of them.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import DEVICE
from conftest import needs_triton
from out_of_tree import replaced

from docs.support_matrix import gpu_table
from flash_dmattn.backends.protocol import all_hold
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.explanation import explain_problem
from flash_dmattn.problem import AttentionProblem, NeedsGrad, SequenceSpec
from flash_dmattn.problem.inputs import Inputs, Saved
from flash_dmattn.triton_kernels.gpus import GPUS, KIB, Gpu, gpu_of, shared_bytes
from flash_dmattn.triton_kernels.precision import problem_precision

ARCHS = [gpu.arch for gpu in GPUS]
compiles = pytest.mark.skipif(
    DEVICE == "cuda", reason="a GPU runs the kernels; the bounds are those of the pinned Triton"
)


def kernels_of_the_library() -> set[str]:
    from triton.runtime.jit import JITFunction

    import flash_dmattn.triton_kernels as package

    names = set()
    for path in Path(package.__path__[0]).glob("*.py"):
        module = importlib.import_module(f"flash_dmattn.triton_kernels.{path.stem}")
        kernels = [x for x in vars(module).values() if isinstance(x, JITFunction) and x.__name__.endswith("_kernel")]
        names |= {kernel.__name__.removesuffix("_kernel").removeprefix("_") for kernel in kernels}
    return names


@needs_triton
@compiles
@pytest.mark.parametrize("arch", ARCHS)
def test_a_sample_compiles_and_fits(arch: str) -> None:
    from compiled_catalogue import catalogue, compiled, sample

    entries = sample(catalogue([arch]))
    assert {entry.job.name for entry in entries} == kernels_of_the_library()
    # One GPU of three compiles a kernel: a clean machine takes some two seconds for each.
    results = [compiled(entry) for entry in entries[ARCHS.index(arch) % 3 :: 3]]
    assert all(result.kernel is not None and result.kernel.registers > 0 for result in results)
    wrong = [result.line for result in results if result.problems]
    assert not wrong, "\n".join(wrong)


@needs_triton
def test_samples_differ_and_take_every_dtype() -> None:
    from compiled_catalogue import DTYPES, catalogue, sample

    entries = catalogue(["gfx942"])
    first, second = ({entry.label for entry in sample(entries, number)} for number in (0, 1))
    assert len(first) == len(second) == len(kernels_of_the_library()) and first != second
    assert {entry.dtype for entry in entries} == {*DTYPES, "-"}


@needs_triton
def test_what_is_out_of_bounds_is_found() -> None:
    from compiled_catalogue import Entry, Result, problems, stack_limit, table
    from compiled_triton import Kernel, Variant, jobs_of
    from compiled_variants import VARIANTS

    entry = Entry("bf16", "128 causal", 128, jobs_of(Variant(**VARIANTS["128 causal"]), "sm_86")[0])
    fits = Kernel("forward", 64, 32, 200, 0, 99 * KIB, "mma.sync", 0)
    assert problems(entry, fits) == []
    assert "shared memory" in problems(entry, fits._replace(shared=99 * KIB + 1))[0]
    assert "stack" in problems(entry, fits._replace(stack=stack_limit(entry) + 1))[0]
    assert "too short" in problems(entry, fits._replace(short_sums=2))[0]
    for text in ("fma", "trap;", "// gemma.sync", "mma"):
        assert "tensor cores" in problems(entry, fits._replace(text=text))[0]
    for text in ("tcgen05.mma.cta_group::1", "wgmma.mma_async.sync", "mma.sync.aligned", "v_mfma_f32_32x32x8_bf16"):
        assert problems(entry, fits._replace(text=f"\t{text}")) == []
    results = [
        Result(entry.label, "sm_86", "bf16", "forward", fits, ()),
        Result(entry.label, "sm_86", "bf16", "forward", fits._replace(stack=40, shared=7), ("wrong",)),
        Result(entry.label, "sm_80", "bf16", "forward", None, ("does not compile",)),
    ]
    assert table(results).splitlines()[2:] == [
        f"| sm_80 | bf16 | forward | 0 | 0, {163 * KIB} | 0 | 1 |",
        f"| sm_86 | bf16 | forward | 2 | {99 * KIB}, {99 * KIB} | 40 | 1 |",
    ]


@needs_triton
@compiles
def test_the_script_compiles_what_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    import compile_everything

    chosen = ["--arch", "sm_86", "gfx942", "--dtype", "fp16", "--words", "delta, 64 plain", "--jobs", "1"]
    assert compile_everything.main(chosen) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[1/2, ") and "delta, 64 plain: 32x0, registers" in lines[0]
    assert lines[-1] == "2 kernels, 0 out of bounds"
    with pytest.raises(SystemExit):
        compile_everything.main(["--arch", "sm_86", "--dtype", "fp16", "--words", "no such kernel"])


@needs_triton
def test_tiles_of_other_gpus_are_not_those_of_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published figures rest on the tiles of sm_90: no row that another GPU has for itself reaches it."""
    from flash_dmattn.triton_kernels import tile_table
    from flash_dmattn.triton_kernels.bias_forms import NO_BIAS, TILE_BIAS
    from flash_dmattn.triton_kernels.tile_ops import BAND, KEYS, TILES
    from flash_dmattn.triton_kernels.tile_table import Tile, tile_of

    kernels, dtypes = ("forward", "keys", "queries", "product", "bias"), (torch.bfloat16, torch.float16, torch.float32)
    calls = list(product(kernels, dtypes, (16, 32, 64, 128, 256), (BAND, KEYS, TILES), (NO_BIAS, TILE_BIAS), (0, 1)))

    def tiles(arch: str) -> list[Tile]:
        return [
            tile_of(kernel, dtype, d, arch, mask=mask.value, bias=bias.value, bias_tma=bool(tma))
            for kernel, dtype, d, mask, bias, tma in calls
        ]

    before, others = tiles("sm_90"), [tiles(arch) for arch in ("sm_80", "sm_86")]
    nothing = {256: Tile(0, 0, 0, 0)}
    for name in ("_FP32_SM", "_FP32_LARGE"):
        table = getattr(tile_table, name)
        monkeypatch.setattr(tile_table, name, dict.fromkeys(table, nothing))
    assert tiles("sm_90") == before
    pairs = {arch: tile_table.pair_tiles(arch) for arch in ("sm_90", "sm_80", "sm_86", "gfx942")}
    assert len(set(pairs.values())) == 3 and pairs["sm_80"] == pairs["sm_86"]
    assert [tiles(arch) for arch in ("sm_80", "sm_86")] != others


@needs_triton
def test_rows_of_the_tile_table_can_be_compiled() -> None:
    """Triton has only tensors of 2^n values; head dims are padded to them; on AMD GPUs no loop has a pipeline."""
    from flash_dmattn.triton_kernels import tile_table

    sizes, tiles, on_amd = set[int](), set[tile_table.Tile](), set[tile_table.Tile]()

    def walk(table: object, name: str) -> None:
        if isinstance(table, tile_table.Tile):
            (on_amd if name.startswith("_GFX") else tiles).add(table)
        elif isinstance(table, dict):
            sizes.update(key for key in table if isinstance(key, int))
            for part in table.values():
                walk(part, name)
        elif isinstance(table, tuple):
            sizes.update(part for part in table if isinstance(part, int))
            for part in table:
                walk(part, name)

    for name, table in vars(tile_table).items():
        if name.startswith("_") and isinstance(table, dict | tile_table.PairTiles):
            walk(table, name)
    assert len(tiles) > 40 and len(on_amd) > 3
    for tile in tiles | on_amd:
        sizes |= {tile.block_m, tile.block_n, tile.num_warps}
        assert tile.block_m >= 16 <= tile.block_n
    assert {size for size in sizes if size & (size - 1)} == set()
    assert {tile.num_stages for tile in on_amd} == {1}


@needs_triton
def test_shared_memory_decides_where_tiles_do_not_fit_every_gpu() -> None:
    from flash_dmattn.triton_kernels.tile_table import Tile, tile_of

    def tile(arch: str) -> Tile:
        return tile_of("queries", torch.float32, 256, arch, mask=0, bias=0, bias_tma=False)

    assert tile("sm_80") == tile("sm_100") == Tile(16, 32, 4, 2)
    assert tile("sm_86") == tile("sm_89") == tile("sm_120") == Tile(16, 32, 16, 1)
    assert gpu_of("sm_87") is None and shared_bytes("sm_87") == 99 * KIB and tile("sm_87") == tile("sm_86")
    assert gpu_of("gfx1100") is None and shared_bytes("gfx1100") == 64 * KIB


@needs_triton
@pytest.mark.parametrize("kernel", ("forward", "product", "keys", "pairs", "rows"))
def test_lists_have_the_tiles_of_hopper_on_gpus_like_it(kernel: Any) -> None:
    from flash_dmattn.triton_kernels.list_tiles import list_tile

    hopper, blackwell, ampere = (list_tile(kernel, 64, 128, torch.bfloat16, f"sm_{n}", 1) for n in (90, 100, 80))
    assert hopper == blackwell != ampere


@needs_triton
def test_tf32_is_taken_where_its_tiles_fit() -> None:
    from compiled_triton import Variant
    from compiled_variants import VARIANTS

    masked = Variant(**VARIANTS["256 tf32, dropout"])
    wide, narrow = (Variant(head_dim=d, dtype=torch.float32, tf32=True) for d in (256, 128))
    for arch, fits in (("sm_80", True), ("sm_90", True), ("sm_100", True), ("sm_86", False), ("sm_120", False)):
        assert wide.call(arch).precision_of("keys") == ("tf32" if fits else "ieee")
        least = 32 if fits else 16  # a bool mask and dropout need 32, as TF32 takes them (docs/notes/triton.md)
        assert masked.call(arch).tile("keys").block_m == least
        assert wide.call(arch).precision_of("queries") == "tf32"
        assert narrow.call(arch).precision_of("keys") == ("bf16x3" if arch == "sm_90" else "tf32")
    assert narrow.call("gfx942").precision == "tf32"
    assert narrow.call("gfx950").precision == "ieee", "it has no TF32, and Triton refuses it"


@needs_triton
def test_products_of_pieces_are_taken_where_tensor_cores_pay() -> None:
    from compiled_triton import SequenceVariant, Variant

    def word(arch: str, **fields: Any) -> str:
        return Variant(**{"head_dim": 64, "dtype": torch.float32, **fields}).call(arch).precision

    for arch, most in (("sm_80", 64), ("sm_90", 128), ("sm_100", 64), ("sm_86", 0), ("sm_89", 0), ("sm_120", 0)):
        for dim in (16, 64, 72, 128, 136):
            assert word(arch, head_dim=dim) == ("fp16x3" if dim <= most else "ieee")
        assert word(arch, seqlen_q=16) == word(arch, dtype=torch.bfloat16) == "ieee"
    assert word("gfx942") == word("gfx950") == word("sm_90", head_dim=512) == "ieee"
    assert word("sm_90", seqlen_q=16, tf32=True) == word("sm_80", tf32=True) == "tf32"
    # `explain` has the word from the description: kernels of sequences have no tile of few rows.
    sequences = SequenceSpec("padded", 4, 1, 2048, 1, 2048)
    for layout, few in ((None, True), (sequences, False)):
        problem = explain_problem(
            q=(4, 1, 16, 64), seqlen_k=2048, sequences=layout, dtype="fp32", device="sm_90"
        ).problem
        kind = Variant if few else SequenceVariant
        call = kind(64, dtype=torch.float32, seqlen_q=1, **({} if few else {"layout": "padded"})).call("sm_90")
        assert problem_precision(problem) == call.precision == ("ieee" if few else "fp16x3")


@needs_triton
@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_forward_mode_makes_no_pieces(arch: str) -> None:
    from compiled_triton import tangent_jobs

    jobs = tangent_jobs(arch, torch.float32, 64)
    place = jobs[0].kernel.arg_names.index("PRECISION")
    assert len(jobs) == 3 and {job.constants[(place,)] for job in jobs} == {"ieee"}


@needs_triton
def test_pieces_are_stored_for_kernels_that_read_them() -> None:
    from compiled_triton import Variant, lse_of, recorder

    from flash_dmattn.triton_kernels.kernel_launch import Launch
    from flash_dmattn.triton_kernels.launch import backward_plan

    call = Variant(64, dtype=torch.float32, bias=("B", "Hq", "Lq", "1")).call("sm_90")
    x = Inputs(call.q, call.k, call.v, call.mask, call.bias)
    saved, dout = Saved(x, torch.empty_like(call.q), lse_of(call.q, call.bias)), torch.empty_like(call.q)
    for needs_grad, packs in ((NeedsGrad(bias=True), False), (NeedsGrad(v=True, bias=True), True)):
        jobs, record = recorder("sm_90")
        with mock.patch.object(Launch, "__call__", record):
            backward_plan(call, dout, None, needs_grad)(saved, dout, None)
        assert ("pack_pieces" in [job.name for job in jobs]) == packs


@needs_triton
def test_pieces_are_stored_where_they_are_read_in_many_tiles() -> None:
    from compiled_triton import SequenceVariant, Variant, jobs_of

    def packs(variant: Variant, arch: str = "sm_90") -> tuple[bool, bool]:
        """Return whether the forward pass stores pieces, and whether the backward pass does."""
        names = [job.name for job in jobs_of(variant, arch)]
        backward = names.index("delta")
        return "pack_pieces" in names[:backward], "pack_pieces" in names[backward:]

    sizes = {"num_heads": 8, "num_heads_k": 8, "seqlen_q": 512, "seqlen_k": 512}
    call = Variant(64, dtype=torch.float32, batch=1, **sizes)  # 2^21 pairs
    assert packs(call) == packs(replace(call, tf32=True)) == packs(replace(call, head_dim=128)) == (True, True)
    short = replace(call, seqlen_k=384, batch=2)
    assert packs(short) == (False, True) and packs(replace(short, head_dim=24)) == (True, True)
    for other in (replace(short, seqlen_k=383), replace(call, num_heads=4, num_heads_k=4), replace(call, head_dim=256)):
        assert packs(other) == (False, False)
    assert packs(call, "sm_86") == packs(SequenceVariant(64, dtype=torch.float32)) == (False, False)


def on(arch: str, dtype: str = "bf16") -> AttentionProblem:
    return explain_problem(q=(2, 512, 8, 64), device=arch, dtype=dtype, grad=True).problem


@pytest.mark.parametrize("row", GPUS, ids=ARCHS)
def test_what_is_said_of_a_gpu_is_what_the_rules_do(row: Gpu) -> None:
    triton = BACKENDS["triton"]
    for dtype, direction in product(("bf16", "fp16", "fp32"), ("forward", "backward")):
        assert triton.accepts(on(row.arch, dtype), direction)
    (measured,) = (rule for rule in triton.auto_rules if rule.code == "measured_gpu")
    assert all_hold((measured,), on(row.arch), "forward") == (row.standing == "measured")
    (line,) = (line for line in gpu_table().splitlines() if line.startswith(f"| {row.arch} |"))
    assert line.endswith(f"| {row.standing} |") and row.products in line


def test_a_gpu_that_the_rules_refuse_is_refused_in_the_table() -> None:
    assert "| sm_75 | T4, RTX 20 | 64 KB | refused | refused |" in gpu_table()
    assert not BACKENDS["triton"].accepts(on("sm_75"), "forward")
    only_hopper = tuple(rule for rule in BACKENDS["cuda"].rules if rule.code == "arch")
    with replaced("triton", rules=only_hopper):
        assert "| sm_80 | A100 | 163 KB | refused | refused |" in gpu_table()
