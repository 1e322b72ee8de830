"""The demo: its tasks, its gradient check, its verdict, and a quick run from end to end; the text of the examples."""

from __future__ import annotations

import os
import subprocess
import sys
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
from flash_dmattn.examples.byte_model import load_corpus
from flash_dmattn.examples.demo import (
    HOPPER,
    ON_HOPPER,
    QUICK,
    RESULTS,
    Task,
    Training,
    check_call,
    main,
)
from flash_dmattn.explanation import explain_description
from flash_dmattn.tools import verify

ROOT = Path(__file__).resolve().parent.parent
TINY = QUICK._replace(tokens=192, keep=24, nodes=8, steps=3)
CPU = torch.device("cpu")


def test_held_out_files_are_never_trained_on():
    corpus = load_corpus()
    train_files, held_out_files = set(corpus.train_files), set(corpus.held_out_files)
    assert not train_files & held_out_files
    assert len(held_out_files) >= 5 and len(train_files) >= 5 * len(held_out_files)
    assert corpus.train.numel() == sum(len(p.read_bytes().replace(b"\r\n", b"\n")) for p in corpus.train_files)
    assert corpus.held_out.numel() == sum(len(p.read_bytes().replace(b"\r\n", b"\n")) for p in corpus.held_out_files)
    assert list(corpus.train_files) == sorted(corpus.train_files)


@pytest.fixture
def tasks() -> tuple[Task, Task]:
    return command.make_tasks(TINY, "auto", CPU, seed=0)


def test_the_answers_of_the_tasks_are_in_their_inputs(tasks):
    pairs, recall = (task.trainings[0].layer for task in tasks)
    ((edges,), common) = pairs.batch(2, torch.Generator().manual_seed(0))
    for b, i, j in ((0, 1, 2), (1, 3, 3), (1, 0, 7)):
        assert common[b, i, j] == float((edges[b, i] & edges[b, j]).any())
    (kinds, names, bits, asked), answers = recall.batch(2, torch.Generator().manual_seed(0))
    assert (kinds == command.FACT).sum() == 2 * command.NUM_FACTS and (kinds[0, asked[0]] == command.QUESTION).all()
    for b, place, answer in zip(
        (0, 0, 1), (asked[0, 0], asked[0, 5], asked[1, 1]), (*answers[0, [0, 5]], answers[1, 1])
    ):
        (fact,) = ((kinds[b] == command.FACT) & (names[b] == names[b, place])).nonzero()[:, 0]
        assert fact < place and (bits[b, fact] > 0).equal(answer > 0) and not bits[b, place].any()


def test_layers_of_a_task_start_alike_and_see_the_same_batches(tasks):
    for task in tasks:
        weights = [training.layer.state_dict() for training in task.trainings]
        assert all(torch.equal(each[name], x) for each in weights[1:] for name, x in weights[0].items())
    first, again = (
        Training("x", command.make_tasks(TINY, "auto", CPU, seed=0)[1].trainings[1].layer) for _ in range(2)
    )
    first.run(2, seed=0)
    again.run(2, seed=0)
    assert first.losses == again.losses and len(first.seconds) == 2


def test_the_gradient_check_passes_right_gradients_and_fails_wrong_ones(tasks, monkeypatch):
    for task, name in zip(tasks, ("pairs", "recall")):
        call = command.capture_call(task.trainings[0].layer, name, torch.float32)
        rows = {row.backend: row for row in check_call(call, torch.float32)}
        assert rows["eager"].passed and set(rows["eager"].errors) == set(RESULTS)
        assert rows["triton"].reasons and not rows["triton"].errors
    assert call.flags["mask"].sum(-1).max() == TINY.keep

    def too_large_a_bias(*arguments: Any, bias: torch.Tensor, **flags: Any) -> Any:
        return flash_dmattn.attention(*arguments, bias=bias + 0.001 * (bias - bias.detach()), **flags)

    monkeypatch.setattr(verify, "attention", too_large_a_bias)
    wrong = {row.backend: row for row in check_call(call, torch.float32)}["eager"]
    assert wrong.failed == ("dbias",) and wrong.errors["dbias"] == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(("task", "backend"), [(0, "triton"), (1, "cuda")], ids=["pairs", "recall"])
def test_on_a_hopper_gpu_auto_trains_on_a_kernel_of_ours(task, backend, monkeypatch):
    """The call that a layer makes here at the sizes for Hopper, described for such a GPU with the extension built."""
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)
    monkeypatch.setattr(BACKENDS, "table", BACKENDS.table)  # for it to be put back
    for name in ("cuda", "triton"):
        replace_backend(name, probe=lambda: Availability(True))
    layer = command.make_tasks(ON_HOPPER, "auto", CPU, seed=0)[task].trainings[0].layer
    inputs, _ = layer.batch(1, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        here = flash_dmattn.explain(**layer.arguments(*inputs))
    assert any(here.problem.needs_grad) and here.problem.dtype == torch.bfloat16
    explanation = explain_description(here.problem._replace(device="cuda", arch=HOPPER), "auto")
    assert explanation.forward == explanation.backward == backend, str(explanation)


def test_a_quick_run_from_end_to_end(tmp_path):
    command = [sys.executable, "-m", "flash_dmattn", "demo", "--quick", "--device", "cpu", "--out-dir", "pictures"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for said in (
        "device cpu",
        "This takes about ",
        "Pairs: do two of 32 nodes of a graph have a common neighbour?",
        "Recall: 64 questions about 16 facts, which lie anywhere in 2048 tokens",
        "backend='auto' runs sdpa forward, eager backward",
        "Gradient check of both layers",
        "Done in",
    ):
        assert said in ran.stdout
    checks = ran.stdout.split("Gradient check")[1].split("Picture")[0].splitlines()
    results = {tuple(line.split()[:2]): line.split() for line in checks if line.strip()}
    for call in ("pairs", "recall"):
        assert results[call, "eager"][-1] == "pass" and len(results[call, "eager"]) == 3 + len(RESULTS) + 1
        assert "cannot train this: device is cpu" in " ".join(results[call, "cuda"])
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
    ):
        with pytest.raises(SystemExit) as stopped:
            main([*words, "--steps", "1", "--quick"])
        assert stopped.value.code == 2 and message in capsys.readouterr().err
