"""Teacher-layer initialization: every layer of a student starts from one layer of a pre-trained model.

"Mimetic Initialization Helps State Space Models Learn to Recall" (Trockman et al., 2024, arXiv:2410.11135), section 6:
S_j := T_i for all layers j of the student. Some layers T_i, with correlated W_B and W_C and masks of nearly all ones,
let the student learn to copy.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Fields that change what a layer computes but not the shapes of its parameters.
SAME_FIELDS = (
    *("clamp_min", "feature_map", "gate_logit_normalizer", "group_norm_eps", "head_dim", "head_size"),
    *("head_size_divisor", "hidden_act", "layer_norm_epsilon", "mixer_rms_eps", "n_groups", "norm_eps"),
    *("layer_num_heads", "layer_state_sizes", "norm_feature_map", "norm_k", "norm_q", "num_heads", "time_step_limit"),
)
# RWKV's norm of the embeddings, which is in the first block
EMBEDDING_NORMS = ("pre_norm.", "pre_ln.")


@torch.no_grad()
def initialize_from_teacher_layer(student: Any, teacher: Any, layer: int, layers: Iterable[int] | None = None) -> None:
    """Overwrite layers of `student`, in place, with the weights of one layer of `teacher`.

    A layer is a whole block: norms, mixer and channel mixing. Weights outside of the blocks stay: embeddings (in
    RWKV with their norm in the first block), head, final norm, HGRN-2's lower bounds. So are config and dtype of the
    student.

    Args:
        student: A model of this package or of Transformers, with its blocks in `layers` of its backbone.
        teacher: A model of the same family with layers of the same sizes; it does not change.
        layer: The layer of the teacher, counted from 0.
        layers: The layers of the student to overwrite; None for all.

    Raises:
        ValueError: for layers that differ in a parameter or setting, which is named. The student is then unchanged.
    """
    students, teachers = (getattr(model, "base_model", model).layers for model in (student, teacher))
    chosen = range(len(students)) if layers is None else layers
    for name in SAME_FIELDS:
        values = [_setting(model.config, name) for model in (student, teacher)]
        if values[0] != values[1]:
            raise ValueError(
                f"{name} is {values[0]} in the student's config and {values[1]} in the teacher's, so the same weights "
                "would give another layer: make the student with the teacher's value."
            )
    source = _weights(teachers[layer])
    targets = [_weights(students[index]) for index in chosen]
    shapes = {name: tuple(tensor.shape) for name, tensor in source.items()}
    for index, target in zip(chosen, targets, strict=True):
        differing = sorted({*shapes.items()} ^ {(name, tuple(tensor.shape)) for name, tensor in target.items()})
        if differing:
            raise ValueError(
                f"Layer {index} of the student and layer {layer} of the teacher differ in the parameters {differing}."
            )
    for target in targets:
        for name, tensor in target.items():
            tensor.copy_(source[name])


def _setting(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if name == "group_norm_eps" and value is None:
        return getattr(config, "norm_eps", None)
    if name == "hidden_act" and value == "swish":
        return "silu"
    return list(value) if isinstance(value, tuple) else value


def _weights(block: Any) -> dict[str, Tensor]:
    weights = block.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in weights.items() if not name.startswith(EMBEDDING_NORMS)}
