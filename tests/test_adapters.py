"""`attend`, `Patch`, and each adapter against the code that it replaces: outputs and all gradients.

An adapter's test skips where its package is missing; `flash_dmattn/integrations/projects.py` has the versions.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_dmattn
from flash_dmattn.biases import Projected
from flash_dmattn.integrations import Patch, attend, deberta, heads_first
from flash_dmattn.integrations.patch import _get, digest
from flash_dmattn.integrations.projects import PROJECTS, Project

os.environ.setdefault("LAYERNORM_TYPE", "torch")  # Protenix compiles a kernel of its own otherwise

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The mask, the bias and the options of each call of `attention` by `attend`, or by the adapter of DeBERTa."""
    calls: list[dict[str, Any]] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Any, **more: Any) -> Any:
        calls.append({"mask": mask, "bias": bias, **more})
        return flash_dmattn.attention(q, k, v, mask, bias, **more)

    for module in (heads_first, deberta):
        monkeypatch.setattr(module, "attention", watched)
    return calls


def results(function: Callable[..., Tensor], inputs: list[Tensor], module: nn.Module | None = None) -> list[Tensor]:
    """The output, and the gradients of the inputs and of the module's parameters."""
    parameters = [] if module is None else list(module.parameters())
    for p in parameters:
        p.grad = None
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype))
    return [out.detach(), *[x.grad.clone() for x in [*inputs, *parameters] if x.grad is not None]]


def worst(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, over the largest entry; gradients that are 0 in exact arithmetic have a scale, too."""
    largest = max(float(x.abs().max()) for x in theirs)
    assert len(ours) == len(theirs) and all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(ours, theirs))
    return max(float((x - y).abs().max()) / max(float(y.abs().max()), 1e-3 * largest) for x, y in zip(ours, theirs))


def compare(
    name: str, function: Callable[..., Tensor], inputs: list[Tensor], module: nn.Module | None = None, **options: Any
) -> float:
    adapter = importlib.import_module(f"flash_dmattn.integrations.{name}")
    theirs = results(function, inputs, module)
    with adapter.enable(**options):
        ours = results(function, inputs, module)
    again = results(function, inputs, module)
    assert all(torch.equal(x, y) for x, y in zip(again, theirs)), "the originals are back"
    return worst(ours, theirs)


def filled(module: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=0.2)
    return module.to(dtype)


def tokens_and_pairs(dtype: torch.dtype, n: int = 24) -> tuple[Tensor, Tensor]:
    """Tokens, some of them padding, and their pairs; each row sees a real key."""
    torch.manual_seed(1)
    tokens = (torch.rand(2, n) < 0.8).to(dtype)
    tokens[:, 0] = 1
    return tokens, tokens[:, None, :].expand(-1, n, -1).contiguous()


def test_a_list_of_biases_is_not_added_up(arrived: list[dict[str, Any]]) -> None:
    """Openfold's: the mask has no heads and the pairs no rows of the triangle; their sum has both."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 4, 6, 8, dtype=torch.float64).unbind(0)
    pairs = torch.randn(2, 1, 4, 6, 6, dtype=torch.float64)
    hidden = torch.rand(2, 5, 1, 1, 6) < 0.3
    hidden[..., 0] = False
    mask = hidden.double() * -1e9

    def ours(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> Tensor:
        return attend(q, k, v, [pairs], masks=[mask], scale=0.3)

    def theirs(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> Tensor:
        return (0.3 * q @ k.mT + mask + pairs).softmax(-1) @ v

    assert worst(results(ours, [q, k, v, pairs]), results(theirs, [q, k, v, pairs])) < 1e-12
    call = arrived[0]
    assert call["mask"] is not None and call["mask"].shape == mask.shape and torch.equal(call["mask"], ~hidden)
    assert call["bias"] is not None and call["bias"].shape == pairs.shape


def test_attend_combines_what_it_is_told(arrived: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 6, 8).unbind(0)  # without a batch
    lower = torch.ones(6, 6, dtype=torch.bool).tril()
    padding = torch.tensor([0.0, 0.0, -1e9, 0.0, 0.0, 0.0])
    mixed = torch.randn(4, 6, 6).masked_fill(~lower, -1e9)
    learned = torch.randn(6, requires_grad=True)
    out = attend(q, k, v, mixed, masks=[lower, padding, learned])
    wanted = F.scaled_dot_product_attention(q, k, v, (mixed + padding + learned).masked_fill(~lower, -torch.inf))
    assert out.shape == wanted.shape and torch.allclose(out, wanted, atol=1e-6)
    out = attend(q, k, v, masks=mixed)
    assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v, mixed), atol=1e-6)
    mask, bias = arrived[-1]["mask"], arrived[-1]["bias"]
    assert mask is not None and bias is not None and torch.equal(mask, lower.expand(4, 6, 6)) and bias.abs().max() < 9
    attend(q, k, v, masks=[torch.randn(6, 6)])
    assert arrived[-1]["mask"] is None  # nothing is hidden


def test_attend_casts() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
    bias = torch.randn(2, 5, 5)
    low = [x.bfloat16() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*low, [bias], dtype=torch.float32)  # autocast is off inside
    wanted = F.scaled_dot_product_attention(*(x.float() for x in low), bias)
    assert out.dtype == torch.bfloat16 and torch.allclose(out, wanted.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(q, k, v, [bias]).dtype == torch.bfloat16


@pytest.mark.parametrize("empty", ["softmax", "zero"])
def test_rows_without_a_key_are_what_empty_says(empty: Any) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64).unbind(0)
    mask = torch.zeros(5, 5)
    mask[2] = -1e9
    out = attend(q, k, v, masks=[mask], empty=empty)
    wanted = F.scaled_dot_product_attention(q, k, v)
    if empty == "zero":
        wanted[:, :, 2] = 0
    assert torch.allclose(out, wanted)


SOURCE = """
def plain(x):
    return x + 1

class Base:
    def inherited(self):
        return "theirs"

class Layer(Base):
    def forward(self, x):
        return plain(x)

table = {"plain": plain}
"""


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package to patch, and its row."""
    (tmp_path / "replaced_in_this_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("replaced_in_this_test")
    digests = {
        f"{module.__name__}:{name}": digest(_get(f"{module.__name__}:{name}")) for name in ("plain", "Layer.forward")
    }
    monkeypatch.setitem(PROJECTS, "test", Project("a-package", module.__name__, "1.0", digests, ()))
    yield module
    del sys.modules[module.__name__]


def patch_of(module: ModuleType) -> Patch:
    name = module.__name__

    def make(originals: dict[str, Any], empty: str) -> dict[str, Any]:
        def plain(x: float) -> float:
            result: float = originals[f"{name}:plain"](x) * 10
            return result

        return {
            f"{name}:plain": plain,
            f"{name}:Layer.forward": lambda self, x: f"ours, {empty}",
            f"{name}:Layer.inherited": lambda self: "ours",
            f"{name}:table[plain]": plain,
            f"{name}:table[new]": "ours",
        }

    return Patch("test", make)


def test_a_patch_restores_exactly(upstream: ModuleType) -> None:
    before = dict(vars(upstream)), dict(vars(upstream.Layer)), dict(upstream.table)
    patch = patch_of(upstream)
    for _ in range(2):
        with patch.enable(empty="zero"):
            assert upstream.plain(1) == upstream.table["plain"](1) == 20 and upstream.table["new"] == "ours"
            assert upstream.Layer().forward(1) == "ours, zero" and upstream.Layer().inherited() == "ours"
            assert upstream.Base().inherited() == "theirs"
        assert (dict(vars(upstream)), dict(vars(upstream.Layer)), dict(upstream.table)) == before
        assert upstream.Layer().inherited() == "theirs" and upstream.plain(1) == 2


def test_enabling_twice_changes_nothing(upstream: ModuleType) -> None:
    patch = patch_of(upstream)
    patch.enable()
    first = upstream.plain
    patch.enable()
    with patch.enable():
        assert upstream.plain is first
    assert upstream.plain(1) == 20  # enabled before the `with`, and after it
    with pytest.raises(RuntimeError, match="empty is 'zero', and the adapter is enabled with 'softmax'"):
        patch.enable(empty="zero")
    patch.disable()
    patch.disable()
    assert upstream.plain(1) == 2
    with patch.enable(), patch.enable():
        assert upstream.plain(1) == 20
    assert upstream.plain(1) == 2
    with pytest.raises(KeyError), patch.enable():
        raise KeyError
    assert upstream.plain(1) == 2


def test_threads_share_a_patch(upstream: ModuleType) -> None:
    """It holds until the last thread has left, and is then gone."""
    patch, wrong, start = patch_of(upstream), [], threading.Barrier(4)

    def run() -> None:
        start.wait()
        for _ in range(200):
            with patch.enable():
                if upstream.plain(1) != 20:
                    wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and upstream.plain(1) == 2


def test_a_patch_refuses_what_it_does_not_know(upstream: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = PROJECTS["test"]
    name = f"{upstream.__name__}:plain"
    monkeypatch.setitem(PROJECTS, "test", row._replace(digests={**row.digests, name: "other"}))
    patch = patch_of(upstream)
    with pytest.raises(
        RuntimeError, match=rf"{name} is not the source of a-package 1.0, which this adapter was tested"
    ):
        patch.enable()
    assert upstream.plain(1) == 2
    with patch.enable(unchecked=True):
        assert upstream.plain(1) == 20
    upstream.plain = partial(len)  # has no source
    with pytest.raises(RuntimeError, match=f"{name} is not the source"):
        patch.enable()
    with pytest.raises(ValueError, match="empty is 'mean'; it needs to be 'softmax' or 'zero'"):
        patch.enable(empty="mean")  # type: ignore[arg-type]
    monkeypatch.setitem(PROJECTS, "test", row._replace(module="absent_in_this_test"))
    with pytest.raises(ModuleNotFoundError, match=r"the adapter needs a-package.*pip install a-package"):
        patch_of(upstream).enable()


def test_a_patch_of_somebody_else_is_not_overwritten(upstream: ModuleType) -> None:
    patch = patch_of(upstream)
    patch.enable()
    ours, upstream.plain = upstream.plain, len
    with pytest.raises(RuntimeError, match=r":plain was replaced by somebody else meanwhile"):
        patch.disable()
    upstream.plain = ours
    patch.disable()
    assert upstream.plain(1) == 2


def is_another_transformers() -> bool:
    """Whether the adapters of transformers have to be enabled unchecked."""
    version: str = importlib.import_module("transformers").__version__
    return version != PROJECTS["openpi"].version


def installed(project: str) -> None:
    """Skip without the package, with a reason."""
    for name in PROJECTS[project].digests:
        try:
            importlib.import_module(name.partition(":")[0])
        except ImportError as error:
            pytest.skip(f"{PROJECTS[project].package} is needed, and there is no {error.name or error}")


@pytest.mark.parametrize("project", PROJECTS)
def test_sources_are_known(project: str) -> None:
    """The functions that adapters replace are the ones that the tests of this file ran with."""
    installed(project)
    if PROJECTS[project].package == "transformers" and is_another_transformers():
        pytest.skip("transformers is another version")
    for name, known in PROJECTS[project].digests.items():
        assert digest(_get(name)) == known, name


@DTYPES
def test_openfold(dtype: torch.dtype, arrived: list[dict[str, Any]]) -> None:
    installed("openfold")
    from openfold3.core.model.layers.attention_pair_bias import DiffusionAttentionPairBias
    from openfold3.core.model.layers.triangular_attention import TriangleAttention

    bound = 1e-12 if dtype == torch.float64 else 1e-5
    tokens, mask = tokens_and_pairs(dtype)
    layer = filled(TriangleAttention(32, 16, 4), dtype)
    x = torch.randn(2, 24, 24, 32, dtype=dtype)
    assert compare("openfold", lambda x: layer(x, mask=mask), [x], layer) < bound
    assert arrived[-1]["mask"] is not None and arrived[-1]["mask"].shape[-3:-1] == (1, 1)
    sizes = {"c_q": 48, "c_k": 48, "c_v": 48, "c_s": 20, "c_z": 16, "c_hidden": 12, "no_heads": 4}
    samples = filled(DiffusionAttentionPairBias(**sizes), dtype)
    a, z, s = (torch.randn(2, *shape, dtype=dtype) for shape in ((3, 24, 48), (1, 24, 24, 16), (3, 24, 20)))
    call = lambda a, z, s: samples(a, z, s, mask=tokens[:, None])
    assert compare("openfold", call, [a, z, s], samples) < bound


@DTYPES
def test_boltz(dtype: torch.dtype, arrived: list[dict[str, Any]]) -> None:
    installed("boltz")
    from boltz.model.layers import attention, attentionv2
    from boltz.model.layers.triangular_attention.attention import TriangleAttention

    tokens, mask = tokens_and_pairs(dtype)
    layer = filled(TriangleAttention(32, 16, 4), dtype)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    assert compare("boltz", lambda x: layer(x, mask), [torch.randn(2, 24, 24, 32, dtype=dtype)], layer) < bound
    assert arrived[-1]["mask"] is not None and arrived[-1]["mask"].shape[-3:-1] == (1, 1)
    s, z = torch.randn(6, 24, 48, dtype=dtype), torch.randn(2, 24, 24, 16, dtype=dtype)  # three samples of each
    many = tokens.repeat_interleave(3, 0)
    two = filled(attentionv2.AttentionPairBias(48, 16, 4), dtype)  # fp32 inside, whatever the input
    call = lambda s, z: two(s, z, many, s, multiplicity=3)
    assert compare("boltz", call, [s, z], two) < 2e-4
    assert arrived[-1]["bias"] is not None and arrived[-1]["bias"].shape[:2] == (2, 1)  # one copy for three samples
    one = filled(attention.AttentionPairBias(48, 16, 4), dtype)
    assert compare("boltz", lambda s, z: one(s, z, many, multiplicity=3), [s, z], one) < 2e-4
    cache: dict[str, Tensor] = {}
    adapter = importlib.import_module("flash_dmattn.integrations.boltz")
    with torch.no_grad():
        wanted = one(s, z, many, multiplicity=3)
        with adapter.enable():
            for _ in range(2):
                assert torch.allclose(one(s, z, many, multiplicity=3, model_cache=cache), wanted, atol=1e-4)
    assert list(cache) == ["z"]


@DTYPES
def test_protenix_triangles(dtype: torch.dtype, arrived: list[dict[str, Any]]) -> None:
    installed("protenix")
    from protenix.model.triangular.triangular import TriangleAttention

    _, mask = tokens_and_pairs(dtype)
    layer = filled(TriangleAttention(32, 16, 4), dtype)
    x, bound = torch.randn(2, 24, 24, 32, dtype=dtype), 1e-12 if dtype == torch.float64 else 1e-5
    for chunk in (None, 16):
        assert compare("protenix", lambda x, chunk=chunk: layer(x, mask, chunk_size=chunk), [x], layer) < bound
        assert arrived[-1]["mask"] is not None and arrived[-1]["mask"].shape[-3:-1] == (1, 1)


def test_protenix(arrived: list[dict[str, Any]]) -> None:
    installed("protenix")
    from protenix.model.modules import primitives

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 4, 40, 24).unbind(0)
    for fused in (True, False):
        call: Any = lambda q, k, v, bias, fused=fused: primitives._attention(q, k, v, bias, fused)
        assert compare("protenix", call, [q, k, v, torch.randn(2, 1, 4, 40, 40)]) < 1e-5
    assert len(arrived) == 2
    q, k, v = torch.randn(3, 2, 3, 4, 150, 32).unbind(0)  # atoms: 5 trunks of 32 queries and 128 keys
    call = lambda q, k, v, bias: primitives._local_attention(q, k, v, 32, 128, trunked_attn_bias=bias)
    assert compare("protenix", call, [q, k, v, torch.randn(2, 1, 4, 5, 32, 128)]) < 1e-5
    assert len(arrived) == 3


@DTYPES
@pytest.mark.parametrize("sdpa", [False, True])
def test_nemo(dtype: torch.dtype, sdpa: bool, arrived: list[dict[str, Any]]) -> None:
    installed("nemo")
    from nemo.collections.asr.parts.submodules import multi_head_attention as theirs

    layer = filled(theirs.RelPositionMultiHeadAttention(4, 32, 0.0, None, None, use_pytorch_sdpa=sdpa), dtype)
    positions = theirs.RelPositionalEncoding(32, 0.0, max_len=64)
    positions.extend_pe(64, "cpu", dtype)
    x = torch.randn(2, 30, 32, dtype=dtype)
    _, table = positions(x)
    real = torch.arange(30) < torch.tensor([[30], [19]])
    hidden = ~(real[:, :, None] & real[:, None, :])  # rows of padding are empty, and 0 in both
    bound = 1e-12 if dtype == torch.float64 else 2e-4
    assert compare("nemo", lambda x: layer(x, x, x, hidden, table), [x], layer) < bound
    assert len(arrived) == 1


@pytest.mark.parametrize("form", ["bool (B, keys)", "bool (B, 1, 1, keys)", "float", "-1e9"])
def test_diffusers(form: str, arrived: list[dict[str, Any]]) -> None:
    installed("diffusers")
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 20, 4, 16).unbind(0)
    real = torch.arange(20) < torch.tensor([[20], [13]])
    mask = {
        "bool (B, keys)": real,
        "bool (B, 1, 1, keys)": real[:, None, None],
        "float": torch.randn(2, 1, 20, 20),
        "-1e9": (~real)[:, None, None] * -1e9,
    }[form]
    call = lambda q, k, v: dispatch_attention_fn(q, k, v, attn_mask=mask)
    assert compare("diffusers", call, [q, k, v]) < 1e-5
    assert len(arrived) == 1 and (arrived[0]["bias"] is None) == (form != "float")
    assert compare("diffusers", lambda q, k, v: dispatch_attention_fn(q, k, v), [q, k, v]) == 0  # theirs
    assert len(arrived) == 1


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_openpi(dtype: torch.dtype, bound: float, arrived: list[dict[str, Any]]) -> None:
    installed("openpi")
    from transformers.models.gemma import modeling_gemma

    torch.manual_seed(0)
    module = SimpleNamespace(num_key_value_groups=8, training=True)
    block = torch.cat([torch.zeros(60), torch.ones(1), torch.full((29,), 2.0)])
    seen = (block[None, :] <= block[:, None]).expand(2, 1, 90, 90)
    mask = torch.where(seen, 0.0, -2.3819763e38)
    q, k, v = (torch.randn(2, heads, 90, 256, dtype=dtype) for heads in (8, 1, 1))
    call = lambda q, k, v: modeling_gemma.eager_attention_forward(module, q, k, v, mask[..., :90], 1 / 16)[0]
    for _ in range(2):
        assert compare("openpi", call, [q, k, v], unchecked=is_another_transformers()) < bound
    masks = [call["mask"] for call in arrived]
    assert len(masks) == 2 and masks[0] is not None and masks[0] is masks[1]  # split once for all layers
    assert arrived[0]["bias"] is None


def deberta_config(**changed: Any) -> Any:
    """A tiny DeBERTa v3, whose positions end within the texts of these tests."""
    transformers = importlib.import_module("transformers")
    sizes = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=32, vocab_size=50)
    positions = dict(relative_attention=True, position_buckets=8, max_relative_positions=20, share_att_key=True)
    form = dict(pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", position_biased_input=False)
    drops = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.DebertaV2Config(**(sizes | positions | form | drops | changed))


def padded(*lengths: int) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


DEBERTA_FORMS: dict[str, dict[str, Any]] = {
    "both": {},
    "both, tables of their own": dict(share_att_key=False),
    "c2p": dict(pos_att_type=["c2p"]),
    "p2c": dict(pos_att_type=["p2c"], share_att_key=False),
    "no product": dict(pos_att_type=[]),
    "no positions": dict(relative_attention=False),
    "no logarithms": dict(position_buckets=-1, max_relative_positions=9),
    "larger heads": dict(attention_head_size=20),
}


@DTYPES
@pytest.mark.parametrize("form", DEBERTA_FORMS)
def test_deberta(dtype: torch.dtype, form: str, arrived: list[dict[str, Any]]) -> None:
    installed("deberta")
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

    config = deberta_config(**DEBERTA_FORMS[form])
    layer = filled(DisentangledSelfAttention(config), dtype)
    bound = 1e-12 if dtype == torch.float64 else 2e-4  # the gradient of a bias of keys is 0 in exact arithmetic
    options = {"unchecked": is_another_transformers()}
    table = torch.randn(2 * max(config.position_buckets, 9), 32, dtype=dtype)
    for lengths in ((40, 23), (1, 1), (21, 0)):  # a text beyond the last bucket; texts of one token and of none
        real = padded(*lengths)
        x = torch.randn(*real.shape, 32, dtype=dtype)
        masks = {"pairs": real[:, None, :, None] & real[:, None, None], "keys": real[:, None, None].long()}
        for name, mask in masks.items():
            call = lambda x, table, mask=mask: layer(x, mask, rel_embeddings=table)[0]
            assert compare("deberta", call, [x, table], layer, **options) < bound, (lengths, name)
    assert len(arrived) == 6
    has_products = config.relative_attention and config.pos_att_type
    assert all(isinstance(call["bias"], Projected) == bool(has_products) for call in arrived)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_deberta_rounds_the_scale_as_the_original(dtype: torch.dtype) -> None:
    for dim, terms in ((64, 3), (64, 2), (24, 3), (80, 1)):
        exact = torch.sqrt(torch.tensor(dim, dtype=torch.float) * terms)
        for each in (torch.float64, torch.float32, dtype):
            assert deberta._root(dim * terms, each) == exact.to(each).item()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_deberta_trains(checkpoints: bool, arrived: list[dict[str, Any]]) -> None:
    """All states, also of padding, and the losses of three steps, with texts of other lengths; a convolution, too."""
    installed("deberta")
    from transformers import DebertaV2ForMaskedLM

    def losses() -> list[Tensor]:
        torch.manual_seed(0)
        model = filled(DebertaV2ForMaskedLM(deberta_config(conv_kernel_size=3)), torch.float64).train()
        if checkpoints:
            model.gradient_checkpointing_enable()
        optimizer, made = torch.optim.SGD(model.parameters(), lr=1e-2), []
        for lengths in ((30, 11, 25), (5, 5, 1), (33, 32, 0)):
            real = padded(*lengths)
            tokens = torch.randint(2, 50, real.shape)
            out = model(tokens, real.long(), labels=tokens.where(real, -100), output_hidden_states=True)
            out.loss.backward()
            made += [out.loss.detach(), *(x.detach() for x in out.hidden_states)]
            made += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return made

    theirs = losses()
    with deberta.enable(unchecked=is_another_transformers()):
        ours = losses()
    assert worst(ours, theirs) < 1e-9
    calls = 2 * 3 * (2 if checkpoints else 1)
    assert len(arrived) == calls and all(call["mask"].shape[1:3] == (1, 1) for call in arrived)  # not L x L


def test_deberta_runs_the_original_where_it_has_to(arrived: list[dict[str, Any]]) -> None:
    installed("deberta")
    from transformers import DebertaV2Model
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention, build_relative_position

    options = {"unchecked": is_another_transformers()}
    model = filled(DebertaV2Model(deberta_config()), torch.float64)
    real, tokens = padded(19, 8), torch.randint(2, 50, (2, 19))
    layer = filled(DisentangledSelfAttention(deberta_config(pos_att_type=["c2p"])), torch.float64)
    x, table, few = torch.randn(2, 19, 32), torch.randn(16, 32), torch.randn(2, 7, 32)
    x, table, few = x.double(), table.double(), few.double()
    shuffled = build_relative_position(x, x, 8, 20)[:, torch.randperm(19)]
    seen = real[:, None, None]
    calls: list[Callable[[], Any]] = [
        lambda: torch.cat([x.flatten() for x in model(tokens, real.long(), output_attentions=True).attentions]),
        lambda: layer(x, seen, relative_pos=shuffled, rel_embeddings=table)[0],
        lambda: layer(x, seen, query_states=few, rel_embeddings=table)[0],
        lambda: model.encoder(x, real.long(), relative_pos=shuffled).last_hidden_state,
    ]
    for call in calls:
        theirs = call()
        with deberta.enable(**options):
            assert torch.equal(call(), theirs)
    assert not arrived


def test_deberta_has_three_kinds_of_rows_without_a_key() -> None:
    """The mean of all values as there, and 0 with `empty="zero"`, which changes no other row."""
    installed("deberta")
    from transformers import DebertaV2Model

    model = filled(DebertaV2Model(deberta_config()), torch.float64)
    real, tokens = padded(19, 8, 0), torch.randint(2, 50, (3, 19))
    layer, seen = model.encoder.layer[0].attention.self, []
    layer.register_forward_hook(lambda layer, inputs, outputs: seen.append(outputs[0]))
    for options in ({}, {"empty": "zero"}):
        with deberta.enable(**options, unchecked=is_another_transformers()), torch.no_grad():
            out = model(tokens, real.long()).last_hidden_state
        if options:
            assert bool((seen[-1][~real] == 0).all()) and torch.equal(seen[-1][real], seen[0][real])
        else:
            theirs = model(tokens, real.long()).last_hidden_state
            assert torch.allclose(out, theirs, atol=1e-10)
    assert torch.allclose(out[real], theirs[real], atol=1e-10)


def test_deberta_drops_as_its_layers_say(arrived: list[dict[str, Any]]) -> None:
    installed("deberta")
    from transformers import DebertaV2Model

    drops = dict(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3)
    model = filled(DebertaV2Model(deberta_config(**drops, num_hidden_layers=1)), torch.float64)
    tokens, layer = torch.randint(2, 50, (2, 9)), model.encoder.layer[0].attention.self
    tables: list[Tensor] = []
    layer.key_proj.register_forward_pre_hook(lambda layer, inputs: tables.append(inputs[0]))
    with deberta.enable(unchecked=is_another_transformers()), torch.no_grad():
        for is_training, dropout_p in ((True, 0.3), (False, 0.0)):
            model.train(is_training)
            model(tokens)
            assert arrived[-1]["dropout_p"] == dropout_p and bool((tables[-1] == 0).any()) == is_training
        layer.dropout.train()
        model(tokens)
        assert arrived[-1]["dropout_p"] == 0.3


def test_deberta_compiles(arrived: list[dict[str, Any]]) -> None:
    """As one graph, and after calls in inference mode, whose tensors have no gradients."""
    installed("deberta")
    from transformers import DebertaV2Model

    model = filled(DebertaV2Model(deberta_config(max_relative_positions=24)), torch.float64)
    real, tokens = padded(19, 8), torch.randint(2, 50, (2, 19))
    call = lambda model: model(tokens, real.long()).last_hidden_state
    theirs = results(lambda: call(model), [], model)
    with deberta.enable(unchecked=is_another_transformers()):
        with torch.inference_mode():
            assert torch.allclose(call(model), theirs[0], atol=1e-10)
        assert worst(results(lambda: call(model), [], model), theirs) < 1e-10
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert worst(results(lambda: call(compiled), [], model), theirs) < 1e-10


@DTYPES
def test_megatron(dtype: torch.dtype) -> None:
    installed("megatron")
    from megatron.core.transformer.experimental_attention_variant import dsa

    megatron = importlib.import_module("flash_dmattn.integrations.megatron")
    torch.manual_seed(0)
    length, batch, heads, kept = 48, 2, 8, 12
    q = torch.randn(length, batch, heads, 40, dtype=dtype)
    k = torch.randn(length, batch, 1, 40, dtype=dtype)
    up = torch.randn(heads, 16, 32, dtype=dtype)
    scores = torch.randn(batch, length, length).masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    best, index = scores.topk(kept, -1)
    index = index.masked_fill(best == float("-inf"), -1)
    config = SimpleNamespace(dsa_kernel_backend="none", attention_backend=None, kv_lora_rank=32)
    others = dict.fromkeys(("mask", "varlen_starts", "varlen_ends", "key_positions"))

    def call(q: Tensor, k: Tensor, up: Tensor) -> Tensor:
        out: Tensor = dsa._run_sparse_attention(
            absorbed_mla=True,
            query=q,
            key=k,
            value=None,
            up_v_weight=up,
            topk_indices=index,
            softmax_scale=0.2,
            config=config,
            **others,
        )
        return out

    theirs = results(call, [q, k, up])
    with megatron.enable():
        config.dsa_kernel_backend = "dmattn"
        assert worst(results(call, [q, k, up]), theirs) < 1e-5  # fp32 inside theirs, whatever the input
    with pytest.raises(ValueError, match="dsa_kernel_backend"):
        call(q, k, up)


@pytest.mark.parametrize("name", ["Sam", "SamHQ"])
def test_sam_has_a_class_of_ours(name: str) -> None:
    """Its layers look the implementation up in a dict of classes, and so raised KeyError for "dmattn"."""
    transformers = pytest.importorskip("transformers")
    from flash_dmattn.integrations.transformers import check, register

    register()
    sizes = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 64}
    grid = {"image_size": 64, "patch_size": 8, "window_size": 3, "global_attn_indexes": [1]}
    config = getattr(transformers, f"{name}VisionConfig")(**sizes, **grid)
    kind = getattr(transformers, f"{name}VisionModel")
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    outcomes = []
    for implementation in ("eager", "dmattn"):
        model = kind._from_config(config, attn_implementation=implementation)
        filled(model, torch.float64)
        with contextlib.ExitStack() as stack:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(F, "softmax", softmax_as_it_is)
            outcomes.append(results(lambda x, model=model: model(x).last_hidden_state, [x], model))
    assert worst(*reversed(outcomes)) < 1e-10
    rows = check(model, pixel_values=x).rows
    assert len(rows) == 2 and all(row.problem is None and row.calls for row in rows)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x).last_hidden_state
    assert torch.allclose(compiled, outcomes[1][0], atol=1e-10)


def softmax_as_it_is(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """The softmax of eager attention, which casts to fp32 whatever the model is in."""
    return torch.softmax(x, dim)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["T5, 4 of 2048", "openpi", "openfold3"])
def test_a_step_never_waits_for_the_gpu(name: str) -> None:
    from benchmarks import steps

    model = next(model for model in steps.MODELS if model.name.startswith(name))
    device = torch.device("cuda")
    reason = model.missing(steps.OURS, device)
    if reason is not None:
        pytest.skip(reason)
    way = steps.Way(model, steps.OURS, True, device)
    way.train(2)
    try:
        torch.cuda.set_sync_debug_mode("error")
        way.train(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
