from typing import Any

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

import hf_recurrent_lengthgen.models as package
from hf_recurrent_lengthgen.surgery import initialize_from_teacher_layer
from tests.models.families import randomized
from tests.surgery.test_mimetic import changed_names, parameters

SIZES: dict[str, Any] = {"vocab_size": 11, "hidden_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 4},
    "Mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1},
    "GLA": {"num_heads": 2, "intermediate_size": 24},
    "HGRN2": {"expand_ratio": 8, "intermediate_size": 24},
    "LinearAttention": {"num_heads": 2, "intermediate_size": 24},
    "RWKV6": {"num_heads": 2, "intermediate_size": 24, "proj_low_rank_dim": 4, "gate_low_rank_dim": 4},
    "RWKV5": {"head_size": 8, "intermediate_size": 24},
}


def model_of(family: str, layers: int, seed: int, **changes: Any) -> Any:
    """With random values in every parameter."""
    config = getattr(package, f"Stateful{family}Config")(
        **SIZES, **(FAMILIES[family] | changes), num_hidden_layers=layers
    )
    return randomized(getattr(package, f"Stateful{family}ForCausalLM")(config), seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_becomes_that_of_the_teacher_and_nothing_else_changes(family: str) -> None:
    student, teacher = model_of(family, 3, 0), model_of(family, 4, 1)
    before, of_teacher = parameters(student), parameters(teacher)
    initialize_from_teacher_layer(student, teacher, 2)
    assert changed_names(of_teacher, teacher) == set()
    list_name = "rwkv.blocks" if family == "RWKV5" else f"{student.base_model_prefix}.layers"
    inside = 0
    for name, value in student.named_parameters():
        rest = name.removeprefix(f"{list_name}.").partition(".")[2]
        if name.startswith(list_name) and not rest.startswith(("pre_norm", "pre_ln")):
            assert torch.equal(value, of_teacher[f"{list_name}.2.{rest}"]), name
            inside += 1
        else:
            assert torch.equal(value, before[name]), name
    assert inside % 3 == 0
    assert inside > 3 * 8


def test_only_the_chosen_layers_change_and_their_outputs_are_the_teachers() -> None:
    student, teacher = model_of("Mamba2", 3, 0), model_of("Mamba2", 2, 1).double()
    before = parameters(student)
    initialize_from_teacher_layer(student, teacher, 1, layers=[2, 0])
    assert {name.split(".")[2] for name in changed_names(before, student)} == {"0", "2"}
    assert student.dtype == torch.float32
    x = torch.randn(2, 5, 16)
    layer, expected = student.backbone.layers[2], teacher.backbone.layers[1].float()
    state = student.zero_state(2)[2]
    assert torch.equal(layer(x, state)[0], expected(x, state)[0])


@pytest.mark.parametrize(
    ("stock", "config", "family"),
    [(MambaForCausalLM, MambaConfig, "Mamba"), (Mamba2ForCausalLM, Mamba2Config, "Mamba2")],
    ids=["Mamba", "Mamba2"],
)
def test_a_stock_model_can_teach_ours(stock: Any, config: Any, family: str) -> None:
    teacher = randomized(stock(config(**SIZES, **FAMILIES[family], num_hidden_layers=2)), 1)
    student = model_of(family, 1, 0)
    initialize_from_teacher_layer(student, teacher, 0)
    expected = teacher.backbone.layers[0].state_dict()
    actual = student.backbone.layers[0].state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("student", "teacher", "complaint"),
    [
        (
            ("Mamba2", {}),
            ("Mamba2", {"state_size": 8}),
            r"differ in the parameters .*'mixer.in_proj.weight', \(76, 16",
        ),
        (("Mamba", {"use_bias": True}), ("Mamba", {}), r"differ in the parameters \[\('mixer.in_proj.bias', \(64,\)"),
        (
            ("Mamba", {}),
            ("Mamba2", {"num_heads": 4}),
            "head_dim is None in the student's config and 8 in the teacher's",
        ),
        (("RWKV6", {}), ("RWKV6", {"group_norm_eps": 6.4e-4}), "group_norm_eps is 1e-05 .* and 0.00064"),
        (
            ("GLA", {"elementwise_affine": False}),
            ("GLA", {"elementwise_affine": False, "layer_num_heads": [2, 1]}),
            r"layer_num_heads is None .* and \[2, 1\]",
        ),
    ],
    ids=["shape", "bias", "family", "head norms", "heads"],
)
def test_layers_that_differ_are_refused_and_nothing_changed(
    student: tuple[str, dict[str, Any]], teacher: tuple[str, dict[str, Any]], complaint: str
) -> None:
    model = model_of(student[0], 2, 0, **student[1])
    before = parameters(model)
    with pytest.raises(ValueError, match=complaint):
        initialize_from_teacher_layer(model, model_of(teacher[0], 2, 1, **teacher[1]), 1)
    assert changed_names(before, model) == set()


def test_settings_that_mean_the_same_are_no_difference() -> None:
    student = model_of("RWKV6", 1, 0, group_norm_eps=1e-5)  # None stands for norm_eps, which is 1e-5
    initialize_from_teacher_layer(student, model_of("RWKV6", 1, 1), 0)
    initialize_from_teacher_layer(model_of("Mamba", 1, 0, hidden_act="swish"), model_of("Mamba", 1, 1), 0)
