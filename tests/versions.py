"""What depends on the installed version of Transformers."""

import pytest
import transformers
from packaging.version import Version

# Newer Trainers call gradient_checkpointing activation_checkpointing, and resume two processes on CPUs.
SINCE_5_23 = Version("5.23") <= Version(transformers.__version__)
HAS_HYBRIDS = Version("5.21") <= Version(transformers.__version__)
needs_hybrids = pytest.mark.skipif(not HAS_HYBRIDS, reason="hybrids need Transformers 5.21 or newer")
