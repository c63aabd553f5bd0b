"""Streams, control records and the checks of single rows. Imports nothing of the other packages."""

if __name__ != "molt.schemas":
    raise ImportError("import molt.schemas, not schemas")
