"""Profiles: what is read, what is ignored and why, which rows a call belongs to, and what auto makes of the figures."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import GPU
from out_of_tree import replace_backend

import flash_dmattn
from flash_dmattn import call as calls
from flash_dmattn.backends.protocol import Availability
from flash_dmattn.dispatch import config, profiles, selection
from flash_dmattn.dispatch.profiles import (
    FORMAT,
    ROWS,
    Figures,
    Profile,
    ProfileError,
    dump,
    judge,
    parse,
    read,
    rows_of,
    write,
)
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.explanation import explain_problem
from flash_dmattn.problem import SequenceSpec

VERSIONS = {"library": flash_dmattn.__version__, "torch": "2.11.0", "triton": "3.6.0"}
FAST, MIDDLE, SLOW = Figures(1.0, 2.0), Figures(1.5, 3.0), Figures(9.0, 20.0)
NO = Figures(error="OutOfMemoryError: no memory")
CALL: dict[str, Any] = {"q": (2, 4096, 16, 64), "dtype": "bf16", "device": "sm_80"}


def profile_of(
    triton: Figures = FAST,
    flex: Figures = MIDDLE,
    eager: Figures = SLOW,
    arch: str = "sm_80",
    sdpa: Figures = NO,
    **fields: Any,
) -> Profile:
    """A profile with the same figures in each row, but for what `fields` replaces."""
    figures = {"triton": triton, "flex": flex, "sdpa": sdpa, "eager": eager}
    rows = {row.name: dict(figures) for row in ROWS}
    made = {"driver": "570.1", "made": "2026-01-02T03:04:05+00:00", "wrong": {}, "rows": rows}
    return Profile(**{"gpu": GPU, "arch": arch, **VERSIONS, **made, **fields})


@pytest.fixture(autouse=True)
def machine(caches: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with one GPU, both compiled backends, and a user's folder of caches that is empty."""
    here = SimpleNamespace(gpus={"sm_80": [GPU], "sm_90": ["NVIDIA H200"]}, versions=dict(VERSIONS))
    monkeypatch.setattr(profiles, "gpu_names", lambda arch: here.gpus.get(arch, []))
    monkeypatch.setattr(profiles, "versions", lambda: here.versions)
    monkeypatch.setattr(BACKENDS, "table", BACKENDS.table)  # for it to be put back
    for backend in ("triton", "flex"):
        replace_backend(backend, probe=lambda: Availability(True))
    profiles.forget()
    return here


def install(profile: Profile) -> Path:
    """Write a profile where it belongs, and have it read."""
    path = profiles.path_of(profile.gpu)
    write(profile, path)
    profiles.forget()
    return path


def chosen(**call: Any) -> tuple[str | None, str | None]:
    actual = explain_problem(**{**CALL, **call})
    return actual.forward, actual.backward


# The file


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = {"long": {"triton": Figures(0.25, 1.5), "eager": Figures(3.0), "flex": Figures(error="it refuses: no")}}
    profile = profile_of(rows=rows, wrong={"flex": "it failed the check 'causal'"})
    assert parse(dump(profile)) == profile
    path = tmp_path / "new" / "folder" / "a.json"
    write(profile, path)
    assert read(path) == profile
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o077 == 0
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize("end", [KeyboardInterrupt, OSError])
def test_a_profile_that_is_not_written_leaves_the_one_before_alone(
    end: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write(profile_of(), path)

    def ended(*paths: object) -> None:
        raise end

    monkeypatch.setattr(os, "replace", ended)
    with pytest.raises(end):
        write(profile_of(triton=SLOW), path)
    assert read(path) == profile_of() and list(tmp_path.iterdir()) == [path]


def damaged(change: Callable[[dict[str, Any]], object]) -> str:
    fields = json.loads(dump(profile_of()))
    change(fields)
    return json.dumps(fields)


DAMAGED: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "is damaged: Expecting property name"),
    "empty": ("", "is damaged: Expecting value"),
    "deep": ("[" * 100_000, "is damaged: "),
    "a list": ("[1]", "is damaged: it has no field 'format'"),
    "other format": (damaged(lambda p: p.update(format=FORMAT + 1)), f"has format {FORMAT + 1}; this version"),
    "no gpu": (damaged(lambda p: p.pop("gpu")), "field 'gpu' is None; it needs to be a str"),
    "torch a number": (damaged(lambda p: p.update(torch=2)), "field 'torch' is 2; it needs to be a str"),
    "rows a list": (damaged(lambda p: p.update(rows=[])), "field 'rows' is []; it needs to be a dict"),
    "a row a number": (damaged(lambda p: p["rows"].update(long=3)), "field 'long' is 3; it needs to be a dict"),
    "wrong a list": (damaged(lambda p: p.update(wrong=["flex"])), "field 'wrong' is ['flex']; it needs to be a dict"),
    "no figures": (damaged(lambda p: p["rows"]["long"].update(triton=None)), "'long', triton has None; it needs milli"),
    **{
        f"figure {text}": (
            damaged(lambda p: p["rows"]["long"].update(flex={"forward": "FIGURE"})).replace('"FIGURE"', text),
            "is damaged: 'long', flex took ",
        )
        for text in ("0", "-1.5", "NaN", "Infinity", "true", '"1"', "null", "1" + "0" * 400)
    },
    "backward": (
        damaged(lambda p: p["rows"]["long"].update(flex={"forward": 1.0, "backward": -1})),
        "is damaged: 'long', flex took -1 ms; it needs to be a positive number",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_profile_is_ignored_with_its_fault(name: str) -> None:
    text, message = DAMAGED[name]
    with pytest.raises(ProfileError) as caught:
        parse(text)
    assert message in str(caught.value)
    install(profile_of()).write_text(text)
    choice, reason = reread()
    assert choice == WITHOUT and message in reason


def test_a_file_that_is_no_text_or_too_long_is_damaged() -> None:
    path = install(profile_of())
    for content, message in ((b"\xff\xfe", "is damaged: 'utf-8' codec"), (b" " * (1 << 20) + b"1", "1048577 bytes")):
        path.write_bytes(content)
        with pytest.raises(ProfileError, match=message):
            read(path)


# The owner of the file, its place, and its GPU


def reread() -> tuple[tuple[str | None, str | None], str]:
    """The choice for a call after the profile has been read anew, and why none is in force."""
    profiles.forget()
    return chosen(), profiles.find("sm_80").reason


WITHOUT, IN_FORCE = ("sdpa", None), ("triton", None)


def test_a_profile_of_this_gpu_and_versions_is_in_force_whatever_the_driver() -> None:
    for profile in (profile_of(), profile_of(driver="1.0")):
        path = install(profile)
        assert path == profiles.folder() / "NVIDIA-A100-SXM4-80GB.json"
        assert profiles.find("sm_80") == (str(path), profile, "")
        assert chosen() == IN_FORCE and chosen(grad=True) == ("triton", "triton")


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o400, 0o620, 0o602, 0o666, 0o664])
def test_a_profile_counts_if_nobody_else_may_write_it(mode: int) -> None:
    install(profile_of()).chmod(mode)
    choice, reason = reread()
    if mode & 0o022:
        assert choice == WITHOUT and f"has mode {mode:o}, so others may write it; chmod go-w" in reason
    else:
        assert choice == IN_FORCE


def test_a_profile_of_another_user_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    path = install(profile_of())
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 7)
    if path.stat().st_uid == 0:  # root may do everything anyway, so one of root's is as good as one's own
        assert chosen() == IN_FORCE
        os.chown(path, 12345, -1)
    choice, reason = reread()
    assert choice == WITHOUT and "belongs to another user, " in reason


OTHERS = {
    "gpu": ("NVIDIA A30", "the GPU NVIDIA A30, and here it is NVIDIA A100-SXM4-80GB"),
    "arch": ("sm_86", "the architecture sm_86, and here it is sm_80"),
    "library": ("0.0.9", f"flash_dmattn 0.0.9, and here it is {flash_dmattn.__version__}"),
    "torch": ("2.10.0", "torch 2.10.0, and here it is 2.11.0"),
    "triton": ("3.5.0", "triton 3.5.0, and here it is 3.6.0"),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_profile_of_another_gpu_or_version_is_ignored(field: str) -> None:
    value, message = OTHERS[field]
    path = profiles.path_of(GPU)
    write(profile_of()._replace(**{field: value}), path)
    assert reread() == (WITHOUT, f"{path} was made with {message}")


def test_a_machine_whose_gpus_say_nothing_has_no_profile(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(arch: str) -> list[str]:
        raise RuntimeError("CUDA driver initialization failed")

    with monkeypatch.context() as patch:
        patch.setattr(profiles, "gpu_names", lambda arch: pytest.fail("asking for GPUs takes memory on them"))
        assert reread() == (WITHOUT, f"there is none in {profiles.folder()}")
    install(profile_of())
    for names, message in (
        ([], "this machine has no GPU of sm_80"),
        (["A", "B"], "this machine has several models of sm_80: A, B"),
    ):
        machine.gpus["sm_80"] = names
        assert reread() == (WITHOUT, message)
    monkeypatch.setattr(profiles, "gpu_names", fails)
    assert reread() == (WITHOUT, "it cannot be looked for: CUDA driver initialization failed")


def test_profiles_can_be_named_and_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(profile_of(triton=SLOW))
    write(profile_of(), tmp_path / "mine.json")
    os.mkfifo(tmp_path / "pipe")
    for setting, choice, reason in (
        ("", ("flex", None), ""),
        (str(tmp_path / "mine.json"), IN_FORCE, ""),
        ("off", WITHOUT, "FLASH_DMATTN_PROFILE=off"),
        (str(tmp_path / "none.json"), WITHOUT, f"{tmp_path / 'none.json'} does not exist"),
        (str(tmp_path / "pipe"), WITHOUT, f"{tmp_path / 'pipe'} is no regular file"),
        (str(tmp_path), WITHOUT, f"{tmp_path} is no regular file"),
    ):
        monkeypatch.setattr(config.process, "profile", setting)
        assert reread() == (choice, reason)


def test_a_relative_folder_of_caches_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert profiles.folder() == Path("/home/somebody/.cache/flash_dmattn")


def test_a_profile_is_read_once_and_again_after_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    monkeypatch.setattr(profiles, "read", lambda path: reads.append(path) or read(path))
    path = install(profile_of())
    assert not reads, "reading is lazy"
    explain_problem(**{**CALL, "device": "cpu"})
    explain_problem(**{**CALL, "device": "gfx942"})
    explain_problem(**{**CALL, "device": "sm_90"})
    assert not reads, "of this machine's other devices"
    for _ in range(3):
        assert chosen() == ("triton", None)
    assert reads == [path]
    path.write_text(dump(profile_of(triton=SLOW)))
    assert chosen() == ("triton", None)
    profiles.forget()
    assert chosen() == ("flex", None)
    assert reads == [path, path]


def test_a_new_profile_makes_remembered_calls_choose_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 4, 2, 8)
    flash_dmattn.attention(x, x, x)
    with monkeypatch.context() as patch:
        patch.setattr(selection, "candidates", lambda problem: pytest.fail("the choice is remembered"))
        flash_dmattn.attention(x, x, x)
    assert len(calls.plans) == 1
    profiles.forget()
    assert len(calls.plans) == 0


# Rows

ROW_CALLS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "long": ({}, ("long",)),
    "long, causal and window": ({"is_causal": True, "window_size": (64, 0), "softcap": 3.0}, ("long",)),
    "fp16": ({"dtype": "fp16"}, ("long",)),
    "fp32": ({"dtype": "fp32"}, ()),
    "fp64": ({"dtype": "fp64"}, ()),
    "1024 keys": ({"q": (2, 1024, 16, 64)}, ("long",)),
    "1023 keys": ({"q": (2, 1023, 16, 64)}, ("short",)),
    "few keys for many queries": ({"seqlen_k": 77}, ("short",)),
    "decode": ({"q": (2, 1, 16, 64), "seqlen_k": 4096}, ("decode",)),
    "16 queries": ({"q": (2, 16, 16, 64), "seqlen_k": 100}, ("decode",)),
    "17 queries": ({"q": (2, 17, 16, 64), "seqlen_k": 4096}, ("long",)),
    "16 queries, gradients": ({"q": (2, 16, 16, 64), "seqlen_k": 4096, "grad": True}, ("long",)),
    "head dim 65": ({"q": (2, 4096, 16, 65)}, ("wide heads",)),
    "head dim of v": ({"head_dim_v": 128}, ("wide heads",)),
    "groups": ({"kv_heads": 4}, ("grouped heads",)),
    "key mask": ({"mask": (2, 1, 1, 4096)}, ("key mask",)),
    "prepared key mask": ({"mask": (2, 1, 1, 4096), "mask_prepared": True}, ("key mask",)),
    "mask": ({"mask": (1, 1, 4096, 4096)}, ("dense mask",)),
    "prepared mask": ({"mask": (1, 16, 4096, 4096), "mask_prepared": True}, ("dense mask",)),
    "bias per key": ({"bias": (1, 16, 1, 4096)}, ("bias per key",)),
    "bias per query, dbias": ({"bias": (1, 16, 4096, 1), "bias_grad": True}, ("bias per query, dbias",)),
    "bias, dq": ({"bias": (1, 16, 4096, 4096), "grad": True}, ("bias per score",)),
    "all": (
        {"q": (2, 500, 16, 128), "kv_heads": 4, "mask": (2, 1, 500, 500), "bias": (2, 16, 500, 500), "bias_grad": True},
        ("dense mask", "bias per score, dbias", "grouped heads", "wide heads", "short"),
    ),
    "grouped decoding with a key mask": (
        {"q": (2, 1, 16, 64), "kv_heads": 4, "seqlen_k": 4096, "mask": (2, 1, 1, 4096)},
        ("key mask", "grouped heads", "decode"),
    ),
}


@pytest.mark.parametrize("name", ROW_CALLS)
def test_rows_of_a_call(name: str) -> None:
    call, rows = ROW_CALLS[name]
    assert rows_of(explain_problem(**{**CALL, **call}).problem) == rows
    assert set(rows) <= {row.name for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_call_of_a_row_belongs_to_it(row: Any) -> None:
    call = {
        "q": (row.batch, row.seqlen_q, 16, row.head_dim),
        "kv_heads": row.num_heads_k,
        "seqlen_k": row.seqlen_k,
        "mask": row.mask_shape,
        "bias": row.bias_shape,
        "grad": row.grad,
        "bias_grad": row.dbias,
    }
    assert rows_of(explain_problem(**{**CALL, **call}).problem) == (row.name,)


# Decisions

# (triton, flex, eager, wrong) -> what auto takes where every backend accepts the call, and where flex refuses it.
DECISIONS: dict[str, tuple[Figures, Figures, Figures, tuple[str, ...], str, str]] = {
    "triton first": (FAST, MIDDLE, SLOW, (), "triton", "triton"),
    "flex first": (MIDDLE, FAST, SLOW, (), "flex", "triton"),
    "equal": (FAST, FAST, SLOW, (), "flex", "triton"),
    "triton last": (SLOW, FAST, MIDDLE, (), "flex", "eager"),
    "eager first": (MIDDLE, SLOW, FAST, (), "flex", "eager"),
    "triton wrong": (FAST, MIDDLE, SLOW, ("triton",), "flex", "eager"),
    "triton failed": (NO, MIDDLE, SLOW, (), "flex", "eager"),
    "flex wrong": (MIDDLE, FAST, SLOW, ("flex",), "triton", "triton"),
    "flex failed": (MIDDLE, NO, SLOW, (), "triton", "triton"),
    "flex and triton failed": (NO, NO, SLOW, (), "eager", "eager"),
    "eager failed": (MIDDLE, FAST, NO, (), "flex", "triton"),
    "eager wrong": (MIDDLE, FAST, Figures(0.1, 0.1), ("eager",), "flex", "triton"),
    "slower than eager, flex failed": (SLOW, NO, FAST, (), "eager", "eager"),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120"])
@pytest.mark.parametrize("name", DECISIONS)
@pytest.mark.filterwarnings("ignore::flash_dmattn.FallbackWarning")
def test_auto_goes_by_the_figures(name: str, arch: str, machine: SimpleNamespace) -> None:
    *figures, wrong, all_accept, flex_refuses = DECISIONS[name]
    machine.gpus[arch] = [GPU]
    install(profile_of(*figures, arch=arch, wrong={backend: "it failed the check 'mask'" for backend in wrong}))
    assert chosen(device=arch) == (all_accept, None)
    assert chosen(device=arch, grad=True) == (all_accept, all_accept)
    # FlexAttention takes head dims from 16 on, and no gradient of a bias in a fixed order.
    refused = {"bias": (1, 16, 1, 4096), "bias_grad": True, "deterministic": True}
    assert chosen(device=arch, **refused) == (flex_refuses, flex_refuses)
    assert chosen(device=arch, q=(2, 4096, 16, 8)) == (flex_refuses, None)


# (sdpa, triton, flex) -> what auto takes.
WITH_SDPA: dict[str, tuple[Figures, Figures, Figures, str]] = {
    "sdpa first": (FAST, MIDDLE, MIDDLE, "sdpa"),
    "all equal": (FAST, FAST, FAST, "sdpa"),
    "triton first": (MIDDLE, FAST, MIDDLE, "triton"),
    "flex first": (MIDDLE, MIDDLE, FAST, "flex"),
    "sdpa slower than eager": (Figures(10.0, 30.0), SLOW, SLOW, "flex"),
    "sdpa failed": (NO, MIDDLE, FAST, "flex"),
}


@pytest.mark.parametrize("name", WITH_SDPA)
def test_sdpa_is_ranked_by_its_figures(name: str) -> None:
    sdpa, triton, flex, taken = WITH_SDPA[name]
    install(profile_of(triton=triton, flex=flex, sdpa=sdpa))
    assert chosen() == (taken, None) and chosen(grad=True) == (taken, taken)


CPU = {"device": "cpu", "dtype": "fp32"}
# (sdpa, eager) -> the backends of both passes of a long call, where the rules of sdpa prefer it for both.
ON_CPU: dict[str, tuple[Figures, Figures, tuple[str, str]]] = {
    "sdpa first": (FAST, SLOW, ("sdpa", "sdpa")),
    "eager first": (SLOW, FAST, ("eager", "eager")),
    "each pass by itself": (Figures(1.0, 9.0), Figures(2.0, 3.0), ("sdpa", "eager")),
    "equal": (FAST, FAST, ("eager", "eager")),
    "sdpa failed": (NO, SLOW, ("eager", "eager")),
}


@pytest.mark.parametrize("name", ON_CPU)
def test_a_profile_of_the_cpu_chooses_each_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa, eager, taken = ON_CPU[name]
    monkeypatch.setattr(profiles, "gpu_names", lambda arch: ["A CPU"] if arch == "cpu" else [])
    assert chosen(**CPU, grad=True) == ("sdpa", "sdpa") and explain_problem(**CALL | CPU).profile is None
    rows = {row.name: {"sdpa": sdpa, "eager": eager} for row in ROWS}
    path = install(profile_of(gpu="A CPU", arch="cpu", rows=rows))
    actual = explain_problem(**CALL | CPU, grad=True)
    assert (actual.forward, actual.backward) == taken
    assert actual.profile is not None and actual.profile.startswith(f"{path} decided: long: sdpa ")
    assert chosen(**CPU | {"dtype": "fp64"}, grad=True) == ("eager", "eager")
    # It decides between what the rules leave to choose.
    assert chosen(**CPU, window_size=(9, 0)) == ("eager", None)


def test_the_cpu_has_a_name() -> None:
    assert profiles.cpu_name()
    assert profiles.find("cpu").reason == f"there is none in {profiles.folder()}"


SEQUENCES = {"q": (1, 8192, 16, 64), "sequences": SequenceSpec("packed", 8, 8192, 8192, 2048, 2048)}
# FlexAttention and sdpa refuse these: dropout, a gradient of a bias in a fixed order, narrow heads.
REFUSED_BY_FLEX: dict[str, dict[str, Any]] = {
    "sequences, dropout": SEQUENCES | {"dropout_p": 0.1},
    "dropout": {"dropout_p": 0.1},
    "fixed order": {"bias": (1, 16, 1, 4096), "bias_grad": True, "deterministic": True},
    "narrow heads": {"q": (2, 4096, 16, 12)},
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
@pytest.mark.parametrize("name", REFUSED_BY_FLEX)
def test_unmeasured_kernels_go_before_eager(name: str, arch: str) -> None:
    """And flex before them; a pair of both passes, and no warning of a fallback."""
    call = REFUSED_BY_FLEX[name] | {"device": arch}
    assert chosen(**call) == (("triton",) * 2 if "bias_grad" in call else ("triton", None))
    assert chosen(**call | {"grad": True}) == ("triton", "triton")
    assert chosen(device=arch, grad=True) == ("sdpa", "sdpa")
    problem = explain_problem(**CALL | call).problem
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selection.choose(problem, "auto").forward.name == "triton"
    with flash_dmattn.config(disabled=("triton", "sdpa")):
        assert chosen(**call)[0] == "eager"
    older = chosen(**call | {"device": "sm_75"})
    assert older[0] == "eager", "nobody compiles the kernels for these"


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
def test_unmeasured_kernels_take_sequences_before_flex(arch: str) -> None:
    """They read sequences as they lie; flex copies them."""
    assert chosen(**SEQUENCES, device=arch, grad=True) == ("triton", "triton")
    with flash_dmattn.config(disabled="triton"):
        assert chosen(**SEQUENCES, device=arch, grad=True) == ("sdpa", "sdpa")
    assert chosen(**SEQUENCES, device="sm_75", dtype="fp16", grad=True) == ("flex", "flex")
    flex = BACKENDS["flex"]
    flash_dmattn.unregister_backend("flex")
    try:
        assert chosen(**SEQUENCES, device=arch, grad=True) == ("triton", "triton")
    finally:
        flash_dmattn.register_backend(flex, before="sdpa")


def test_triton_has_to_win_in_every_row_of_a_call() -> None:
    profile = profile_of()
    profile.rows["dense mask"]["triton"] = SLOW._replace(forward=1.6, backward=4.0)
    install(profile)
    assert chosen(kv_heads=4) == ("triton", None)
    assert chosen(mask=(1, 1, 4096, 4096)) == ("flex", None)
    assert chosen(mask=(1, 1, 4096, 4096), kv_heads=4) == ("flex", None)


def test_rows_that_were_not_reached_are_as_without_a_profile() -> None:
    profile = profile_of()
    del profile.rows["grouped heads"]
    profile.rows["long"]["triton"] = Figures(1.0)
    path = install(profile)
    assert chosen(kv_heads=4) == ("sdpa", None)
    assert chosen(kv_heads=4, mask=(1, 1, 4096, 4096)) == ("flex", None)
    assert f"the profile {path} lacks figures of 'grouped heads'" in str(explain_problem(**CALL, kv_heads=4))
    assert chosen() == ("triton", None)
    assert chosen(grad=True) == ("sdpa", "sdpa")  # its backward pass was not timed
    assert chosen(dtype="fp32") == ("sdpa", None)  # as without a profile: triton multiplies on CUDA cores
    assert f"the profile {path} is of bf16 and fp16" in str(explain_problem(**{**CALL, "dtype": "fp32"}))


def test_a_row_without_a_figure_of_each_backend_says_nothing() -> None:
    assert profiles.measured_on("sm_90") == ("triton", "flex", "sdpa", "eager")
    profile = profile_of()
    assert judge(profile, (), False) is None
    assert judge(profile, ("long", "no such row"), False) is None
    for absent in profiles.measured_on("sm_90"):
        row = {name: x for name, x in profile.rows["long"].items() if name != absent}
        assert judge(profile_of(rows={"long": row}), ("long",), False) is None


def test_other_devices_have_no_profile() -> None:
    install(profile_of())
    assert chosen(device="gfx942") == ("sdpa", None)
    assert chosen(device="cpu") == ("eager", None)
    assert chosen(device="sm_75") == ("flex", None)
    for device in ("gfx942", "cpu", "sm_90", "sm_75"):
        assert explain_problem(**{**CALL, "device": device}).profile is None
    assert profiles.find("gfx942").reason == "profiles are of CPUs and of NVIDIA GPUs from sm_80 on, and this is gfx942"


def test_a_named_backend_is_taken_whatever_the_profile_says() -> None:
    install(profile_of(triton=SLOW))
    assert chosen(backend="triton") == ("triton", None)
    assert explain_problem(**CALL, backend="triton").profile is None


@pytest.mark.parametrize("rules", ["built-in", "profile"])
def test_on_hopper_the_built_in_rules_stay_unless_they_are_switched_off(
    rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.process, "rules", rules)
    replace_backend("cuda", probe=lambda: Availability(True))
    monkeypatch.setattr(flash_dmattn.backends.cuda.rules, "installed_instances", lambda: None)
    built_in = rules == "built-in"
    for triton_time, measured in ((FAST, "triton"), (SLOW, "flex")):
        path = install(profile_of(triton=triton_time, gpu="NVIDIA H200", arch="sm_90"))
        actual = explain_problem(**{**CALL, "device": "sm_90"})
        assert actual.forward == ("cuda" if built_in else measured)
        assert (actual.profile is None) == built_in
    path.unlink()
    profiles.forget()
    actual = explain_problem(**{**CALL, "device": "sm_90"})
    assert actual.forward == ("cuda" if built_in else "sdpa"), "as on a GPU that nobody has measured"
    (cuda,) = (verdict for verdict in actual.verdicts if verdict.backend == "cuda")
    assert [reason.code for reason in cuda.preferences] == ([] if built_in else ["profile"])
    assert chosen(device="sm_90", dtype="fp32") == (("triton" if built_in else "flex"), None)


def test_the_switch_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_DMATTN_RULES", "none")
    fresh = type(config.process)()
    message = "FLASH_DMATTN_RULES is 'none'; it needs to be one of 'built-in', 'profile'"
    assert fresh.environment_error == message
    monkeypatch.setenv("FLASH_DMATTN_RULES", "profile")
    monkeypatch.setenv("FLASH_DMATTN_PROFILE", " some/where.json ")
    fresh = type(config.process)()
    assert (fresh.rules, fresh.profile, fresh.environment_error) == ("profile", "some/where.json", None)


# Messages


def test_explain_cites_the_profile_that_decided() -> None:
    path = install(profile_of(flex=Figures(1.5, 3.0)))
    actual = explain_problem(**CALL, kv_heads=4, mask=(1, 1, 4096, 4096), grad=True)
    figures = "triton 3 ms, flex 4.5 ms, sdpa failed, eager 29 ms"
    why = f"{path} decided: dense mask: {figures}; grouped heads: {figures}; forward and backward"
    assert actual.profile == actual.to_dict()["profile"] == why
    assert f"profile: {why}\n" in str(actual)
    install(profile_of(triton=SLOW))
    actual = explain_problem(**CALL)
    (verdict,) = (verdict for verdict in actual.verdicts if verdict.backend == "triton")
    (reason,) = verdict.preferences
    assert reason.code == "profile"
    assert reason.text == "measured on this GPU: long: triton 9 ms, flex 1.5 ms, sdpa failed, eager 9 ms; forward"


def test_explain_says_which_check_failed() -> None:
    install(profile_of(wrong={"triton": "it failed the check 'mask'"}))
    assert "triton is not right there: it failed the check 'mask'; long: triton 1 ms" in str(explain_problem(**CALL))
    install(profile_of(wrong={"flex": "it failed the check 'mask'"}))
    assert "auto passes it over: on this GPU it failed: it failed the check 'mask'" in str(explain_problem(**CALL))


def test_without_a_profile_explain_and_the_warning_name_the_command() -> None:
    path = install(profile_of())
    path.chmod(0o666)
    profiles.forget()
    actual = explain_problem(**CALL)
    assert f"no profile is in force: {path} has mode 666" in str(actual)
    command = "python -m flash_dmattn calibrate"
    assert actual.profile is not None and command in actual.profile and actual.forward == "sdpa"
    (verdict,) = (verdict for verdict in actual.verdicts if verdict.backend == "triton")
    assert command in verdict.preferences[0].hint
    refused = explain_problem(**CALL, bias=(1, 16, 1, 4096), bias_grad=True, deterministic=True).problem
    assert selection.choose(refused, "auto").forward.name == "triton"
    with (
        flash_dmattn.config(disabled=("triton", "sdpa")),
        pytest.warns(flash_dmattn.FallbackWarning, match=f"{command} does, for auto to take them"),
    ):
        assert selection.choose(refused, "auto").forward.name == "eager"
        selection.report_fallback(refused)


@pytest.mark.parametrize(("figures", "name"), [(FAST, "triton"), (SLOW, "flex")])
def test_the_choice_by_a_profile_is_traced_whole(figures: Figures, name: str) -> None:
    install(profile_of(triton=figures))
    problem = explain_problem(**CALL, kv_heads=4).problem

    @torch.compile(fullgraph=True, backend="eager")
    def chosen_in_graph(x: torch.Tensor) -> torch.Tensor:
        return x + (1.0 if name == selection.choose(problem, "auto").forward.name else 0.0)

    assert chosen_in_graph(torch.zeros(())).item() == 1.0
