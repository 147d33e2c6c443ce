"""`Trainer` splits sequences over processes (context parallelism) for attention only; here also for states.

Groups of `context_parallel_size` processes of consecutive ranks read the same sequences; different groups read
different ones. Accelerate's own context parallelism (`ParallelismConfig(cp_size=...)`) is for attention: it needs
FSDP2, deals tokens to processes out of order, and refuses recurrent layers. Here it only deals sequences to groups.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from accelerate.utils import recursively_apply
from torch.distributed.device_mesh import init_device_mesh

from hf_recurrent_lengthgen.models.rows_shared import gathered
from hf_recurrent_lengthgen.trainers.run.attributes import replaced

_SPREAD = 0x1E3779B97F4A7C15  # products with it wrap around


class DistributedSequences(NamedTuple):
    """How the processes of a run split sequences.

    Attributes:
        size: Processes of a group.
        rank: Place of this process in its group, in the order of time.
        group: The group, for the model; None where a process has whole sequences.
        mesh: All processes, groups by places in them.
    """

    size: int = 1
    rank: int = 0
    group: Any = None
    mesh: Any = None

    @classmethod
    def of(cls, args: Any) -> "DistributedSequences":
        """For the arguments of a run; all processes call it.

        Raises:
            ValueError: if groups of `context_parallel_size` do not fill the processes.
        """
        size, processes = args.context_parallel_size, args.world_size
        if processes % size:
            raise ValueError(
                f"context_parallel_size={size} must divide the number of processes, {processes}: start a multiple of "
                f"{size} processes (accelerate launch --num_processes), or change context_parallel_size."
            )
        if size == 1:
            return cls()
        mesh = init_device_mesh(args.device.type, (processes // size, size), mesh_dim_names=("dp_replicate", "cp"))
        return cls(size, mesh["cp"].get_local_rank(), mesh["cp"].get_group(), mesh)

    def dealing(self, accelerator: Any) -> AbstractContextManager[None]:
        """Within the `with` block, the accelerator prepares loaders that deal the same sequences to all of a group."""
        return replaced(accelerator.state, device_mesh=self.mesh or accelerator.state.device_mesh)

    def differ(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Whether the processes of the group have different inputs, a boolean on their device; all of them call it."""
        values = [value for _, value in sorted(inputs.items()) if isinstance(value, torch.Tensor)]
        bits = [value.float().view(torch.int32) if value.is_floating_point() else value for value in values]
        numbers = torch.cat([value.long().flatten() for value in bits])
        places = torch.arange(1, len(numbers) + 1, device=numbers.device)
        weights = places * _SPREAD
        digest = ((numbers + 1) * (weights ^ (weights >> 29))).sum()[None].to(self.mesh.device_type)
        return (torch.cat(gathered(digest, self.group)) != digest).any()

    def gather_once(self, accelerator: Any, data: Any) -> Any:
        """`accelerator.gather_for_metrics`, with the sequences of each group once."""

        def of_first(gathered: torch.Tensor) -> torch.Tensor:
            return torch.cat(gathered.chunk(self.mesh.size())[:: self.size])

        once = recursively_apply(of_first, accelerator.gather(data))
        ending = accelerator.gradient_state
        left = ending.remainder if ending.end_of_dataloader else 0
        return recursively_apply(lambda rows: rows[:left], once) if left > 0 else once


def different_sequences() -> str:
    """Why processes that split sequences and have read different ones are stopped."""
    return (
        "Processes that split sequences (context_parallel_size) have read different ones: give all of them the same "
        "data in the same order, shuffled with one seed, and draw nothing at random where sequences are read or "
        "collated."
    )
