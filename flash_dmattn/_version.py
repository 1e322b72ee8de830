"""The version of the package, its only spelling in the tree."""

__version__ = "0.1.0"
