"""Tests of GPU kernels in Triton's interpreter: `make test-kernels`, an environment and a process of their own."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from .interpreter import stand_in_for_a_gpu

    stand_in_for_a_gpu()
else:
    collect_ignore_glob = ["test_*"]
