"""The state of what the user has set outside a call; read from the environment, and without torch."""

from __future__ import annotations

import os
import threading
from typing import Literal, NamedTuple

BackendChoice = str | tuple[str, str]
Fallback = Literal["warn", "silent", "error"]

Rules = Literal["built-in", "profile"]

_FALLBACKS = ("warn", "silent", "error")
_RULES = ("built-in", "profile")


class Decision(NamedTuple):
    """What one call of `attention` ran on; `backward` is None where no gradient is needed."""

    problem: object
    requested: BackendChoice
    forward: str
    backward: str | None


class _ProcessSettings:
    """Settings of the whole process. torch.compile guards on these attributes, so a change recompiles."""

    def __init__(self) -> None:
        self.default_backend: BackendChoice = "auto"
        self.disabled: tuple[str, ...] = ()
        self.fallback: Fallback = "warn"
        # The file of the profile, "" for that in the user's folder of caches, "off" for none.
        self.profile: str = os.environ.get("FLASH_DMATTN_PROFILE", "").strip()
        # Whether auto goes by what was measured on Hopper GPUs beforehand, or there too by the profile alone.
        self.rules: Rules = "built-in"
        # Raised at the first call and not here, so that `python -m flash_dmattn info` can show what is wrong.
        self.environment_error: str | None = None
        self.environment_unchecked = True  # its names: backends may be registered after the import
        try:
            self.default_backend = parse_choice(
                os.environ.get("FLASH_DMATTN_BACKEND") or "auto", "FLASH_DMATTN_BACKEND"
            )
            disabled = os.environ.get("FLASH_DMATTN_DISABLE", "")
            self.disabled = tuple(name.strip() for name in disabled.split(",") if name.strip())
            self.fallback = check_fallback(os.environ.get("FLASH_DMATTN_FALLBACK") or "warn", "FLASH_DMATTN_FALLBACK")
            self.rules = check_rules(os.environ.get("FLASH_DMATTN_RULES") or "built-in", "FLASH_DMATTN_RULES")
        except ValueError as error:
            self.environment_error = str(error)


class _ThreadSettings(threading.local):
    """Settings of `with` blocks. The defaults are set here and not on the class, where torch.compile misses changes."""

    def __init__(self) -> None:
        self.backend: BackendChoice | None = None
        self.records: list[Decision] | None = None


def parse_choice(text: str, source: str = "backend") -> BackendChoice:
    """Read "name" or "forward,backward", as environment variables and the command line give it."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) == 1:
        return names[0]
    if len(names) == 2:
        return names[0], names[1]
    raise ValueError(f"{source} is {text!r}; it needs to be one name, or forward and backward as 'name,name'")


def check_fallback(value: str, source: str = "fallback") -> Fallback:
    """Refuse anything but the three policies."""
    if value not in _FALLBACKS:
        raise ValueError(f"{source} is {value!r}; it needs to be one of {', '.join(map(repr, _FALLBACKS))}")
    return value  # type: ignore[return-value]


def check_rules(value: str, source: str = "rules") -> Rules:
    """Refuse anything but the two sets of rules."""
    if value not in _RULES:
        raise ValueError(f"{source} is {value!r}; it needs to be one of {', '.join(map(repr, _RULES))}")
    return value  # type: ignore[return-value]


process = _ProcessSettings()
thread = _ThreadSettings()
