"""The training step of a decoder, without a GPU: right, wrong and broken systems, and what is made of their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_systems import CPU
from out_of_tree import USABLE, replaced
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import pages, results, runner, systems
from benchmarks.cases import Case, cases_of
from benchmarks.decoder import Decoder, without_attention
from benchmarks.inputs import layer_mask
from benchmarks.report import plots, tables, text
from benchmarks.suites import model
from benchmarks.suites.performance import Effort
from benchmarks.systems import Attend, Needs, System, flexattention, ours, sdpa
from benchmarks.truth import errors, plain_attention
from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.reference import formula

EFFORT = Effort(1.0, 2, 2)
CASE = cases_of("model")[0]


@pytest.fixture(scope="module")
def small() -> Case:
    return CASE.reduced(128)


@pytest.fixture(scope="module")
def decoder(small: Case) -> Decoder:
    return Decoder(small, CPU)


@pytest.fixture(scope="module")
def exact(small: Case, decoder: Decoder) -> results.Record:
    return model.truth(decoder, small, [layer_mask(small, bias) for bias in decoder.biases])


def system(name: str, change: Callable[..., Any], is_ours: bool = True) -> System:
    """The eager backend, its output changed."""

    def layers(case: Case, biases: Sequence[Tensor]) -> list[Attend]:
        return [
            lambda q, k, v, bias, right=right: change(right(q, k, v, bias))
            for right in ours.layers("eager", case, biases)
        ]

    needs = Needs(backends=("eager", "eager"))
    return System(name, ours.bind, lambda case, device: needs, lambda device: "", is_ours, layers=layers)


def fails(out: Tensor) -> Tensor:
    raise RuntimeError("no kernel for this call")


RIGHT, WRONG = system("right", lambda out: out), system("wrong", lambda out: 1.05 * out)
NAN, BROKEN = system("nan", lambda out: out * float("nan")), system("broken", fails)


def test_on_a_hopper_gpu_auto_takes_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)
    monkeypatch.setattr(ours, "device_arch", lambda device: "sm_90")
    with replaced("cuda", probe=lambda: USABLE), replaced("triton", probe=lambda: USABLE):
        chosen = CASE.explain("sm_90")
        assert (chosen.forward, chosen.backward) == ("cuda", "cuda")
        for name in ("cuda", "triton"):
            assert ours.needs(name, CASE, CPU) == Needs(backends=(name, name))
    assert CASE.what == "decoder of 12 layers, causal, mask (B,Hk,L,L): top 1024 per query, bias (B,Hk,1,L)"
    assert CASE.shape == "1,16,4,8192,128" and CASE.reduced(128).layers == 2


def test_the_decoder(small: Case, decoder: Decoder) -> None:
    biases = decoder.biases
    assert len(decoder.layers) == len(biases) == 2
    assert {str(x.dtype) for x in decoder.parameters()} == {"torch.bfloat16", "torch.float32"}
    assert all(x.shape == (1, 1, 1, 128) and x.dtype == torch.float32 for x in biases)
    assert not torch.equal(*biases)
    again = Decoder(small, CPU)
    assert all(torch.equal(x, y) for x, y in zip(decoder.parameters(), again.parameters(), strict=True))
    assert torch.equal(decoder.tokens, again.tokens)
    # The mask of a layer is the top-k of its bias.
    row = layer_mask(small, biases[1])[0, 0, -1]
    assert row.sum() == 128 // 6 and biases[1][0, 0, 0][row].min() > biases[1][0, 0, 0][~row].max()
    bare = model.Step.of(decoder, [without_attention] * 2)
    assert set(bare.first()) == {"loss", "dwq"} and len(bare.leaves) == len(list(decoder.parameters())) - 2


def test_plain_attention_is_the_formula() -> None:
    """In fp64 its gradients, head by head, are those of autograd through the formula."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 40, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16), (2, 2, 1, 40)]
    given = [torch.randn(x, generator=generator, dtype=torch.float64, requires_grad=True) for x in shapes]
    mask = torch.rand(2, 2, 40, 40, generator=generator) < 0.5
    out = plain_attention(mask, True)(*given)
    wanted = formula.attention(*given[:3], mask, given[3], is_causal=True)[0]
    torch.testing.assert_close(out, wanted)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    found, exact = (torch.autograd.grad(x, given, dout) for x in (out, wanted))
    torch.testing.assert_close(found, exact)


@pytest.fixture
def backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's own dense formula has a backward pass on CPU, once nothing refuses it."""
    import torch.nn.attention.flex_attention as torch_flex

    monkeypatch.setattr(torch_flex, "_validate_device", lambda query, key, value: None)


@pytest.mark.parametrize("name", ["eager", "sdpa-math", "flexattention"])
def test_layers(name: str, small: Case, decoder: Decoder, exact: results.Record, backward_on_cpu: None) -> None:
    layers = systems.by_name(name).layers
    assert layers is not None
    found = errors(model.Step.of(decoder, layers(small, decoder.biases)).first(), exact)
    assert list(found) == ["loss", "dwq", "dbias"] and found["loss"] < 1e-4
    assert max(found.values()) < 0.03


def test_ours_make_no_mask_of_all_pairs() -> None:
    class Largest(TorchDispatchMode):
        """The most bytes of any result of an operator; those without memory describe a call."""

        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            for x in found if isinstance(found, (tuple, list)) else [found]:
                if isinstance(x, Tensor) and x.device.type == "cpu":
                    self.most = max(self.most, x.untyped_storage().nbytes())
            return found

    case = CASE.reduced(1024)
    for name, is_dense in (("eager", False), ("sdpa-math", True)):
        layers = systems.by_name(name).layers
        assert layers is not None
        with Largest() as largest:
            layers(case, [torch.randn(case.shape_of("bkj"))])
        assert (largest.most >= case.seqlen**2 // 4) == is_dense, (name, largest.most)


def test_flexattention_compiles_one_graph(
    small: Case, decoder: Decoder, backward_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that differ by layer, and the trial before the first, share it."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    attention = flexattention.attention
    always = lambda shape, heads, group, compiles, *rest: attention(shape, heads, group, True, *rest)
    monkeypatch.setattr(flexattention, "attention", always)
    step = model.Step.of(decoder, flexattention.layers(small, decoder.biases))
    step()
    step()
    assert counter.frame_count == 1


def test_cudnn_gives_no_gradient_of_the_bias(small: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "sdpa_kernel", lambda kernel: nullcontext())
    monkeypatch.setattr(sdpa, "_serves_groups", lambda *call: False)
    layers = partial(sdpa.layers, SDPBackend.CUDNN_ATTENTION)
    cudnn = System("sdpa-cudnn", sdpa.bind, lambda case, device: Needs(), lambda device: "", layers=layers)
    row = model.row(small, [cudnn], CPU, effort=EFFORT)
    line = row["systems"][0]
    assert line["reason"] == "it gives no gradient of the bias" and line["step"]["ms"] > 0
    assert list(line["errors"]) == ["loss", "dwq"] and not line["wrong"]


@pytest.fixture(scope="module")
def mixed(small: Case) -> results.Record:
    """A row of systems of every kind."""
    no_layers = System("no", ours.bind, lambda case, device: Needs(), lambda device: "")
    flex = systems.by_name("flexattention")
    peer = system("peer", lambda out: 1.3 * out, is_ours=False)
    row = model.row(small, [RIGHT, WRONG, NAN, BROKEN, peer, no_layers, flex], CPU, effort=EFFORT)
    json.dumps(row, allow_nan=False)
    return row


def test_row(mixed: results.Record) -> None:
    right, wrong, nan, broken, peer, no_layers, flex = mixed["systems"]
    assert right["errors"].keys() == mixed["limits"].keys() == {"loss", "dwq", "dbias"} and not right["wrong"]
    assert right["step"]["ms"] > 0 and mixed["without_attention"]["ms"] > 0 and right["peak_mb"] > 0
    assert mixed["limits"]["loss"] == model.LOSS_LIMIT
    assert mixed["limits"]["dbias"] == pytest.approx(1.5 * mixed["plain"]["dbias"] + 1e-5)
    assert "dbias" in wrong["wrong"] and wrong["step"] and "dwq" in peer["wrong"]
    assert nan["wrong"] == ["loss", "dwq", "dbias"] and nan["errors"]["loss"] is None
    assert broken["reason"] == "RuntimeError: no kernel for this call" and broken["step"] is None
    assert no_layers["reason"] == "it is no part of models"
    assert flex["reason"] == "FlexAttention has no backward pass on CPU" and not flex["failed"]
    said = model.failures(mixed)
    assert [line.split(": ")[0] for line in said] == [f"{CASE.name}, {name}" for name in ("wrong", "nan", "broken")]
    assert said[1].startswith(f"{CASE.name}, nan: loss NaN above 2.0e-03, dwq NaN above ")


def test_a_gradient_of_the_bias_is_asked_of_ours(small: Case) -> None:
    def layers(case: Case, biases: Sequence[Tensor]) -> list[Attend]:
        attends = ours.layers("eager", case, biases)
        return [lambda q, k, v, bias, right=right: right(q, k, v, bias.detach()) for right in attends]

    for is_ours in (True, False):
        forgets = RIGHT._replace(name="forgets", layers=layers, ours=is_ours)
        row = model.row(small, [forgets], CPU, effort=EFFORT)
        assert row["systems"][0]["wrong"] == ["dbias"] * is_ours
        assert model.failures(row) == [f"{CASE.name}, forgets: dbias is missing"] * is_ours


def test_a_lost_device_ends_the_case(small: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "device_is_lost", lambda device: True)
    row = model.row(small, [BROKEN, RIGHT], CPU, effort=EFFORT)
    assert row["lost"] == "broken" and row["without_attention"] is None
    assert row["systems"][1]["reason"] == "not run: broken left the GPU unusable"


def test_which_systems() -> None:
    assert all(systems.by_name(name).layers is not None for name in systems.DEFAULT["model"])
    taken: list[str] = []

    def row(case: Case, some: list[System], device: torch.device, **rest: Any) -> results.Record:
        taken.extend(system.name for system in some)
        return {"name": case.name}

    some = [systems.by_name(name) for name in systems.DEFAULT["model"]]
    options = runner.Options(torch.device("meta"), Path(), {"rates": {"flop": 1.0, "bytes": 1.0, "source": "known"}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "row", row)
        assert runner.make_row("model", CASE, some, options) == {"name": CASE.name}
    assert taken == ["cuda", "triton", "sdpa-cudnn", "flexattention"]  # on a GPU not those that are known to be slow


@pytest.fixture
def content(mixed: results.Record) -> Iterator[results.Record]:
    machine = {"device": "CPU", "kind": "cpu", "torch": "2", "commit": "abc"}
    yield {"suite": "model", "machine": machine, "planned": [CASE.name], "rows": [mixed], "left_out": {}}


def test_pages(content: results.Record, mixed: results.Record) -> None:
    page = tables.page(content)
    assert "`auto` takes eager and eager." in page and "| no attention | " in page
    assert "| FAILED: RuntimeError: no kernel for this call |" in page and "| FAILED: loss, dwq, dbias |" in page
    right = next(line for line in page.splitlines() if line.startswith("| right |"))
    timed, bare = mixed["systems"][0]["step"]["ms"], mixed["without_attention"]["ms"]
    assert right.split(" | ")[1:5:2] == [text.ms(timed), text.ms(timed - bare)]
    lines = pages._model_lines(content)
    assert lines[0] == "### A training step" and right in lines
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))
    failed = {"name": "none", "shape": "1", "what": "w", "error": "no memory", "systems": []}
    assert "no memory" in tables.page({**content, "rows": [failed]})
    said = text.row("model", mixed)
    assert "without attention" in said and "FAILED: RuntimeError: no kernel for this call" in said


def test_plot(content: results.Record, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = plots.model(content["rows"], content)
    assert figure.axes[0].get_ylabel() == "training step, milliseconds" and "GiB" in figure.axes[1].get_ylabel()
    assert [x.get_text() for x in figure.axes[0].get_xticklabels()] == ["right", "wrong", "nan", "peer"]
    assert [path.name for path in plots.write(content, tmp_path)] == ["model.png", "model.svg"]
