"""Generate with a static cache, on flash_dmattn beside transformers' own attention: the same tokens, tokens per second.

A static cache has room for every token that will come. Other implementations get a mask of all that room for each
query; here the call says how many keys are used, and later ones are left out. Prompts are padded on the left.

The output: whether all implementations choose the same tokens (in float32, greedily), how many tokens a second they
make, how large the mask of the prompt is, and a picture of speed and size, `static_cache_generation.png`.

    python examples/static_cache_generation.py                  # a CPU, or a GPU where there is one
    python examples/static_cache_generation.py --quick --device cpu
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import flash_dmattn
from flash_dmattn.examples.byte_model import load_corpus
from flash_dmattn.examples.demo import print_table
from flash_dmattn.integrations.transformers import register

PADDING = 256


class Outcome(NamedTuple):
    """The tokens of one implementation, its speed, and the bytes of the masks that its first layer received."""

    tokens: Tensor
    tokens_per_second: float
    mask_bytes: int
    backends: str


def prompts(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(B, L) beginnings of modules of the standard library, padded on the left, and their 0/1 mask."""
    paths = load_corpus().train_files
    rows = torch.full((len(lengths), max(lengths)), PADDING)
    for row, length, path in zip(rows, lengths, paths[3:]):
        row[-length:] = torch.frombuffer(bytearray(path.read_bytes()[:length]), dtype=torch.uint8)
    return rows, (rows != PADDING).long()


@contextmanager
def masks_of(layer: Any) -> Iterator[list[int]]:
    """The bytes of the mask that a layer receives, for each of its calls: what other objects than tensors hold."""
    sizes: list[int] = []

    def look(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        mask = keywords.get("attention_mask")
        parts = [mask] if isinstance(mask, Tensor) else list(vars(mask).values()) if mask is not None else []
        sizes.append(sum(x.numel() * x.element_size() for x in parts if isinstance(x, Tensor)))

    hook = layer.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield sizes
    finally:
        hook.remove()


def generate(model: Any, attention: str, rows: Tensor, mask: Tensor, count: int) -> Outcome:
    model.set_attn_implementation(attention)
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "cache_implementation": "static"}
    options |= {"disable_compile": True, "eos_token_id": None, "pad_token_id": PADDING}
    decisions: list[Any] = []
    with masks_of(model.model.layers[0].self_attn) as sizes, flash_dmattn.config(record=decisions):
        model.generate(input_ids=rows, attention_mask=mask, **options | {"max_new_tokens": 2})  # warms up
    started = time.perf_counter()
    results = model.generate(input_ids=rows, attention_mask=mask, **options)[:, rows.shape[1] :].cpu()
    speed = results.numel() / (time.perf_counter() - started)
    backends = sorted({d.forward for d in decisions})
    return Outcome(results, speed, sizes[0], "; ".join(backends))


def draw(path: Path, outcomes: dict[str, Outcome]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=110, layout="constrained")
    speeds, sizes = figure.subplots(1, 2)
    speeds.bar(list(outcomes), [outcome.tokens_per_second for outcome in outcomes.values()])
    speeds.set(ylabel="tokens / s", title="Generation with a static cache")
    sizes.bar(list(outcomes), [outcome.mask_bytes for outcome in outcomes.values()])
    sizes.set(ylabel="bytes", yscale="log", title="Mask of the prompt")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Generate, print, draw; return the numbers of the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few tokens of a tiny model")
    parser.add_argument("--out", type=Path, default=Path("examples_output"), help="folder of the picture")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parsed = parser.parse_args(arguments)
    device = torch.device(parsed.device)
    parsed.out.mkdir(parents=True, exist_ok=True)
    name = register()

    if device.type == "cuda" and not parsed.quick:
        lengths, count, hidden, layers, heads = [3000, 1500, 2200, 800], 200, 2048, 6, 16
    elif parsed.quick:
        lengths, count, hidden, layers, heads = [30, 17], 6, 32, 2, 4
    else:
        lengths, count, hidden, layers, heads = [400, 250, 330, 120], 40, 256, 4, 8
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=257,
        pad_token_id=PADDING,
        max_position_embeddings=8192,
        initializer_range=0.1,  # large enough for attention to matter in a model that nobody has trained
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(device).eval()
    rows, mask = (x.to(device) for x in prompts(lengths))

    outcomes = {attention: generate(model, attention, rows, mask, count) for attention in ("eager", "sdpa", name)}
    wanted = outcomes["eager"].tokens
    equal = {attention: int((outcome.tokens == wanted).sum()) for attention, outcome in outcomes.items()}
    table = [
        (
            attention,
            f"{equal[attention]} of {wanted.numel()}",
            f"{outcome.tokens_per_second:.0f}",
            f"{outcome.mask_bytes:,}",
            outcome.backends or "-",
        )
        for attention, outcome in outcomes.items()
    ]
    columns = ("attention", "tokens as eager's", "tokens / s", "bytes of the prompt's mask", "backends")
    print_table(f"{len(lengths)} prompts of up to {max(lengths)} tokens, {count} new ones each", columns, table)
    draw(parsed.out / "static_cache_generation.png", outcomes)
    print(f"\npicture: {parsed.out / 'static_cache_generation.png'}")
    return {
        "equal": equal,
        "generated": wanted.numel(),
        "different_tokens": len(wanted.unique()),
        "tokens_per_second": {attention: outcome.tokens_per_second for attention, outcome in outcomes.items()},
        "mask_bytes": {attention: outcome.mask_bytes for attention, outcome in outcomes.items()},
        "backends": outcomes[name].backends,
    }


if __name__ == "__main__":
    main()
