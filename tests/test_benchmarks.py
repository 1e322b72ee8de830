"""The comparison with peers, as far as it runs without a GPU: pairs, floors, every system's results, pages, the CLI."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

import flash_dmattn
from benchmarks import compare, floors, peers, report, systems, timing, truth, workloads
from benchmarks.workloads import Inputs, Workload
from flash_dmattn.backends.protocol import Availability

CPU = torch.device("cpu")
# What a mask of 1024 keys or a band of 1024 is at 16k becomes at 256 keys.
SMALL_SIZES = {"keys": 40, "topk": 40, "blocks": 128, "band": 70}


def small(workload: Workload) -> Workload:
    """The same kind of call with 256 queries and keys, and at most 2 batch elements and 8 heads."""
    heads = min(workload.heads, 8)
    heads_k = max(1, heads * workload.heads_k // workload.heads)
    rule = workload.mask and workload.mask._replace(size=SMALL_SIZES[workload.mask.kind])
    batch = min(workload.batch, 2)
    return dataclasses.replace(
        workload, batch=batch, heads=heads, heads_k=heads_k, seqlen=256, head_dim=16, mask=rule, launch_bound=False
    )


SMALL = [small(w) for w in workloads.WORKLOADS if w.quick]


@pytest.fixture(params=SMALL, ids=lambda w: w.name)
def inputs(request: pytest.FixtureRequest) -> Inputs:
    return workloads.make_inputs(request.param, CPU, torch.float32)


def test_quick_has_every_kind() -> None:
    def kind(w: Workload) -> tuple[object, ...]:
        return w.mask and w.mask.kind, w.bias and w.bias != "row", w.mask is None and w.heads != w.heads_k

    assert {kind(w) for w in workloads.WORKLOADS} == {kind(w) for w in workloads.WORKLOADS if w.quick}
    assert len({w.name for w in workloads.WORKLOADS}) == len(workloads.WORKLOADS)


def test_counts(inputs: Inputs) -> None:
    q, k, v, _, mask, bias, is_causal = inputs
    probs = flash_dmattn.attention(q, k, v, mask, bias, is_causal=is_causal, return_probs=True, backend="reference")[1]
    seen = probs > 0
    counts = workloads.count(inputs)
    assert counts.pairs == int(seen.sum())
    assert counts.density == pytest.approx(seen.double().mean().item())
    assert counts.empty_rows == int((~seen.any(-1)).sum())
    tiles = seen.unflatten(3, (2, 128)).unflatten(2, (2, 128)).any(5).any(3)
    assert counts.active_tiles == pytest.approx(tiles.double().mean().item())


def test_masks_are_what_their_names_say() -> None:
    made = {w.mask.kind: workloads.make_inputs(w, CPU, torch.float32).mask for w in SMALL if w.mask is not None}
    rows = torch.arange(256)
    assert made["keys"].shape[2] == 1 and made["keys"].sum(-1).eq(40).all()
    assert made["topk"].sum(-1).eq((rows + 1).clamp(max=40)).all()
    assert torch.equal(made["band"][0, 0], (rows[:, None] - rows).abs() <= 70)
    blocks = made["blocks"].unflatten(3, (2, 128)).unflatten(2, (2, 128))
    assert torch.equal(blocks.any(5).any(3), blocks.all(5).all(3))
    assert blocks.any(5).any(3).diagonal(dim1=-2, dim2=-1).all()


@pytest.mark.parametrize(
    ("name", "pairs", "forward", "backward"),
    [
        # FLOP bound: 4 and 10 x 64 x 4 x 32 x 4096^2 / 790e12.
        ("dense-d64", 4 * 32 * 4096**2, 0.6959, 1.7396),
        # Memory bound: bias (4,16,2048,2048) of 2 bytes read, and in the backward written too, with q k v out dout lse.
        ("bias-bhll-d64", 4 * 16 * 2048**2, 0.1406, 0.2814),
        # FLOP bound by a little: the bool mask, half of which causality leaves, takes 0.125 ms, q k v out dout 0.04.
        ("topk-16k", 16 * (1024 * 1025 // 2 + 15360 * 1024), 0.1685, 0.4214),
    ],
)
def test_floors(name: str, pairs: int, forward: float, backward: float) -> None:
    w = next(w for w in workloads.WORKLOADS if w.name == name)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k = empty(w.batch, w.seqlen, w.heads, w.head_dim), empty(w.batch, w.seqlen, w.heads_k, w.head_dim)
    mask = empty(1, w.heads_k, w.seqlen, w.seqlen, dtype=torch.bool) if w.mask else None
    bias = {"bhll": empty(w.batch, w.heads, w.seqlen, w.seqlen), "row": empty(1, w.heads_k, 1, w.seqlen)}.get(w.bias)
    call = Inputs(q, k, k, q, mask, bias, w.is_causal)
    found = floors.floors(call, pairs, reads_mask=True)
    assert [part.ms for part in found] == pytest.approx([forward, backward], rel=2e-3)
    if mask is not None:
        prepared, backward_pass = floors.floors(call, pairs, reads_mask=False)
        assert found[0].moved - prepared.moved == mask.numel() * (w.seqlen + 1) // (2 * w.seqlen)
        assert backward_pass == found[1]


def results_agree(call: timing.Call, inputs: Inputs) -> None:
    exact = truth.truth(inputs)
    found = truth.errors(timing.run_once(call, inputs.leaves, inputs.dout), exact)
    assert list(found) == ["out", *inputs.leaves]
    assert all(error < 1e-5 for error in found.values()), found


def test_truth_is_the_formula(inputs: Inputs) -> None:
    results_agree(systems.ours("reference", inputs), inputs)


@pytest.mark.parametrize("grouped_kernel", [False, True])
def test_sdpa(inputs: Inputs, grouped_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "_serves_groups", lambda *call: grouped_kernel)
    results_agree(systems.sdpa(SDPBackend.MATH, inputs), inputs)


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention's own dense formula, which has a backward pass on CPU."""
    import torch._functorch.config
    import torch.nn.attention.flex_attention as torch_flex

    monkeypatch.setattr(torch_flex, "_validate_device", lambda query, key, value: None)
    monkeypatch.setattr(systems, "flex_compiler", "eager")
    before = torch._functorch.config.donated_buffer
    yield
    torch._functorch.config.donated_buffer = before


def test_flex(inputs: Inputs, eager_flex: None) -> None:
    results_agree(systems.flex(inputs), inputs)


def test_flex_block_mask(inputs: Inputs) -> None:
    """Its lists say what create_block_mask says of the dense mask; the formula above does not walk them."""
    from torch.nn.attention.flex_attention import create_block_mask

    allowed, made = inputs.allowed(), systems.flex_block_mask(inputs)
    if allowed is None:
        assert made is None
        return
    batch, heads = made.shape[:2]
    group = heads // allowed.shape[1]
    wanted = create_block_mask(lambda b, h, i, j: allowed[b, h // group, i, j], batch, heads, 256, 256, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(made, name), getattr(wanted, name)), name
    assert torch.equal(made.to_dense(), wanted.to_dense())


def test_flex_with_too_many_stages(eager_flex: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    build = systems._flex

    def scarce(inputs: Inputs, options: dict[str, int]) -> timing.Call:
        tried.append(options)
        call = build(inputs, {})

        def refuses() -> torch.Tensor:
            raise RuntimeError("InductorError: out of resource: shared memory, Required: 278528")

        return call if options == {"num_stages": 2} else refuses

    monkeypatch.setattr(systems, "_flex", scarce)
    inputs = workloads.make_inputs(SMALL[0], CPU, torch.float32)
    assert systems.flex(inputs)().shape == inputs.q.shape
    assert tried == [{}, {"num_stages": 2}]


def test_ours(inputs: Inputs) -> None:
    results_agree(systems.ours("eager", inputs), inputs)
    if inputs.mask is not None:
        results_agree(systems.ours_prepared("eager", inputs), inputs)


def test_which_systems() -> None:
    by_name = {w.name: [s.name for s in systems.systems(w, ["triton"])] for w in workloads.WORKLOADS}
    assert by_name["dense-d64"] == ["triton", "cuDNN", "mem-efficient", "flash", "flex"]
    assert by_name["band"] == ["triton", "triton, prepared", "cuDNN", "mem-efficient", "flex"]
    assert by_name["bias-1hll-d64"] == ["triton", "cuDNN", "mem-efficient", "flex"]


def test_a_backend_has_a_column_where_its_rules_take_the_call() -> None:
    both = {w.name: [s.name for s in systems.systems(w, ["cuda", "triton"]) if s.ours] for w in workloads.WORKLOADS}
    assert both["dense-d64"] == ["cuda", "triton"]
    assert both["topk-8k"] == ["cuda", "cuda, prepared", "triton", "triton, prepared"]
    assert both["keys-8k"] == ["triton", "triton, prepared"]  # cuda leaves masks of keys to triton


def test_the_column_of_cuda_is_a_pair(inputs: Inputs) -> None:
    for call in (
        systems.ours("cuda", inputs),
        *([systems.ours_prepared("cuda", inputs)] if inputs.mask is not None else []),
    ):
        assert call.keywords["backend"] == ("cuda", "triton")


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.name)
def test_problem_describes_the_inputs(workload: Workload) -> None:
    made, described = workloads.make_inputs(workload, CPU), workload.problem()
    for x, spec in ((made.mask, described.mask), (made.bias, described.bias)):
        assert (None if x is None else tuple(x.shape)) == (None if spec is None else tuple(spec.shape))
    assert (described.q_strides, described.k_strides) == (made.q.stride(), made.k.stride())
    assert described.dtype == made.q.dtype and described.is_causal == made.is_causal


def test_default_backends_are_those_that_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"cuda": Availability(False, "it is not built"), "triton": Availability(True)}
    monkeypatch.setattr(peers, "probe", found.get)
    assert peers.usable() == ["triton"]
    assert capsys.readouterr().out == "cuda is left out: it is not built\n"


def test_the_rule_is_stricter_with_ours() -> None:
    limits = {"out": 1e-3, "dq": 4e-3}
    assert truth.wrong({"out": 2e-3, "dq": 1e-3}, limits, ours=True) == ["out"]
    assert truth.wrong({"out": 2e-2, "dq": 4e-2}, limits, ours=False) == ["dq"]
    assert truth.wrong({"out": float("nan"), "dq": 0.0}, limits, ours=False) == ["out"]


def test_summary_of_samples() -> None:
    assert timing.Samples([5.0, 1.0, 3.0, 2.0, 4.0, 100.0], "events").summary() == (3.5, 2.0, 5.0)


def test_reason() -> None:
    warned = [
        "Flash attention kernel not used because: (Triggered internally at sdp.cpp:1)",
        "Flash attention has been runtime disabled. (Triggered internally at sdp.cpp:2)",
        "cuDNN attention does not support a mask that requires grad. (Triggered internally at sdp.cpp:3)",
        "something of another module",
    ]
    said = compare.reason(RuntimeError("No available kernel.\n  Aborting."), warned)
    assert (
        said
        == "RuntimeError: No available kernel. Aborting. | cuDNN attention does not support a mask that requires grad."
    )


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed times in place of those of a GPU, so that all round them runs."""
    taken = (timing.Samples([0.5, 0.4, 0.6], "graph"), timing.Samples([1.0], "events"))
    monkeypatch.setattr(timing, "measure", lambda *call, **options: taken)
    monkeypatch.setattr(timing, "peak_mb", lambda *call: 12.0)


def spoiled(inputs: Inputs) -> timing.Call:
    return lambda: systems.ours("eager", inputs)() * 1.05


def broken(inputs: Inputs) -> timing.Call:
    raise RuntimeError("no kernel for this call")


def compared(monkeypatch: pytest.MonkeyPatch, *chosen: systems.System) -> report.Record:
    monkeypatch.setattr(compare, "systems", lambda workload, backends: list(chosen))
    record = compare.compare(next(w for w in SMALL if w.name == "topk-8k"), ["eager"], 10.0, CPU)
    machine = {"device": "a device", "torch": "2"}
    return {"machine": machine, "backends": ["eager"], "workloads": [record], "left_out": ["band"]}


def test_compare(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    result = compared(
        monkeypatch,
        systems.System("eager", partial(systems.ours, "eager"), ours=True),
        systems.System("math", partial(systems.sdpa, SDPBackend.MATH)),
        systems.System("spoiled peer", spoiled),
        systems.System("broken peer", broken),
    )
    assert report.failures(result) == []
    result = json.loads(json.dumps(result, allow_nan=False))
    record = result["workloads"][0]
    eager, math, spoiled_peer, broken_peer = record["lines"]
    assert eager["wrong"] == math["wrong"] == [] and spoiled_peer["wrong"] == ["out", "dq", "dk", "dv", "dbias"]
    assert broken_peer["reason"] == "RuntimeError: no kernel for this call" and broken_peer["forward"] is None
    # 4 D FLOP a pair, in half a millisecond.
    pairs = record["counts"]["pairs"]
    assert eager["forward"]["ms"] == 0.5 and eager["forward"]["tflops"] == pytest.approx(4 * 16 * pairs / 0.5e9)
    assert eager["forward"]["of_floor"] == pytest.approx(record["floor_ms"]["forward"] / 0.5)

    spoiled_peer["forward"]["ms"] = 0.1
    assert report.fastest_peer(record, "forward") == 0.5
    math["backward"]["ms"] = 1.5
    assert report.against_peers(record) == "eager 1.00 / 1.50"  # the spoiled one is faster, but wrong
    page = report.markdown(result)
    assert "0.500 / 1.000 | 0.500 / 1.500 | 0.100 / 1.000* | - |" in page
    assert "RuntimeError: no kernel for this call" in page and "Left out, the time being spent: band." in page
    assert all(row.count("|") == 12 for row in page.splitlines() if row.startswith("| eager |"))


def test_pages_of_a_saved_run(without_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = compared(
        monkeypatch,
        systems.System("eager", partial(systems.ours, "eager"), ours=True),
        systems.System("spoiled peer", spoiled),
        systems.System("broken peer", broken),
    )
    saved = tmp_path / "peers.json"
    saved.write_text(json.dumps(result))
    assert report.main([str(saved)]) == 0
    assert (tmp_path / "peers.md").read_text() == report.markdown(result)
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    assert report.main([]) == 2


def test_ours_must_be_right(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    result = compared(
        monkeypatch, systems.System("ours", spoiled, ours=True), systems.System("ours, prepared", broken, ours=True)
    )
    inaccurate, failed = report.failures(result)
    assert inaccurate.startswith("topk-8k, ours: errors out 5.0e-02") and "the accuracy rule permits out" in inaccurate
    assert failed == "topk-8k, ours, prepared: RuntimeError: no kernel for this call"


def test_nan_is_wrong_and_is_valid_json(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def nan(inputs: Inputs) -> timing.Call:
        return lambda: systems.ours("eager", inputs)() * float("nan")

    result = compared(monkeypatch, systems.System("ours", nan, ours=True))
    json.dumps(result, allow_nan=False)
    assert "out NaN" in report.failures(result)[0]


def test_cli_without_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peers.main([]) == 2
    said = capsys.readouterr().err
    assert said == "benchmarks.peers times GPU kernels, and torch finds no GPU on this machine.\n"
    assert peers.main(["--list", "--only", "topk", "band"]) == 0
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()] == ["topk-8k", "topk-16k", "band"]
    with pytest.raises(SystemExit):
        peers.main(["--only", "nothing", "--list"])
    assert "no workload has a name with nothing in it" in capsys.readouterr().err


def test_budget(without_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seconds = iter([0.0, 1.0, 30.0, 61.0, 62.0, 63.0])
    monkeypatch.setattr(peers.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(peers, "machine", lambda device, commit: {"device": "a device", "commit": commit})
    line = {"ours": True, "reason": "", "wrong": []}
    monkeypatch.setattr(peers, "compare", lambda w, *rest: {"name": w.name, "lines": [line]})
    monkeypatch.setattr(report, "write", lambda result, out: None)
    assert peers.run(SMALL[:3], ["triton"], 10.0, 60.0, tmp_path, "abc") == 0
    written = json.loads((tmp_path / "peers.json").read_text())
    assert written["left_out"] == [w.name for w in SMALL[1:3]] and written["machine"]["commit"] == "abc"
