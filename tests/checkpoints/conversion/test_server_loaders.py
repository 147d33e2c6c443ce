"""Exported folders hold what the loaders of servers read: keys of config.json, names of tensors, strict JSON.

The facts are of the releases of October 2026: vLLM 0.32.0 (`vllm/model_executor/models`), SGLang 0.5.23
(`sglang/srt/models`), mlx-lm 0.32.2 (`mlx_lm/models`), and the llama.cpp in llama-cpp-python 0.3.36 (`conversion`).
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.checkpoints.tensor_files import TensorFiles
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models import FAMILIES
from tests.hybrids.tiny_models import tiny_model

MAMBA = (
    "backbone.embeddings.weight backbone.norm_f.weight backbone.layers.{0,1}.norm.weight "
    "backbone.layers.{0,1}.mixer.{A_log,D,conv1d.weight,conv1d.bias,in_proj.weight,out_proj.weight"
)
MAMBA1, MAMBA2 = MAMBA + ",x_proj.weight,dt_proj.weight,dt_proj.bias}", MAMBA + ",dt_bias,norm.weight}"
RWKV7 = (
    "model.{embeddings.weight,norm.{weight,bias}} lm_head.weight model.layers.0.pre_norm.{weight,bias} "
    "model.layers.{0,1}.{attn_norm,ffn_norm,attn.g_norm}.{weight,bias} "
    "model.layers.{0,1}.attn.{x_r,x_w,x_k,x_v,x_a,x_g,k_k,k_a,r_k,{r,k,v,o}_proj.weight} "
    "model.layers.{0,1}.attn.{w,a}_lora.lora.{0.weight,2.weight,2.bias} "
    "model.layers.{0,1}.attn.g_lora.lora.{0,2}.weight model.layers.1.attn.v_lora.lora.{0.weight,2.weight,2.bias} "
    "model.layers.{0,1}.ffn.{x_k,key.weight,value.weight}"
)
RWKV6 = (
    "rwkv.{embeddings.weight,ln_out.{weight,bias}} head.weight rwkv.blocks.0.pre_ln.{weight,bias} "
    "rwkv.blocks.{0,1}.{ln1,ln2,attention.ln_x}.{weight,bias} "
    "rwkv.blocks.{0,1}.attention.time_{maa_{x,w,k,v,r,g,w1,w2},decay,decay_w1,decay_w2,faaaa} "
    "rwkv.blocks.{0,1}.attention.{receptance,key,value,gate,output}.weight "
    "rwkv.blocks.{0,1}.feed_forward.{time_maa_k,time_maa_r,key.weight,receptance.weight,value.weight}"
)
FALCON_H1 = (
    "model.{embed_tokens,final_layernorm}.weight lm_head.weight "
    "model.layers.{0,1,2}.{input_layernorm,pre_ff_layernorm}.weight "
    "model.layers.{0,1,2}.{feed_forward.{gate,up,down},self_attn.{q,k,v,o}}_proj.weight "
    "model.layers.{0,1,2}.mamba.{A_log,D,dt_bias,conv1d.weight,conv1d.bias,in_proj.weight,out_proj.weight}"
)

SIZES = "vocab_size hidden_size num_hidden_layers"
SSM = f"{SIZES} intermediate_size state_size conv_kernel use_bias use_conv_bias time_step_rank model_type"
OF_BOTH = f"{SSM} hidden_act layer_norm_epsilon tie_word_embeddings pad_token_id"
HEADS = "num_heads head_dim n_groups layer_norm_epsilon"
RWKV = f"{SIZES} model_type architectures intermediate_size"
RANKS = "norm_eps head_dim {decay,a,v,gate}_low_rank_dim"
ALL1 = {"vLLM, SGLang": OF_BOTH, "mlx-lm": SSM, "llama.cpp": f"{SIZES} architectures model_type"}
FALCON = ALL1 | {"vLLM, SGLang": f"{OF_BOTH} mixer_rms_eps"}
ALL2 = {
    "vLLM": f"{OF_BOTH} expand {HEADS}",
    "SGLang": f"{OF_BOTH} rms_norm chunk_size {HEADS}",
    "mlx-lm": f"{SSM} {HEADS} tie_word_embeddings time_step_limit",
    "llama.cpp": f"{SIZES} architectures",
}
ALL7 = {"mlx-lm, llama.cpp": f"{RWKV} {RANKS}"}
ALL6 = {"llama.cpp": f"{RWKV} head_size layer_norm_epsilon rescale_every"}
HYBRID = {
    "vLLM, llama.cpp": f"{SIZES} architectures head_dim intermediate_size num_attention_heads num_key_value_heads "
    "{attention_in,attention_out,ssm_in,ssm_out,key,lm_head,embedding}_multiplier {mlp,ssm}_multipliers "
    "mamba_{d_ssm,n_groups,d_head,d_state} rope_parameters",
    "vLLM": "hidden_act rms_norm_eps tie_word_embeddings mamba_{conv_bias,d_conv,expand,n_heads,proj_bias,rms_norm}",
}


class Export(NamedTuple):
    """Our family and config, the layout, the class there, and what loaders look for; they take no other tensor."""

    family: str
    config: dict[str, Any]
    format: str
    architecture: str
    tensors: str
    reads: dict[str, str]


GROUP = {"num_heads": 4, "head_dim": 4, "state_size": 4, "n_groups": 1}
TIED = GROUP | {"tie_word_embeddings": True}
WORLD = {"vocab_size": 29, "hidden_size": 64, "num_heads": 1, "expand_k": 1, "expand_v": 1, "group_norm_eps": 64e-5}
NORMS = {"mixer_rms_eps": 1e-6, "state_size": 4}
EXPORTS = {
    "mamba": Export("stateful_mamba", {"state_size": 4}, "transformers", "MambaForCausalLM", MAMBA1, ALL1),
    "falcon": Export("stateful_mamba", NORMS, "transformers", "FalconMambaForCausalLM", MAMBA1, FALCON),
    "mamba2": Export("stateful_mamba2", GROUP, "transformers", "Mamba2ForCausalLM", MAMBA2 + " lm_head.weight", ALL2),
    "mamba2_tied": Export("stateful_mamba2", TIED, "transformers", "Mamba2ForCausalLM", MAMBA2, ALL2),
    "rwkv7": Export("stateful_rwkv7", {"head_dim": 8}, "fla", "RWKV7ForCausalLM", RWKV7, ALL7),
    "rwkv6": Export("stateful_rwkv6", WORLD, "rwkv-hf", "Rwkv6ForCausalLM", RWKV6, ALL6),
}


def braces(words: str) -> list[str]:
    """As a shell expands them."""
    if not (found := re.search(r"(\S*){([^{}]*)}(\S*)", words)):
        return words.split()
    parts = (f" {found[1]}{part}{found[3]}" for part in found[2].split(","))
    return braces(words[: found.start()] + " ".join(parts) + words[found.end() :])


def check_folder(folder: Path, tensors: str, reads: dict[str, str]) -> dict[str, Any]:
    files = {path.name: json.loads(path.read_text(), parse_constant=pytest.fail) for path in folder.glob("*.json")}
    config: dict[str, Any] = files["config.json"]
    for server, keys in reads.items():
        assert set(braces(keys)) <= config.keys(), server
    assert set(TensorFiles(folder).keys()) == set(braces(tensors))
    return config


def exported(name: str, folder: Path) -> Path:
    family, config, format = EXPORTS[name][:3]
    model_class = FAMILIES[family]
    sizes = {"vocab_size": 384, "hidden_size": 8, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model_class(model_class.config_class(**sizes | config)).save_pretrained(folder / "ours")
    byte_tokenizer().save_pretrained(folder / "ours")
    return export_checkpoint(str(folder / "ours"), folder / "theirs", format)


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_holds_what_the_loaders_read(name: str, tmp_path: Path) -> None:
    folder, export = exported(name, tmp_path), EXPORTS[name]
    config = check_folder(folder, export.tensors, export.reads)
    assert config["architectures"] == [export.architecture]
    if export.format != "transformers":
        return
    assert config["intermediate_size"] == 2 * config["hidden_size"]  # llama.cpp takes no other
    ids = torch.randint(3, 29, (2, 9))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
        torch.testing.assert_close(load_model(str(tmp_path / "ours")).eval()(ids).logits, theirs, atol=1e-6, rtol=1e-5)


def test_what_is_written_for_servers_is_not_taken_over_from_them(tmp_path: Path) -> None:
    convert_checkpoint(str(exported("mamba2", tmp_path)), tmp_path / "again")
    assert not {"intermediate_size", "rms_norm"} & json.loads((tmp_path / "again" / "config.json").read_text()).keys()


def test_a_hybrid_that_was_loaded_and_saved_holds_what_the_loaders_read(tmp_path: Path) -> None:
    stateful(tiny_model("falcon_h1", head_dim=8)).save_pretrained(tmp_path)
    assert check_folder(tmp_path, FALCON_H1, HYBRID)["architectures"] == ["FalconH1ForCausalLM"]
