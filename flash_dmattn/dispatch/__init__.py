"""The choice of the backend of a call: settings, the registry, selection and plan; the choice of packers and writers.

This file has no imports, because `config` has to load without torch.
"""
