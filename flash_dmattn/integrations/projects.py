"""The projects that adapters serve: one table of versions, replaced sources and tests."""

from __future__ import annotations

from typing import NamedTuple


class Project(NamedTuple):
    """One project.

    Attributes:
        package: its name on PyPI.
        module: the package that is imported.
        version: the version, or the commit of a checkout, that the tests here ran with.
        digests: `patch.digest` of each function that the adapter replaces or relies on, by "module:name".
        tests: the files of the project's tests that reach these functions, in a checkout or in the package.
    """

    package: str
    module: str
    version: str
    digests: dict[str, str]
    tests: tuple[str, ...]


PROJECTS: dict[str, Project] = {}
