"""transformers: generate() with every kind of cache, and compiled decoding, have the tokens and logits of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", exc_type=ImportError)

import transformers
from transformers_models import FAMILIES, VERSION, Counted, Graphs, inputs, limits, make, padding, softmax_in_float64

from flash_dmattn.integrations.transformers import register

CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "none": {"use_cache": False},
    "chunks": {"prefill_chunk_size": 5},
    "beams": {"num_beams": 2},
}
NAMES = ("llama", "mistral", "gemma3", "gpt_oss", "deepseek_v3", "gpt2", "t5", "bart", "whisper", "gemma4")

PLAIN = ("deepseek_v3", "gpt2")  # of the same masks as llama


def cases() -> list[tuple[str, str, str | None]]:
    result = []
    for name in NAMES:
        for cache in CACHES:
            for side in (None, "left"):
                kind = FAMILIES[name].kind
                if cache == "chunks" and (kind != "causal" or VERSION.release < (5, 4)):
                    continue  # transformers fails at these by itself
                if (kind == "speech" and side is not None) or (cache in ("chunks", "beams") and name in NAMES[4:6]):
                    continue
                result.append((name, cache, side))
    return result + [(name, "static", "left") for name in ("qwen3", "gemma2", "mixtral", "llama4", "umt5")]


@pytest.mark.parametrize(("name", "cache", "side"), cases())
def test_tokens_and_logits(name: str, cache: str, side: str | None, counted: Counted) -> None:
    model = make(name).eval()
    options = inputs(model, FAMILIES[name].kind, side)
    del options["labels"]
    result = {}
    for implementation in ("eager", "dmattn"):
        model.set_attn_implementation(implementation)
        out = model.generate(
            **options,
            **CACHES[cache],
            max_new_tokens=6,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        result[implementation] = (out.sequences, torch.stack(out.logits))
        assert bool(counted.calls) == (implementation == "dmattn")
    assert torch.equal(result["dmattn"][0], result["eager"][0])
    scale = float(result["eager"][1].abs().max())
    assert float((result["dmattn"][1] - result["eager"][1]).abs().max()) < limits(name)[0] * scale
    if cache == "static" and name == "llama":
        # Keys after the used part are not passed: the prompt has its own length, later steps a multiple of 128.
        assert {call["k"].shape[1] for call in counted.calls} == {14, counted.masks[0].shape[3]}
        assert all(call["sequences"] is None for call in counted.calls)
        assert {mask.shape[2] for mask in counted.masks} == {14, 1}


def test_a_static_cache_decodes_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is on the left; the length is a tensor, and one graph serves every step."""
    register()
    softmax_in_float64(monkeypatch)
    model = make("llama", num_hidden_layers=1).eval()
    tokens = inputs(model, "causal", "left")["input_ids"]
    logits = {}
    for implementation in ("eager", "dmattn"):
        model.set_attn_implementation(implementation)
        torch._dynamo.reset()
        graphs = Graphs()
        decode = torch.compile(model.forward, backend=graphs, fullgraph=True, dynamic=False)
        name = "cache" if VERSION.release >= (5, 20) else "past_key_values"
        options: dict[str, Any] = {name: transformers.StaticCache(config=model.config, max_cache_len=24)}
        mask, result = padding(tokens.shape[1], "left"), []
        with torch.no_grad():
            now = torch.arange(tokens.shape[1])
            where = (mask.cumsum(-1) - 1).clamp(min=0)
            model(tokens, attention_mask=mask, position_ids=where, use_cache=True, **options, **_positions(now))
            for index in range(3):
                mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
                ready = torch.nn.functional.pad(mask, (0, 24 - mask.shape[1]))
                token = tokens[:, index : index + 1].clone()  # a graph is for one kind of strides
                where, now = mask.cumsum(-1)[:, -1:].clone() - 1, torch.tensor([mask.shape[1] - 1])
                more = {"attention_mask": ready, "position_ids": where, "use_cache": True, **_positions(now)}
                result.append(decode(token, **more, **options).logits)
        logits[implementation] = torch.cat(result, 1)
        assert [calls >= 1 for calls in graphs.calls] == [implementation == "dmattn"]
    error = (logits["dmattn"] - logits["eager"]).abs().max() / logits["eager"].abs().max()
    assert float(error) < limits("llama")[0]


def _positions(now: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"cache_position": now} if VERSION.release < (5, 4) else {}
