"""Profiles: the times that `python -m flash_dmattn calibrate` has measured on a GPU or a CPU, and their use by auto.

A profile is a file in the user's cache folder. It is used if no other user can have written it, and if it was made on
this device with these versions. It is loaded once.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import stat
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from .._version import __version__
from ..backends.sdpa.backend import leads_in_fp32, runs_flash
from ..definition import assume_constant
from ..problem import AttentionProblem, BiasClass, device_arch, sm_number
from ..triton_kernels import preferred_tiles
from ..triton_kernels.preferred_tiles import Sizes
from .config import process
from .registry import choices_changed

COMMAND = "python -m flash_dmattn calibrate"
FORMAT = 2  # increase it if the meaning of fields or of classes of calls changes
_MAX_BYTES = 1 << 20
LEAST_ARCH = 80  # of the Triton kernels

NUM_HEADS, _HEAD_DIM = 16, 64
_DECODED = 16  # queries: a call without gradients and with at most this number is decoding
_LONG = 1024  # keys: from here on a call is long
_TIMED_DTYPES = {"cuda": (torch.bfloat16, torch.float16), "cpu": (torch.float32,)}


class Row(NamedTuple):
    """A class of calls, by one call of it, with gradients unless `grad` is False.

    The call is timed in bf16 on GPUs, and in fp32 with a fourth of its lengths on CPUs.
    """

    name: str
    seqlen_q: int
    seqlen_k: int
    batch: int = 2
    num_heads_k: int = NUM_HEADS
    head_dim: int = _HEAD_DIM
    mask: Literal["none", "key", "dense"] = "none"
    bias: BiasClass | None = None
    dbias: bool = False
    grad: bool = True

    @property
    def mask_shape(self) -> tuple[int, int, int, int] | None:
        """Shape of the mask, with one head."""
        rows = 1 if self.mask == "key" else self.seqlen_q
        return None if self.mask == "none" else (self.batch, 1, rows, self.seqlen_k)

    @property
    def bias_shape(self) -> tuple[int, int, int, int] | None:
        """Shape of the bias, with one batch entry."""
        rows, keys = 1 if self.bias == "key" else self.seqlen_q, 1 if self.bias == "query" else self.seqlen_k
        return None if self.bias is None else (1, NUM_HEADS, rows, keys)


# Rows that most programs need come first: if there is little time, the last ones are not measured.
ROWS: tuple[Row, ...] = (
    Row("long", 4096, 4096),
    Row("dense mask", 2048, 2048, mask="dense"),
    Row("bias per score, dbias", 2048, 2048, bias="score", dbias=True),
    Row("bias per key, dbias", 2048, 2048, bias="key", dbias=True),
    Row("short", 512, 512, batch=8),
    Row("decode", 1, 4096, batch=8, grad=False),
    Row("key mask", 2048, 2048, mask="key"),
    Row("grouped heads", 2048, 2048, num_heads_k=4),
    Row("wide heads", 2048, 2048, head_dim=128),
    Row("bias per score", 2048, 2048, bias="score"),
    Row("bias per key", 2048, 2048, bias="key"),
    Row("bias per query, dbias", 2048, 2048, bias="query", dbias=True),
    Row("bias per query", 2048, 2048, bias="query"),
)


def rows_of(p: AttentionProblem) -> tuple[str, ...]:
    """Return the names of the rows of a call, one for each of its features; () if its dtype is not timed.

    | feature of the call | row |
    | --- | --- |
    | mask | "key mask" or "dense mask" |
    | bias | "bias per key" or "query" or "score", with ", dbias" if it needs a gradient |
    | k has another number of heads than q | "grouped heads" |
    | a head dim above 64 | "wide heads" |
    | up to 16 queries, without gradients | "decode" |
    | else less than 1024 keys | "short" |
    | no such feature | "long" |

    Causality, windows, softcap and determinism do not matter. On GPUs fp16 counts as bf16; fp32 and fp64 are not
    timed. On CPUs only fp32 is.
    """
    if p.dtype not in _TIMED_DTYPES.get(p.device, ()):
        return ()
    parts: list[str] = []
    if p.mask is not None:
        parts.append("key mask" if p.mask_form in ("keys", "intervals") or p.mask.broadcast()[2] else "dense mask")
    if p.dbias_class is not None:
        parts.append(f"bias per {p.dbias_class}, dbias")
    elif p.bias_class is not None:
        parts.append(f"bias per {p.bias_class}")
    if p.num_heads_k != p.num_heads:
        parts.append("grouped heads")
    if max(p.head_dim, p.head_dim_v) > _HEAD_DIM:
        parts.append("wide heads")
    if p.seqlen_q <= _DECODED and not any(p.needs_grad):
        parts.append("decode")
    elif p.seqlen_k < _LONG:
        parts.append("short")
    return tuple(parts) or ("long",)


class ProfileError(ValueError):
    """A file cannot be used as a profile; the message continues a sentence that begins with the name of the file."""


class Figures(NamedTuple):
    """Milliseconds of one backend on one class of calls, None for a pass that was not timed; or an error."""

    forward: float | None = None
    backward: float | None = None
    error: str = ""

    def total(self, with_gradients: bool) -> float | None:
        """Return the milliseconds of a forward pass, with gradients of both passes; None if they were not timed."""
        if self.forward is None or not with_gradients:
            return self.forward
        return None if self.backward is None else self.forward + self.backward


class Profile(NamedTuple):
    """The figures of one device, and the versions that they are valid for."""

    gpu: str  # the vendor's name of the GPU, or of the CPU
    arch: str  # see `device_arch`
    library: str
    torch: str
    triton: str
    driver: str  # for information only, as `made`, the time
    made: str
    wrong: dict[str, str]  # backend -> the check against the formula that it failed; only backends that failed
    rows: dict[str, dict[str, Figures]]  # row -> backend -> figures
    tiles: dict[str, Sizes] = {}  # the fastest tile of each class of tiles


def dump(profile: Profile) -> str:
    rows = {
        row: {
            name: {"error": x.error} if x.error else {"forward": x.forward, "backward": x.backward}
            for name, x in figures.items()
        }
        for row, figures in profile.rows.items()
    }
    return json.dumps({"format": FORMAT, **profile._asdict(), "rows": rows}, indent=2) + "\n"


def parse(text: str) -> Profile:
    """Parse a profile; refuse another format, and fields that are no possible figures."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"is damaged: {error}") from None
    if not isinstance(fields, dict) or "format" not in fields:
        raise ProfileError("is damaged: it has no field 'format'")
    if fields["format"] != FORMAT:
        raise ProfileError(f"has format {fields['format']!r}; this version of flash_dmattn reads format {FORMAT}")
    words = {name: _typed(fields, name, str) for name in Profile._fields[:7]}
    wrong = _typed(fields, "wrong", dict)
    rows = {row: _typed(fields["rows"], row, dict) for row in _typed(fields, "rows", dict)}
    return Profile(
        **words,
        wrong={backend: _typed(wrong, backend, str) for backend in wrong},
        rows={row: {name: _figures(x, f"{row!r}, {name}") for name, x in rows[row].items()} for row in rows},
        tiles={name: _sizes(x, name) for name, x in _typed({"tiles": {}, **fields}, "tiles", dict).items()},
    )


def _typed(fields: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(fields.get(name), kind):
        raise ProfileError(f"is damaged: field {name!r} is {fields.get(name)!r}; it needs to be a {kind.__name__}")
    return fields[name]


def _figures(fields: object, where: str) -> Figures:
    if isinstance(fields, dict) and isinstance(fields.get("error"), str) and fields["error"]:
        return Figures(error=fields["error"])
    if not isinstance(fields, dict) or "forward" not in fields:
        raise ProfileError(f"is damaged: {where} has {fields!r}; it needs milliseconds of both passes or an error")
    times = [fields["forward"], fields.get("backward")]
    for time in times[: 1 if times[1] is None else 2]:
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 < time < 1e9:
            raise ProfileError(f"is damaged: {where} took {time!r} ms; it needs to be a positive number")
    return Figures(*times)


def _sizes(sizes: object, name: str) -> Sizes:
    if not isinstance(sizes, list) or len(sizes) != 4 or any(type(size) is not int for size in sizes):
        raise ProfileError(f"is damaged: tile {name!r} is {sizes!r}; it needs to be four integers")
    return sizes[0], sizes[1], sizes[2], sizes[3]


def read(path: Path) -> Profile:
    """Load a profile; refuse a file that users other than this one and root can have written."""
    try:
        # Non-blocking, because the path may be a pipe.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise ProfileError("does not exist") from None
    except OSError as error:
        raise ProfileError(f"cannot be read: {error.strerror}") from None
    try:
        # By the open file, because the path may be another file by now.
        _check_file(os.fstat(handle))
        with open(handle, "rb", closefd=False) as file:
            return parse(file.read(_MAX_BYTES).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"is damaged: {error}") from None
    finally:
        os.close(handle)


def _check_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ProfileError("is no regular file")
    if hasattr(os, "geteuid"):  # on systems where files have owners and modes
        if status.st_uid not in (os.geteuid(), 0):
            raise ProfileError(f"belongs to another user, {status.st_uid}; it needs to be yours")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(status.st_mode)
            raise ProfileError(f"has mode {mode:o}, so others may write it; chmod go-w makes it yours alone")
    if status.st_size > _MAX_BYTES:
        raise ProfileError(f"is damaged: it has {status.st_size} bytes, more than {_MAX_BYTES}")


def write(profile: Profile, path: Path, mode: int = 0o600) -> None:
    """Write a profile atomically: a reader gets the old file or the new one. By default only its user may read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(dump(profile))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)  # if the run was interrupted, or the disk is full


class Search(NamedTuple):
    """The profile of an architecture; None, and the reason, if none is used. `path` is "" if there is no file."""

    path: str
    profile: Profile | None
    reason: str = ""


@cache
def find(arch: str) -> Search:
    """Return the profile of this machine's GPU of an architecture, or of its CPU. It never raises.

    The file is loaded at the first call.
    """
    if process.profile == "off":
        return Search("", None, "FLASH_DMATTN_PROFILE=off")
    if not is_profiled(arch):
        return Search("", None, f"profiles are of CPUs and of NVIDIA GPUs from sm_{LEAST_ARCH} on, and this is {arch}")
    try:
        # Before torch looks for GPUs, which allocates memory on them.
        if process.profile == "" and not any(folder().glob("*.json")):
            return Search("", None, f"there is none in {folder()}")
        names = gpu_names(arch)
        if len(names) != 1:
            here = f"several models of {arch}: {', '.join(names)}" if names else f"no GPU of {arch}"
            return Search("", None, f"this machine has {here}")
        path = path_of(names[0])
    except (OSError, RuntimeError) as error:  # no home, a folder that cannot be read, a driver that fails
        return Search("", None, f"it cannot be looked for: {error}")
    try:
        profile = read(path)
    except ProfileError as error:
        return Search(str(path), None, f"{path} {error}")
    titles = {"gpu": "the CPU" if arch == "cpu" else "the GPU", "arch": "the architecture", "library": "flash_dmattn"}
    for name, here in {"gpu": names[0], "arch": arch, **versions()}.items():
        was = getattr(profile, name)
        if was != here:
            title = titles.get(name, name)
            return Search(str(path), None, f"{path} was made with {title} {was}, and here it is {here or 'not there'}")
    return Search(str(path), profile)


def forget() -> None:
    """Drop the loaded profiles, and the choices of backends and tiles that depend on them."""
    find.cache_clear()
    preferred_tiles.prefer(tiles_in_force)
    choices_changed()


def tiles_in_force(arch: str) -> dict[str, Sizes]:
    """Return the tiles of Triton kernels in the profile of this machine's GPU of an architecture.

    On Hopper there are none, because the tile table was measured there, unless FLASH_DMATTN_RULES=profile.
    """
    if sm_number(arch) is None or (arch == "sm_90" and process.rules != "profile"):
        return {}
    profile = find(arch).profile
    return {} if profile is None else profile.tiles


preferred_tiles.prefer(tiles_in_force)


# Paths in messages of exceptions, which may contain the name of a user or a machine.
_PATH = re.compile(r"""(?:[A-Za-z]:)?[^\s'"(:,]*[/\\][^\s'"):,]*""")


def shared(profile: Profile) -> Profile:
    """Return a profile without paths in its error messages, which may name its user or machine."""

    def without_paths(text: str) -> str:
        return _PATH.sub("(a path)", text)

    rows = {
        row: {name: x._replace(error=without_paths(x.error)) for name, x in figures.items()}
        for row, figures in profile.rows.items()
    }
    wrong = {backend: without_paths(why) for backend, why in profile.wrong.items()}
    return profile._replace(rows=rows, wrong=wrong)


def is_profiled(arch: str) -> bool:
    """Return whether an architecture can have a profile: CPUs, and GPUs on which the Triton kernels run."""
    return arch == "cpu" or (sm_number(arch) or 0) >= LEAST_ARCH


def folder() -> Path:
    """Return the folder of profiles: flash_dmattn in the user's cache folder."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    # Relative paths are ignored, as the XDG specification requires.
    return (Path(caches) if os.path.isabs(caches) else Path.home() / ".cache") / "flash_dmattn"


def path_of(gpu: str) -> Path:
    """Return the profile's file for the name of a GPU: FLASH_DMATTN_PROFILE if it is a file, else one in `folder`."""
    if process.profile not in ("", "off"):
        return Path(process.profile).expanduser()
    return folder() / f"{re.sub(r'[^A-Za-z0-9]+', '-', gpu).strip('-')}.json"


def versions() -> dict[str, str]:
    """Return the fields of a profile with the versions that it depends on; "" if Triton cannot be imported."""
    try:
        triton = str(importlib.import_module("triton").__version__)
    except Exception:  # a broken installation may raise any exception; the probe of the backend reports it
        triton = ""
    return {"library": __version__, "torch": str(torch.__version__), "triton": triton}


def _gpus() -> list[tuple[str, int]]:
    """Return the architecture and the index of each GPU of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [(device_arch(torch.device("cuda", index)), index) for index in range(count)]


def gpu_names(arch: str) -> list[str]:
    """Return the model names of this machine's GPUs of an architecture; for "cpu" the model name of its CPU."""
    if arch == "cpu":
        return [cpu_name()]
    return sorted({torch.cuda.get_device_name(index) for gpu_arch, index in _gpus() if gpu_arch == arch})


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # only Linux has this file
        pass
    return platform.processor() or platform.machine()


def arches_here() -> list[str]:
    """Return "cpu", and the architectures of this machine's GPUs that can have a profile."""
    return ["cpu", *sorted({arch for arch, _ in _gpus() if is_profiled(arch)})]


Passes = tuple[Literal["forward", "backward"], ...]
_BOTH: Passes = ("forward", "backward")


def measured_on(arch: str) -> tuple[str, ...]:
    """Return the backends that `calibrate` times on a GPU, or on a CPU."""
    return ("sdpa", "eager") if arch == "cpu" else ("triton", "flex", "sdpa", "eager")


class Judgement(NamedTuple):
    """The decision of a profile on a class of calls.

    Attributes:
        order: triton, flex and sdpa, in the order in which auto asks them.
        refused: (backend, why, passes): auto does not use this backend for these passes.
        why: the figures.
        wrong: backends of `refused` whose results were wrong; the others of them are slow.
    """

    order: tuple[str, ...]
    refused: tuple[tuple[str, str, Passes], ...]
    why: str
    wrong: tuple[str, ...] = ()


def usual_order(problem: AttentionProblem) -> tuple[str, ...]:
    """Return the order of triton, flex and sdpa on GPUs other than Hopper, if no figures decide.

    It is based on published figures of these kernels, and on our figures on Hopper.
    """
    order = _order(runs_flash(problem), problem.needs_grad.bias, problem.sequences is not None)
    return ("sdpa", *[name for name in order if name != "sdpa"]) if leads_in_fp32(problem) else order


def _order(is_plain: bool, has_dbias: bool, has_sequences: bool) -> tuple[str, ...]:
    # sdpa needs no compilation, triton has fast kernels for dbias, and flex copies sequences. Only triton was timed
    # with packed sequences.
    if is_plain:
        return ("triton", "sdpa", "flex") if has_sequences else ("sdpa", "flex", "triton")
    return ("triton", "flex", "sdpa") if has_dbias or has_sequences else ("flex", "triton", "sdpa")


def judge(profile: Profile, rows: tuple[str, ...], with_gradients: bool) -> Judgement | None:
    """Return the judgement of a profile on a call with these rows; None if it lacks a figure for them.

    A backend moves before another one of the usual order if it is faster in every row of the call. A backend that
    failed counts as slower. On CPUs each pass is judged separately, on GPUs the sum of the call's passes.
    """
    names = measured_on(profile.arch)
    if not rows or not all(set(names) <= profile.rows.get(row, {}).keys() for row in rows):
        return None
    times: dict[str, list[float | None]] = {name: [] for name in names}
    failed = {name: profile.wrong.get(name, "") for name in names}
    parts = []
    for row in rows:
        figures = profile.rows[row]
        for name in names:
            time = figures[name].total(with_gradients)
            if figures[name].error:
                failed[name] = failed[name] or f"{figures[name].error} ({row})"
            elif time is None:
                return None
            times[name].append(None if profile.wrong.get(name) else time)
        totals = {name: figures[name].total(with_gradients) for name in names}
        said = [f"{name} failed" if time is None else f"{name} {time:.3g} ms" for name, time in totals.items()]
        parts.append(f"{row}: {', '.join(said)}")
    why = "; ".join(parts) + ("; forward and backward" if with_gradients else "; forward")

    def beats(name: str, other: str) -> bool:
        pairs = zip(times[name], times[other], strict=True)
        return not failed[name] and all(slower is None or (ms is not None and ms < slower) for ms, slower in pairs)

    if profile.arch == "cpu":
        return Judgement((), _slower_passes(profile, rows, failed["sdpa"], why), why)
    has_dbias = any(row.endswith("dbias") for row in rows)
    order: list[str] = []
    for name in _order(not any("mask" in row or "bias" in row for row in rows), has_dbias, False):
        place = len(order)
        while place and beats(name, order[place - 1]):
            place -= 1
        order.insert(place, name)
    refused: list[tuple[str, str, Passes]] = []
    for name in ("triton", "sdpa"):
        if failed[name]:
            refused.append((name, f"measured on this GPU: {name} is not right there: {failed[name]}; {why}", _BOTH))
        elif not beats(name, "eager"):
            refused.append((name, f"measured on this GPU: {why}", _BOTH))
    if failed["flex"]:
        refused.append(("flex", f"on this GPU it failed: {failed['flex']}", _BOTH))
    return Judgement(tuple(order), tuple(refused), why, tuple(name for name in ("triton", "sdpa") if failed[name]))


def _slower_passes(
    profile: Profile, rows: tuple[str, ...], failed: str, why: str
) -> tuple[tuple[str, str, Passes], ...]:
    """Return the refusal of sdpa for the passes of a call on a CPU in which it is not faster than eager in all rows."""
    if failed:
        return (("sdpa", f"measured on this CPU: it is not right there: {failed}; {why}", _BOTH),)
    pairs = [(profile.rows[row]["sdpa"], profile.rows[row]["eager"]) for row in rows]

    def is_faster(ms: float | None, other: float | None) -> bool:
        return ms is None or other is None or ms < other

    forward = all(is_faster(sdpa.forward, eager.forward) for sdpa, eager in pairs)
    backward = all(is_faster(sdpa.backward, eager.backward) for sdpa, eager in pairs)
    slower: Passes = (*(() if forward else _BOTH[:1]), *(() if backward else _BOTH[1:]))
    return (("sdpa", f"measured on this CPU: {why}", slower),) if slower else ()


def goes_by_profile(problem: AttentionProblem) -> bool:
    """Return whether a profile, if any, decides about a call: on CPUs, and on NVIDIA GPUs other than Hopper.

    On Hopper the built-in rules were measured, so a profile decides only if FLASH_DMATTN_RULES=profile.
    """
    if problem.device not in ("cpu", "cuda") or not is_profiled(problem.arch):
        return False
    return problem.arch != "sm_90" or process.rules == "profile"


def judgement(problem: AttentionProblem) -> Judgement | None:
    """Return the judgement of the profile of this device on a call; None if the built-in rules decide."""
    if not goes_by_profile(problem) or not _has_profile(problem.arch):
        return None
    # For Dynamo the result of `_judged` is a constant, which may be a tuple but not a NamedTuple.
    judged = _judged(problem.arch, rows_of(problem), any(problem.needs_grad))
    return None if judged is None else Judgement(*judged)


@assume_constant  # it loads a file
def _has_profile(arch: str) -> bool:
    return find(arch).profile is not None


@assume_constant  # it loads a file
def _judged(
    arch: str, rows: tuple[str, ...], with_gradients: bool
) -> tuple[tuple[str, ...], tuple[tuple[str, str, Passes], ...], str] | None:
    profile = find(arch).profile
    judged = None if profile is None else judge(profile, rows, with_gradients)
    return None if judged is None else (judged.order, judged.refused, judged.why)


def why_unjudged(problem: AttentionProblem) -> str:
    path, profile, reason = find(problem.arch)
    if profile is None:
        return f"no profile is in force: {reason}"
    rows = rows_of(problem)
    if not rows:
        return f"the profile {path} is of {'fp32' if problem.device == 'cpu' else 'bf16 and fp16'}"
    return f"the profile {path} lacks figures of {', '.join(map(repr, rows))}"


def cite(problem: AttentionProblem) -> str | None:
    """Return the figures of a profile that decided, or why none did; None if no profile would be used.

    On a CPU without a profile it is also None, because the built-in rules are right for most CPUs.
    """
    if not goes_by_profile(problem) or (problem.device == "cpu" and not _has_profile("cpu")):
        return None
    judged = judgement(problem)
    if judged is None:
        order = ", ".join(usual_order(problem))
        return f"{why_unjudged(problem)}; {COMMAND} makes one; until then auto asks {order} in this order"
    return f"{find(problem.arch).path} decided: {judged.why}"
