"""`Trainer` gives all batches of an evaluation one weight, and counts repeated sequences; here each target counts
once."""

from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_recurrent_lengthgen.data.chunks import sequence_shard
from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.trainers.checks import takes_states
from hf_recurrent_lengthgen.trainers.chunked_backprop import evaluation_chunk, forward_in_chunks
from hf_recurrent_lengthgen.trainers.run.attributes import replaced
from hf_recurrent_lengthgen.trainers.run.dataloaders import DealtBatches, evaluation_loader, packs_all
from hf_recurrent_lengthgen.trainers.run.distributed_sequences import DistributedSequences, different_sequences
from hf_recurrent_lengthgen.trainers.run.scored_targets import token_labels, token_shape_of, with_scored_labels
from hf_recurrent_lengthgen.trainers.run.step_checks import StepChecks
from hf_recurrent_lengthgen.trainers.states_of_batches import with_evaluation_states

Prediction = tuple[Tensor | None, Tensor | None, Tensor | None]


class EvaluationTrainer(Trainer):
    """`Trainer` whose evaluation loss is the mean over all targets, on any data and number of processes."""

    args: Any
    checks: StepChecks
    shared = DistributedSequences()
    needs_logits: bool
    means: list[tuple[Tensor, Tensor]]  # of the batches of an evaluation, with their numbers of targets
    evaluation_batches: int

    @cached_property
    def takes_states(self) -> bool:
        return takes_states(self.model)  # type: ignore[arg-type]

    def scored(self, batch: dict[str, Any], rows: Rows | None = None) -> dict[str, Any]:
        """A batch with only the labels that the model scores; unchanged for a model without states."""
        return with_scored_labels(base_of(self.model), batch, rows) if self.takes_states else batch

    def without_logits(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs that let the model return its loss without logits, where nothing reads them; see `modeling_loss`."""
        has_labels = any(inputs.get(name) is not None for name in ("labels", "shift_labels"))
        if self.needs_logits or self.compute_loss_func is not None or not has_labels:
            return inputs
        return {**inputs, "skip_logits": True} if getattr(base_of(self.model), "can_skip_logits", False) else inputs

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Trainer's, with each sequence once; see `evaluation_loader`."""
        data: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        data = self.eval_dataset[data] if isinstance(data, str) else data  # type: ignore[index]
        return evaluation_loader(self, data, partial(super().get_eval_dataloader, eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Trainer's, in the order of the data, also if sequences are grouped: predictions carry no other key."""
        with replaced(self.args, train_sampling_strategy="random"):
            return evaluation_loader(self, test_dataset, partial(super().get_test_dataloader, test_dataset))

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        self.means, self.evaluation_batches = [], 0
        # Trainer sets it after each loop; before the first it may gather objects, of which accelerate loses some
        self.gather_function = self.accelerator.gather_for_metrics
        if self.shared.group is not None:
            self.gather_function = partial(self.shared.gather_once, self.accelerator)
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        if isinstance(dataloader, DealtBatches):
            output = output._replace(num_samples=dataloader.dealt)
        if self.means and output.metrics is not None:  # Trainer's gives all batches one weight
            means, counts = (torch.stack(values).double() for values in zip(*self.means, strict=True))
            prefix = [*args[3:], kwargs.get("metric_key_prefix", "eval")][0]
            output.metrics[f"{prefix}_loss"] = float(means.mul(counts).where(counts > 0, 0).sum() / counts.sum())
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Prediction:
        """Trainer's, from the source's state for evaluation, without final states, which would count as predictions;
        in chunks where only the loss is needed (`evaluation_chunk`). On several processes the loss is the
        mean over the targets of all of them.

        Raises:
            ValueError: for resets inside sequences, which are for training only.
        """
        inputs = with_evaluation_states(self, dict(inputs))
        length = evaluation_chunk(self, model, inputs) if prediction_loss_only else None
        stock = super().prediction_step

        def step(inputs: dict[str, Any]) -> Prediction:
            if prediction_loss_only and length is None:
                inputs = self.without_logits(inputs)
            with nullcontext() if length is None else forward_in_chunks(model, length):
                return stock(model, inputs, prediction_loss_only, *args, **kwargs)

        inputs = self.scored(inputs)
        names = token_labels(base_of(self.model), inputs)
        if not names:
            return step(inputs)
        present = self._present_rows(token_shape_of(inputs)[0])
        for name in names:
            ignored = torch.full_like(inputs[name][present:], IGNORED_LABEL)
            inputs = {**inputs, name: torch.cat([inputs[name][:present], ignored])}
        targets = inputs["shift_labels"] if "shift_labels" in names else inputs["labels"][..., 1:]
        if self.shared.group is None or not prediction_loss_only:  # predictions are of whole sequences
            loss, logits, labels = step(inputs)
            return None if loss is None else self._mean(loss, targets), logits, labels
        self.checks.ask(self.shared.differ(inputs), different_sequences)
        self.checks.read()
        inputs = sequence_shard(inputs, self.shared.rank, self.shared.size)
        inputs["sequence_group"] = self.shared.group
        with replaced(self, label_names=["shift_labels"]):
            loss, _, _ = step(inputs)
        assert loss is not None  # there are labels
        return self._mean(loss, inputs["shift_labels"]), None, None

    def _present_rows(self, rows: int) -> int:
        """How many of the rows of this process are not repeated, to give all processes the same number."""
        ending, unit = self.accelerator.gradient_state, 1
        if self.args.world_size == 1 or not ending.end_of_dataloader or ending.remainder <= 0:
            return rows
        if packs_all(self):  # a packed row is repeated as a whole
            rows, unit = 1, rows
        left = ending.remainder - self.args.row_process_index * rows  # counted over all processes
        return unit * min(max(left, 0), rows)

    def _mean(self, loss: Tensor, targets: Tensor) -> Tensor:
        """The mean over the targets of a batch on all processes, from that over the targets of this one."""
        count = targets.ne(IGNORED_LABEL).sum().to(loss.device)
        if self.args.world_size > 1:
            total = torch.where(count > 0, loss.double() * count, 0.0)
            summed, count = self.accelerator.reduce(torch.stack([total, count.double()]), "sum")
            loss = (summed / count).to(loss)
        self.means.append((loss, count))
        return loss
