"""Text states: what a model keeps of a text, as a value and as files that others can use."""

from hf_recurrent_lengthgen.state_files.files import load_text_state, positions_in, read_into, save_text_state
from hf_recurrent_lengthgen.state_files.independent_chunks import ask_surest, read_chunks
from hf_recurrent_lengthgen.state_files.mixing import add_weighted_adapter, mix_states, mix_text_states
from hf_recurrent_lengthgen.state_files.origin import Origin
from hf_recurrent_lengthgen.state_files.text_state import LayerKeys, TextState, ask, branch, read_text, start_of

__all__ = [
    "LayerKeys",
    "Origin",
    "TextState",
    "add_weighted_adapter",
    "ask",
    "ask_surest",
    "branch",
    "load_text_state",
    "mix_states",
    "mix_text_states",
    "positions_in",
    "read_chunks",
    "read_into",
    "read_text",
    "save_text_state",
    "start_of",
]
