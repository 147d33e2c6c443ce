"""What the pages run in: a folder like the one that `make demo` writes."""

from tests.test_readme import demo_output

__all__ = ["demo_output"]
