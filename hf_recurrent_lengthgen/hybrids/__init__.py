"""The state contract for stock recurrent and hybrid models of Transformers."""

from hf_recurrent_lengthgen.hybrids.wrapping import stateful

__all__ = ["stateful"]
