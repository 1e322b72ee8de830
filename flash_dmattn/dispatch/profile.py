"""A profile: what `python -m flash_dmattn calibrate` measured on one GPU, as it stands in its file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1  # raised when the fields or the classes of calls change their meaning
_MAX_BYTES = 1 << 20


class ProfileError(ValueError):
    """A file is no profile that can be trusted; the message goes on after the name of the file."""


class Figures(NamedTuple):
    """Milliseconds of one backend on one class of calls, None for a pass that was not timed; or why there are none."""

    forward: float | None = None
    backward: float | None = None
    error: str = ""

    def of(self, with_gradients: bool) -> float | None:
        """Milliseconds of a call: its forward pass, with gradients both passes; None where they were not timed."""
        if self.forward is None or not with_gradients:
            return self.forward
        return None if self.backward is None else self.forward + self.backward


class Profile(NamedTuple):
    """What was measured, and on what.

    Attributes:
        gpu, arch: the GPU by its vendor's name and as `device_arch` has it.
        library, torch, triton: versions, which decide what the figures are worth.
        driver, made: the driver and the time, for people to read.
        wrong: by backend, which check against the formula it failed; one that passed them all is not in it.
        rows: by class of calls (see `profile_rows`), the figures of each backend.
    """

    gpu: str
    arch: str
    library: str
    torch: str
    triton: str
    driver: str
    made: str
    wrong: dict[str, str]
    rows: dict[str, dict[str, Figures]]


def dump(profile: Profile) -> str:
    """The text of the file."""
    fields = profile._asdict()
    fields["rows"] = {
        row: {backend: _written(found) for backend, found in figures.items()} for row, figures in profile.rows.items()
    }
    return json.dumps({"format": FORMAT, **fields}, indent=2) + "\n"


def _written(figures: Figures) -> dict[str, object]:
    return {"error": figures.error} if figures.error else {"forward": figures.forward, "backward": figures.backward}


def parse(text: str) -> Profile:
    """The profile of a file's text.

    Raises:
        ProfileError: a field is missing, is of another type, or is no possible figure; or the format is another.
    """
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
    rows = _typed(fields, "rows", dict)
    return Profile(
        **words,
        wrong={backend: _typed(wrong, backend, str) for backend in wrong},
        rows={
            row: {backend: _figures(found, f"{row!r}, {backend}") for backend, found in _typed(rows, row, dict).items()}
            for row in rows
        },
    )


def _typed(fields: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(fields.get(name), kind):
        raise ProfileError(f"is damaged: field {name!r} is {fields.get(name)!r}; it needs to be a {kind.__name__}")
    return fields[name]


def _figures(found: object, where: str) -> Figures:
    if isinstance(found, dict) and isinstance(found.get("error"), str) and found["error"]:
        return Figures(error=found["error"])
    if not isinstance(found, dict) or "forward" not in found:
        raise ProfileError(f"is damaged: {where} has {found!r}; it needs milliseconds of both passes or an error")
    times = [found["forward"], found.get("backward")]
    for time in times[: 1 if times[1] is None else 2]:
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 < time < 1e9:
            raise ProfileError(f"is damaged: {where} took {time!r} ms; it needs to be a positive number")
    return Figures(*times)


def read(path: Path) -> Profile:
    """The profile in a file that nobody but its user, or the system's administrator, can have written.

    Raises:
        ProfileError: there is no such file, others may write it, or it is damaged.
    """
    try:
        # Without waiting, in case somebody has put a pipe there.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise ProfileError("does not exist") from None
    except OSError as error:
        raise ProfileError(f"cannot be read: {error.strerror}") from None
    try:
        # Asked of the open file: a path may be another file by now.
        _check_file(os.fstat(handle))
        with open(handle, "rb", closefd=False) as file:
            return parse(file.read(_MAX_BYTES).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"is damaged: {error}") from None
    finally:
        os.close(handle)


def _check_file(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ProfileError("is no regular file")
    if hasattr(os, "geteuid"):  # where users and modes are those of POSIX
        if found.st_uid not in (os.geteuid(), 0):
            raise ProfileError(f"belongs to another user, {found.st_uid}; it needs to be yours")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(found.st_mode)
            raise ProfileError(f"has mode {mode:o}, so others may write it; chmod go-w makes it yours alone")
    if found.st_size > _MAX_BYTES:
        raise ProfileError(f"is damaged: it has {found.st_size} bytes, more than {_MAX_BYTES}")


def write(profile: Profile, path: Path) -> None:
    """Write a profile, readable and writable by its user alone; a reader sees the old file or the whole new one.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(dump(profile))
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
