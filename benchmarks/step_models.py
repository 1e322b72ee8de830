"""The models of other projects whose training steps `benchmarks.steps` times, and the ways of their attention."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_dmattn.biases import Projected

os.environ.setdefault("LAYERNORM_TYPE", "torch")  # Protenix compiles a kernel of its own otherwise

OURS, WITHOUT = "dmattn", "without attention"
Made = tuple[nn.Module, Callable[[], Tensor]]  # the module, and the loss of a step
# Packages that a way needs, apart from its model's.
NEEDED = {"cuequivariance": ("cuequivariance_torch", "cuequivariance_ops_torch")}


class Model(NamedTuple):
    """A model and the batch that it trains on.

    Attributes:
        name: of the row.
        packages: what is imported.
        peers: the project's ways, in the words of the project.
        make: makes the module and the loss on the default device for a way, tiny if the second argument is True.
        adapter: the module of `flash_dmattn.integrations` that replaces attention; "" for "dmattn" of transformers.
    """

    name: str
    packages: tuple[str, ...]
    peers: tuple[str, ...]
    make: Callable[[str, bool], Made]
    adapter: str = ""

    def missing(self, way: str, device: torch.device) -> str | None:
        """Return why a way cannot run here."""
        if way in ("cuequivariance", "triton") and device.type != "cuda":
            return "its kernels run on GPUs"
        for package in (*self.packages, *NEEDED.get(way, ())):
            try:
                importlib.import_module(package)
            except Exception as error:  # a broken installation raises whatever it likes
                return f"{package} cannot be imported: {type(error).__name__}: {error}"
        return None

    @contextmanager
    def attention(self, way: str) -> Iterator[None]:
        """Have attention computed in a way."""
        if way not in (OURS, WITHOUT):
            yield
        elif self.adapter:
            adapter = importlib.import_module(f"flash_dmattn.integrations.{self.adapter}")
            name, without = ("attend", _without) if hasattr(adapter, "attend") else ("attention", _without_attention)
            call = without if way == WITHOUT else getattr(adapter, name)
            # Losses are compared, so that other sources than the known ones would be noticed.
            with adapter.enable(unchecked=True), mock.patch.object(adapter, name, call):
                yield
        elif way == WITHOUT:
            with mock.patch.object(F, "scaled_dot_product_attention", _without_sdpa):
                yield
        else:
            yield


def _without(q: Tensor, k: Tensor, v: Tensor, biases: Sequence[Tensor] = (), **_: Any) -> Tensor:
    """Return (*batch, H, Lq, D) that depends on all inputs, whose gradients the rest of a step needs."""
    out = q + (k + v).mean((-3, -2), keepdim=True)
    for bias in biases:
        if bias.requires_grad:
            out = out + bias.mean()
    return out.to(q.dtype)


def _without_sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    return _without(q, k, v, () if attn_mask is None else (attn_mask,))


def _without_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Projected | None, **_: Any
) -> Tensor:
    factors = [] if bias is None else [x for term in bias.terms for _, x in term.named_tensors]
    return _without(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), factors).transpose(1, 2)


def _filled(module: nn.Module) -> nn.Module:
    """Fill matrices anew, since layers that begin as zeros would hide what attention does."""
    for p in module.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.5 * p.shape[-1] ** -0.5)
    return module


def _towards(target: Tensor, forward: Callable[[], Tensor]) -> Tensor:
    return F.mse_loss(forward().float(), target)


def _transformers(way: str, **replaced: str) -> str:
    """Return the implementation for a way, after making ours known."""
    from flash_dmattn.integrations.transformers import register

    return {OURS: register(), WITHOUT: "sdpa", **replaced}.get(way, way)


def _lengths(least: int, most: int, count: int) -> Tensor:
    """Return lengths at equal distances, the longest one first, as (count, 1)."""
    return torch.linspace(most, least, count).long()[:, None]


def _padded(count: int, least: int, most: int, vocabulary: int) -> dict[str, Tensor]:
    tokens = torch.randint(2, vocabulary, (count, most))
    used = torch.arange(most) < _lengths(least, most, count)
    return {"input_ids": tokens, "attention_mask": used.long(), "labels": torch.where(used, tokens, -100)}


def _t5(count: int, least: int, most: int, way: str, quick: bool) -> Made:
    import transformers

    sizes = dict(d_model=768, d_ff=3072, num_layers=6, num_decoder_layers=6, num_heads=12, vocab_size=32128)
    if quick:
        sizes = dict(d_model=32, d_ff=32, d_kv=16, num_layers=1, num_decoder_layers=1, num_heads=2, vocab_size=50)
        count, least, most = 2, 12 if least == most else 5, 12
    config = transformers.T5Config(**sizes, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation=_transformers(way))
    inputs = _padded(count, least, most, config.vocab_size)
    if least == most:
        del inputs["attention_mask"]
    return model, lambda: model(**inputs).loss


def _bert(way: str, quick: bool) -> Made:
    import transformers

    sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1) if quick else {}
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForMaskedLM._from_config(config, attn_implementation=_transformers(way))
    inputs = _padded(2, 5, 12, 50) if quick else _padded(64, 128, 512, config.vocab_size)
    return model, lambda: model(**inputs).loss


def _deberta(way: str, quick: bool) -> Made:
    import transformers

    sizes = dict(hidden_size=768, intermediate_size=3072, num_attention_heads=12, num_hidden_layers=12)
    positions = dict(relative_attention=True, position_buckets=256, max_relative_positions=512, share_att_key=True)
    count, least, most, vocabulary = 16, 128, 512, 128100
    if quick:
        sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=2)
        positions |= dict(position_buckets=8, max_relative_positions=16)
        count, least, most, vocabulary = 2, 5, 20, 50
    form = dict(pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", position_biased_input=False)
    drops = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = transformers.DebertaV2Config(vocab_size=vocabulary, **sizes, **positions, **form, **drops)
    model = transformers.DebertaV2ForMaskedLM(config)
    inputs = _padded(count, least, most, vocabulary)
    return model, lambda: model(**inputs).loss


def _sam(way: str, quick: bool) -> Made:
    import transformers

    small: dict[str, Any] = dict(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=2, image_size=64, patch_size=8, mlp_dim=32
    )
    small |= dict(window_size=3, global_attn_indexes=[1], output_channels=16)
    config = transformers.SamVisionConfig(**(small if quick else {}))
    model = transformers.SamVisionModel._from_config(config, attn_implementation=_transformers(way))
    pixels = torch.randn(2, 3, config.image_size, config.image_size)
    side = config.image_size // config.patch_size
    target = torch.randn(2, config.output_channels, side, side)
    return model, lambda: _towards(target, lambda: model(pixels).last_hidden_state)


def _parakeet(way: str, quick: bool) -> Made:
    import transformers

    none = ("dropout", "dropout_positions", "layerdrop", "activation_dropout", "attention_dropout")
    sizes: dict[str, Any] = dict(num_hidden_layers=6, **dict.fromkeys(none, 0.0))
    if quick:
        sizes |= dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
        sizes |= dict(subsampling_conv_channels=8)
    config = transformers.ParakeetEncoderConfig(**sizes)
    model = transformers.ParakeetEncoder._from_config(config, attn_implementation=_transformers(way))
    count, frames = (2, 96) if quick else (8, 12000)
    sound = torch.randn(count, frames, config.num_mel_bins)
    target = torch.randn(count, frames // 8, config.hidden_size)
    return model, lambda: _towards(target, lambda: model(sound).last_hidden_state)


def _images(kind: str, way: str, quick: bool) -> Made:
    import transformers

    if kind == "beit":
        sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32)
        more: dict[str, Any] = dict(use_relative_position_bias=True, drop_path_rate=0.0)
        config: Any = transformers.BeitConfig(**(sizes if quick else {}), **more)
    else:
        small = dict(image_size=32, patch_size=2, window_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 4])
        base = dict(embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32])
        config = transformers.SwinConfig(**(small if quick else base), drop_path_rate=0.0)
    count = 2 if quick else 128
    kinds = transformers.AutoModelForImageClassification
    model: Any = kinds.from_config(config, attn_implementation=_transformers(way))
    pixels, labels = torch.randn(count, 3, config.image_size, config.image_size), torch.arange(count) % 2
    return model, lambda: model(pixels, labels=labels).loss


def _prefix(way: str, quick: bool) -> Made:
    """Make Gemma as openpi calls it: embeddings of images and text that see each other, then actions, and padding."""
    import transformers

    sizes = dict(hidden_size=2048, intermediate_size=16384, num_hidden_layers=4)
    count, prefix, actions = 16, 920, 50
    if quick:
        sizes, (count, prefix, actions) = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1), (2, 9, 3)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16) if quick else {}
    heads = heads or dict(num_attention_heads=8, num_key_value_heads=1, head_dim=256)
    config = transformers.GemmaConfig(**sizes, **heads, vocab_size=64, use_cache=False)
    implementation = "eager" if way in (OURS, WITHOUT) else way  # which the adapter replaces
    model = transformers.GemmaModel._from_config(config, attn_implementation=implementation)
    length = prefix + actions
    x, target = torch.randn(count, length, config.hidden_size), torch.randn(count, actions, config.hidden_size)
    is_action = torch.arange(length) >= prefix
    real = is_action | (torch.arange(length) < _lengths(prefix // 2, prefix, count))

    def loss() -> Tensor:
        seen = real[:, None, :, None] & real[:, None, None, :] & (is_action[:, None] | ~is_action)
        mask = torch.where(seen, 0.0, -2.3819763e38)  # made anew in each step
        out = model(inputs_embeds=x, attention_mask=mask, position_ids=real.cumsum(1) - 1).last_hidden_state
        return F.mse_loss(out[:, prefix:].float(), target)

    return model, loss


def _softcap(way: str, quick: bool) -> Made:
    import transformers

    sizes = dict(num_hidden_layers=4, vocab_size=32000)
    if quick:
        sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
        sizes |= dict(num_key_value_heads=1, head_dim=16, sliding_window=8)
    config = transformers.Gemma2Config(**sizes, use_cache=False)
    implementation = _transformers(way)
    model = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation=implementation)
    tokens = torch.randint(2, config.vocab_size, (1, 24 if quick else 8192))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


def _qwen_image(way: str, quick: bool) -> Made:
    from diffusers import QwenImageTransformer2DModel

    sizes: dict[str, Any] = dict(num_layers=2)
    count, side, text = 2, 64, 512
    if quick:
        sizes = dict(num_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32)
        sizes |= dict(axes_dims_rope=(4, 6, 6))
        count, side, text = 2, 4, 8
    model: Any = QwenImageTransformer2DModel(**sizes)
    _filled(model)
    image, target = torch.randn(count, side * side, 64), torch.randn(count, side * side, 64)
    states = torch.randn(count, text, model.config.joint_attention_dim)
    mask = (torch.arange(text) < _lengths(text // 4, text, count)).long()
    call: dict[str, Any] = dict(hidden_states=image, encoder_hidden_states=states, encoder_hidden_states_mask=mask)
    call |= dict(timestep=torch.full((count,), 0.5), img_shapes=[[(1, side, side)]] * count)
    return model, lambda: _towards(target, lambda: model(**call).sample)


def _pairs(quick: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Make tokens, pairs, the masks of a crop without padding, and the loss of both results."""
    n, c_s, c_z = (10, 32, 16) if quick else (384, 384, 128)
    s, z = torch.randn(1, n, c_s), torch.randn(1, n, n, c_z)
    goal_s, goal_z = torch.randn_like(s), torch.randn_like(z)
    loss = lambda s, z: F.mse_loss(s.float(), goal_s) + F.mse_loss(z.float(), goal_z)
    return s, z, torch.ones(1, n), torch.ones(1, n, n), loss


BLOCKS = 2  # of each model of proteins


def _openfold(way: str, quick: bool) -> Made:
    from openfold3.core.model.latent.pairformer import PairFormerBlock

    s, z, tokens, pairs, loss = _pairs(quick)
    sizes = dict(c_s=s.shape[-1], c_z=z.shape[-1], c_hidden_pair_bias=8 if quick else 24)
    sizes |= dict(no_heads_pair_bias=4 if quick else 16, c_hidden_mul=z.shape[-1], c_hidden_pair_att=8 if quick else 32)
    sizes |= dict(no_heads_pair=2 if quick else 4, transition_n=4)
    others = dict(transition_type="swiglu", pair_dropout=0.0, fuse_projection_weights=False, inf=1e9)
    blocks = nn.ModuleList([PairFormerBlock(**sizes, **others) for _ in range(BLOCKS)])
    flags = {"triton": "use_triton_triangle_kernels", "cuequivariance": "use_cueq_triangle_kernels"}
    chosen = {flags[way]: True} if way in flags else {}

    def step() -> Tensor:
        x, y = s, z
        for block in blocks:
            x, y = block(x, y, tokens, pairs, **chosen)
        return loss(x, y)

    return _filled(blocks), step


def _boltz(way: str, quick: bool) -> Made:
    from boltz.model.layers.pairformer import PairformerLayer

    s, z, tokens, pairs, loss = _pairs(quick)
    heads = dict(num_heads=4, pairwise_head_width=8, pairwise_num_heads=2) if quick else {}
    make = partial(PairformerLayer, s.shape[-1], z.shape[-1], dropout=0.0, v2=True, **heads)
    blocks = nn.ModuleList([make() for _ in range(BLOCKS)])

    def step() -> Tensor:
        x, y = s, z
        for block in blocks:
            x, y = block(x, y, tokens, pairs, use_kernels=way == "cuequivariance")
        return loss(x, y)

    return _filled(blocks), step


def _protenix(way: str, quick: bool) -> Made:
    from protenix.model.modules.pairformer import PairformerBlock

    s, z, _, pairs, loss = _pairs(quick)
    sizes = dict(n_heads=4, c_hidden_mul=16, c_hidden_pair_att=8, no_heads_pair=2) if quick else {}
    make = partial(PairformerBlock, c_s=s.shape[-1], c_z=z.shape[-1], dropout=0.0, **sizes)
    blocks = nn.ModuleList([make() for _ in range(BLOCKS)])
    chosen = {"triangle_attention": "triattention" if way == "triton" else "torch"}

    def step() -> Tensor:
        x, y = s, z
        for block in blocks:
            x, y = block(x, y, pairs, **chosen)
        return loss(x, y)

    return _filled(blocks), step


HF, TWO = ("transformers",), ("sdpa", "eager")
PAIRS = "Pairformer, 384 tokens"
MODELS = (
    Model("T5, 16 of 128 to 512", HF, TWO, partial(_t5, 16, 128, 512)),
    Model("T5, 4 of 2048", HF, TWO, partial(_t5, 4, 2048, 2048)),
    Model(
        f"openfold3's {PAIRS}",
        ("openfold3.core.model.latent.pairformer",),
        ("plain", "triton", "cuequivariance"),
        _openfold,
        "openfold",
    ),
    Model("openpi's Gemma, 16 of 970", HF, TWO, _prefix, "openpi"),
    Model(f"Boltz's {PAIRS}", ("boltz.model.layers.pairformer",), ("plain", "cuequivariance"), _boltz, "boltz"),
    Model("SAM's encoder, 2 of 1024 x 1024", HF, TWO, _sam),
    Model("Parakeet's encoder, 8 of 1500", HF, TWO, _parakeet),
    Model("QwenImage, 2 of 4096 + 512", ("diffusers",), ("native",), _qwen_image, "diffusers"),
    Model("Gemma 2, 8192", HF, ("eager",), _softcap),  # "sdpa" ignores its softcap
    Model("BERT, 64 of 128 to 512", HF, TWO, _bert),
    Model("DeBERTa v3 base, 16 of 128 to 512", HF, ("eager",), _deberta, "deberta"),
    Model("BEiT, 128 images", HF, TWO, partial(_images, "beit")),
    Model("Swin, 128 images", HF, TWO, partial(_images, "swin")),
    Model(f"Protenix's {PAIRS}", ("protenix.model.modules.pairformer",), ("plain", "triton"), _protenix, "protenix"),
)
