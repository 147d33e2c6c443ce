"""Push checkpoints to the Hugging Face Hub, completely or not at all."""

from hf_recurrent_lengthgen.checkpoints.hub.push import do_push, plan_push

__all__ = ["do_push", "plan_push"]
