"""The demo: its text and split, its gradient check, its verdict, and a quick run from end to end."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from out_of_tree import replace_backend

import flash_dmattn
from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.backends.protocol import Availability
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.examples import demo as command
from flash_dmattn.examples.byte_model import (
    RESULTS,
    ByteLanguageModel,
    History,
    ModelConfig,
    TrainingConfig,
    capture_call,
    even_windows,
    load_corpus,
    train,
    training_call,
)
from flash_dmattn.examples.demo import DTYPES, HOPPER, ON_HOPPER, check_call, find_failures, main
from flash_dmattn.explanation import explain_description
from flash_dmattn.nn import KVCache
from flash_dmattn.tools import verify

ROOT = Path(__file__).resolve().parent.parent
TINY = ModelConfig(hidden_size=32, num_layers=2, num_heads=4, num_heads_k=2, mlp_size=48, keep_window_size=8)


@pytest.fixture(scope="module")
def corpus():
    return load_corpus()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return ByteLanguageModel(TINY)


@pytest.fixture(scope="module")
def exact_model():
    """In fp64: what rounding leaves of a whole model in fp32 is another number on every machine."""
    torch.manual_seed(0)
    return ByteLanguageModel(TINY).double()


def test_held_out_files_are_never_trained_on(corpus):
    train_files, held_out_files = set(corpus.train_files), set(corpus.held_out_files)
    assert not train_files & held_out_files
    assert len(held_out_files) >= 5 and len(train_files) >= 5 * len(held_out_files)
    assert corpus.train.numel() == sum(len(p.read_bytes().replace(b"\r\n", b"\n")) for p in corpus.train_files)
    assert corpus.held_out.numel() == sum(len(p.read_bytes().replace(b"\r\n", b"\n")) for p in corpus.held_out_files)
    assert list(corpus.train_files) == sorted(corpus.train_files)


def test_training_sees_the_training_text_alone_and_repeats_itself(corpus):
    config = TrainingConfig(steps=3, batch_size=2, context=32, evaluations=1, evaluation_windows=2)

    def run(text) -> History:
        torch.manual_seed(0)
        return train(ByteLanguageModel(TINY), text, config)

    first, again = run(corpus), run(corpus)
    assert first.train_loss == again.train_loss and first.held_out_loss == again.held_out_loss
    assert first.held_out_steps == [0, 3]
    other = run(type(corpus)(corpus.train, corpus.train[:100_000], corpus.train_files, ()))
    assert other.train_loss == first.train_loss and other.held_out_loss != first.held_out_loss


def test_generation_from_the_cache_is_the_model_itself(exact_model):
    model, prompt = exact_model, b"def main(argv):\n    return"
    written = model.generate(prompt, 20, temperature=0)
    tokens = torch.tensor([list(prompt + written)])
    with torch.no_grad():
        logits = model(tokens)[0]
        caches = [KVCache(8) for _ in model.blocks]
        decoded = torch.cat([model(piece, caches) for piece in tokens.split(1, dim=1)], dim=1)[0]
    torch.testing.assert_close(decoded, logits, rtol=1e-10, atol=1e-12)
    assert written == bytes(logits.argmax(-1)[len(prompt) - 1 : -1].tolist())


def test_the_captured_call_is_the_one_the_layer_made(exact_model, corpus):
    model, windows = exact_model, even_windows(corpus.held_out, 2, 49)
    attention, seen = model.blocks[1].attention, {}
    handles = (
        attention.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0].detach())),
        attention.o_proj.register_forward_pre_hook(lambda _, inputs: seen.update(out=inputs[0])),
    )
    model.loss(windows).backward()
    for handle in handles:
        handle.remove()
    projections = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, attention.score_scale)
    wanted = [parameter.grad.clone() for parameter in projections]
    call = capture_call(model, windows, layer=1)
    assert all(parameter.grad is None for parameter in model.parameters())

    def run(**arguments: torch.Tensor) -> torch.Tensor:
        return flash_dmattn.attention(**arguments, **call.flags, backend="eager")

    torch.testing.assert_close(run(**call.tensors).flatten(2), seen["out"])
    assert call.dout.square().mean().item() == pytest.approx(1.0, rel=1e-4)
    # These parameters reach the loss through this call alone: its dout must give their gradients, up to its scale.
    q, k, v, _, bias = attention.attention_arguments(seen["x"])
    out = run(q=q, k=k, v=v, bias=bias)
    for got, exact in zip(torch.autograd.grad(out, projections, call.dout), wanted, strict=True):
        torch.testing.assert_close(got / got.norm(), exact / exact.norm(), rtol=1e-9, atol=1e-12)


def test_the_gradient_check_passes_right_gradients_and_fails_wrong_ones(model, corpus, monkeypatch):
    call = capture_call(model, even_windows(corpus.held_out, 2, 49), layer=0)
    rows = {row.backend: row for row in check_call(call, torch.float32)}
    assert rows["eager"].passed and set(rows["eager"].errors) == set(RESULTS)
    assert rows["triton"].reasons and not rows["triton"].errors

    def too_large_a_bias(*arguments: Any, bias: torch.Tensor, **flags: Any) -> Any:
        return flash_dmattn.attention(*arguments, bias=bias + 0.001 * (bias - bias.detach()), **flags)

    monkeypatch.setattr(verify, "attention", too_large_a_bias)
    wrong = {row.backend: row for row in check_call(call, torch.float32)}["eager"]
    assert wrong.failed == ("dbias",) and wrong.errors["dbias"] == pytest.approx(1e-3, rel=1e-2)

    monkeypatch.setattr(verify, "attention", lambda *x, **flags: 1.001 * flash_dmattn.attention(*x, **flags))
    failed = {row.backend: row for row in check_call(call, torch.float32)}["eager"].failed
    assert failed == RESULTS


@pytest.mark.parametrize("keep", [ON_HOPPER.keep, None], ids=["dynamic mask", "full attention"])
def test_on_a_hopper_gpu_auto_trains_on_cuda(keep, monkeypatch):
    """The call that a layer makes here at the sizes for Hopper, described for such a GPU with the extension built."""
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)
    monkeypatch.setattr(BACKENDS, "table", BACKENDS.table)  # for it to be put back
    for backend in ("cuda", "triton"):
        replace_backend(backend, probe=lambda: Availability(True))
    chosen = ON_HOPPER
    model = ByteLanguageModel(ModelConfig(chosen.hidden_size, num_layers=1, mlp_size=8, keep_window_size=keep))
    config = TrainingConfig(batch_size=chosen.batch_size, context=chosen.context, dtype=DTYPES[chosen.dtype])
    here = training_call(model, config)
    assert here.forward == here.backward == "eager" and any(here.problem.needs_grad)
    there = here.problem._replace(device="cuda", arch=HOPPER)
    rules = (*BACKENDS["cuda"].rules, *BACKENDS["cuda"].auto_rules)
    assert [rule.code for rule in rules if not rule.holds(there)] == []
    explanation = explain_description(there, "auto")
    assert explanation.forward == explanation.backward == "cuda"
    # The held-out windows go through in such batches too, without gradients.
    assert explain_description(there._replace(needs_grad=type(there.needs_grad)()), "auto").forward == "cuda"


def test_the_verdict_names_what_failed():
    errors, limits = {"out": 1e-7, "dq": float("nan")}, {"out": 1e-5, "dq": 1e-5}
    nan = verify.Outcome("flex", "cpu", "float32", "layer 1", errors, limits)
    large = replace(nan, backend="eager", dtype="bfloat16", errors={"dq": 0.5}, limits={"dq": 1e-2})
    broken = replace(nan, errors={}, exception="RuntimeError: no memory")
    learned, did_not = History(held_out_loss=[5.0, 2.0]), History(held_out_loss=[5.0, 2.9])
    assert find_failures([], learned, 3.1, 0.8) == []
    assert find_failures([nan], learned, 3.1, 0.8) == ["flex in float32: error of dq is nan, above its limit 1.0e-05"]
    assert find_failures([broken], learned, 3.1, 0.8) == ["flex in float32: RuntimeError: no memory"]
    assert find_failures([large], learned, 3.1, 0.8) == [
        "eager in bfloat16: error of dq is 5.0e-01, above its limit 1.0e-02"
    ]
    assert "ends at 2.900 nats per byte; it must end 0.8 under" in find_failures([], did_not, 3.1, 0.8)[0]
    assert find_failures([], History(held_out_loss=[float("nan")]), 3.1, 0.8)


def run_demo(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flash_dmattn", "demo", "--quick", "--device", "cpu", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        timeout=300,
    )


def test_a_quick_run_from_end_to_end(tmp_path):
    ran = run_demo("--out-dir", "pictures", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for heading in (
        "device cpu",
        "byte-unigram entropy",
        "4 x 256 bytes, float32, backend auto",
        "dynamic mask, 64 keys: attention by sdpa forward, eager backward",
        "full attention: attention by sdpa forward, eager backward",
        "Loss on held-out text",
        "backend='auto' runs sdpa forward, eager backward",
        "Gradient check of this batch",
        "decoded from the KV cache",
        "Done in",
    ):
        assert heading in ran.stdout
    checks = ran.stdout.split("Gradient check")[1].split("A continuation")[0].splitlines()
    results = {line.split()[0]: line.split() for line in checks if line.strip()}
    assert results["eager"][-1] == "pass" and len(results["eager"]) == 2 + len(RESULTS) + 1
    assert "cannot train this: device is cpu" in " ".join(results["cuda"])
    picture = (tmp_path / "pictures" / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and picture.rstrip(b"\0").endswith(b"IEND\xaeB`\x82")
    width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
    assert width >= 1000 and height >= 500 and len(picture) > 20_000


def test_arguments_are_checked(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--steps", "0"])
    assert stopped.value.code == 2
    assert "0 is not a positive number" in capsys.readouterr().err
    assert command._positive("1") == 1
    for words, message in (
        (["--device", "nope"], "argument --device: Expected one of cpu"),
        (["--device", "meta"], "argument --device: "),
        (["--backend", "nope"], "argument --backend: backend 'nope' is unknown"),
        (["--context", "100000000"], "argument --context: 100000000 is more than the "),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([*words, "--steps", "1", "--quick"])
        assert stopped.value.code == 2 and message in capsys.readouterr().err
