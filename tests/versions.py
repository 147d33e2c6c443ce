"""What depends on the installed version of Transformers."""

import transformers
from packaging.version import Version

# Newer Trainers call gradient_checkpointing activation_checkpointing, and resume two processes on CPUs.
SINCE_5_23 = Version("5.23") <= Version(transformers.__version__)
