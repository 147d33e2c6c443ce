"""The releases of Transformers that this code was tested with, checked when it is imported, and what differs in them.

To support a newer release: run `make test-newest`, then raise `NEWEST` here, the bound in pyproject.toml and the pin
in constraints.txt, which a test holds together.

Releases before 5.10 copy of a checkpoint's code only the files that its entry file imports. So the entry files of
configurations, which are loaded first, import all that they need, and their users get to the sentence below.
"""

import transformers
from transformers.utils import logging

OLDEST, NEWEST = (5, 10), (5, 24)

_installed = tuple(int(part) for part in transformers.__version__.split(".")[:2])
TESTED = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
if _installed < OLDEST:
    raise ImportError(
        f"Transformers {transformers.__version__} is installed, and models of hf_recurrent_lengthgen need {TESTED}: "
        f'pip install "transformers>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}".'
    )
if _installed > NEWEST:
    logging.get_logger(__name__).warning_once(
        f"Transformers {transformers.__version__} is installed, and models of hf_recurrent_lengthgen were tested with "
        f"{TESTED}: should anything fail, install one of these, or a newer hf_recurrent_lengthgen."
    )

# What `generate` calls the cache. The models of this package take it under all names with every release.
CACHE_NAME = "cache" if _installed >= (5, 24) else "past_key_values"
OLD_CACHE_NAMES = ("past_key_values", "cache_params")
PreTrainedConfig = transformers.PreTrainedConfig  # not imported above, since older releases name it otherwise
