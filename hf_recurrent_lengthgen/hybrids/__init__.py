"""The state contract for stock recurrent and hybrid models of Transformers."""

from hf_recurrent_lengthgen.hybrids.stateful import stateful, verify_stateful

__all__ = ["stateful", "verify_stateful"]
