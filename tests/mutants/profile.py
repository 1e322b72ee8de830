"""Faults of profiles: who may have written one, what it is of, the rows of a call, the decision, the command."""

from __future__ import annotations

from .fault import Fault

PROFILE, CALIBRATE = "tests/test_profile.py::test_", "tests/test_calibrate.py::test_"
FILE = "flash_dmattn/dispatch/profiles.py"
PREFERENCES = "flash_dmattn/dispatch/preferences.py"
COMMAND = "flash_dmattn/tools/calibrate/command.py"
CITIZEN = "tests/test_citizen.py::test_"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a profile that the group may write is read",
        FILE,
        "(stat.S_IWGRP | stat.S_IWOTH)",
        "stat.S_IWOTH",
        (f"{PROFILE}a_profile_that_others_may_write_is_ignored",),
    ),
    Fault(
        "a profile of any user is read",
        FILE,
        "if status.st_uid not in (os.geteuid(), 0):",
        "if False:",
        (f"{PROFILE}a_profile_of_another_user_is_ignored",),
    ),
    Fault(
        "a figure of zero is taken",
        FILE,
        "not 0 < time < 1e9:",
        "not 0 <= time < 1e9:",
        (f"{PROFILE}a_damaged_profile_is_ignored_with_its_fault",),
    ),
    Fault(
        "a call with gradients goes by its forward pass",
        FILE,
        "return None if self.backward is None else self.forward + self.backward",
        "return self.forward",
        (f"{PROFILE}the_passes_that_a_call_runs_decide",),
    ),
    Fault(
        "a profile of another version is in force",
        FILE,
        '"arch": arch, **versions()}.items()',
        '"arch": arch}.items()',
        (f"{PROFILE}a_profile_of_something_else_is_ignored",),
    ),
    Fault(
        "a profile is read at each question",
        FILE,
        "@cache\ndef find(",
        "def find(",
        (f"{PROFILE}a_profile_is_read_once_and_again_after_forget",),
    ),
    Fault(
        "calls do not notice a new profile",
        FILE,
        "    choices_changed()\n",
        "    pass\n",
        (f"{PROFILE}a_new_profile_makes_calls_choose_anew",),
    ),
    Fault(
        "GPUs are asked for before there is a file",
        FILE,
        'if process.profile == "" and not any(folder().glob("*.json")):',
        "if False:",
        (f"{PROFILE}gpus_are_not_asked_for_where_there_is_no_profile",),
    ),
    Fault(
        "the gradient of a bias changes no row",
        FILE,
        "    if p.dbias_class is not None:\n",
        "    if False:\n",
        (f"{PROFILE}rows_of_a_call",),
    ),
    Fault(
        "a call with gradients is decoding",
        FILE,
        "if p.seqlen_q <= _DECODED and not any(p.needs_grad):",
        "if p.seqlen_q <= _DECODED:",
        (f"{PROFILE}rows_of_a_call",),
    ),
    Fault(
        "figures of bf16 count for fp32",
        FILE,
        "    if p.dtype not in _TIMED_DTYPES:\n        return ()\n",
        "",
        (f"{PROFILE}rows_of_a_call",),
    ),
    Fault(
        "one row that triton wins is enough",
        PREFERENCES,
        "faster[other] = faster[other] and ours is not None and ours < theirs",
        "faster[other] = ours is not None and ours < theirs",
        (f"{PROFILE}triton_has_to_win_in_every_row_of_a_call",),
    ),
    Fault(
        "a failed check plays no part",
        PREFERENCES,
        'profile.wrong.get(name, "") for name in MEASURED',
        '"" for name in MEASURED',
        (f"{PROFILE}auto_goes_by_the_figures",),
    ),
    Fault(
        "the order of auto is that of the registry",
        PREFERENCES,
        "if judged is not None and not judged.before_flex and",
        "if False and",
        (f"{PROFILE}auto_goes_by_the_figures",),
    ),
    Fault(
        "a profile decides on Hopper too",
        PREFERENCES,
        'return problem.arch != "sm_90" or process.rules == "profile"',
        "return True",
        (f"{PROFILE}on_hopper_the_built_in_rules_stay_unless_they_are_switched_off",),
    ),
    Fault(
        "the compiler follows a profile into its file",
        PREFERENCES,
        'setattr(_judged, "_dynamo_marked_constant", True)  # noqa: B010\n',
        "",
        (f"{PROFILE}the_choice_by_a_profile_is_traced_whole",),
    ),
    Fault(
        "rows are timed after the end",
        COMMAND,
        "if begun - started + longest > seconds:",
        "if begun - started > seconds:",
        (f"{CALIBRATE}what_is_not_reached_in_time_is_left_out",),
    ),
    Fault(
        "checks take all of the time",
        COMMAND,
        "clock() - started < CHECK_SHARE * seconds",
        "clock() - started < seconds",
        (f"{CALIBRATE}checks_end_in_time",),
    ),
    Fault(
        "triton is right where it was not checked",
        "flash_dmattn/tools/calibrate/command.py",
        '    if missing and "triton" not in wrong:\n',
        "    if False:\n",
        (f"{CALIBRATE}what_failed_a_check_is_not_taken",),
    ),
    Fault(
        "a new profile waits for the next process",
        COMMAND,
        "    profiles.forget()\n",
        "",
        (f"{CALIBRATE}every_backend_is_measured_in_every_row_and_the_profile_is_in_force",),
    ),
    Fault(
        "results that are not finite are timed",
        "flash_dmattn/tools/calibrate/timing.py",
        "if not all(bool(x.isfinite().all()) for x in results):",
        "if False:",
        (f"{CALIBRATE}what_does_not_run_has_its_error_as_figures",),
    ),
    Fault(
        "a call on meta tensors counts as a fallback",
        "flash_dmattn/dispatch/selection.py",
        'problem.device in ("cpu", "meta"):',
        'problem.device == "cpu":',
        (f"{CITIZEN}a_call_on_meta_is_no_fallback",),
    ),
    Fault(
        "FLOP of dp are counted for dv alone",
        "flash_dmattn/flops.py",
        "dim_v if need_q or need_k or need_bias else 0",
        "dim_v",
        (f"{CITIZEN}flop_of_both_passes",),
    ),
    Fault(
        "a saved mask keeps what was cached of its device",
        "flash_dmattn/masks/prepared/types.py",
        "    def __reduce__(self) -> tuple[object, ...]:\n",
        "    def reduced(self) -> tuple[object, ...]:\n",
        (f"{CITIZEN}a_loaded_mask_follows_map_location",),
    ),
)
