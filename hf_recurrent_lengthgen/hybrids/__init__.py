"""The state contract for stock recurrent and hybrid models of Transformers."""

from hf_recurrent_lengthgen.hybrids.files import load_hybrid_state, save_hybrid_state
from hf_recurrent_lengthgen.hybrids.verify import verify_stateful
from hf_recurrent_lengthgen.hybrids.wrapping import stateful

__all__ = ["load_hybrid_state", "save_hybrid_state", "stateful", "verify_stateful"]
