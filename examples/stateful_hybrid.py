"""Train a hybrid of Transformers with state passing, read a text in chunks, and generate from its state.

The model is a tiny random FalconH1, with attention and Mamba-2 in every layer; --model takes your own checkpoint.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, FalconH1Config, FalconH1ForCausalLM

from hf_recurrent_lengthgen.data import PackedBlocks, byte_tokenizer, standard_library_corpus, token_stream
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="checkpoint with tokenizer")
parser.add_argument("--output", default="example-output")
parser.add_argument("--steps", type=int, default=2)
options = parser.parse_args()

if options.model:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
else:
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    mamba = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 64}
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    config = FalconH1Config(vocab_size=len(tokenizer), num_hidden_layers=2, **sizes, **mamba, **special)
    model = FalconH1ForCausalLM(config)

model = stateful(model)
stream = token_stream(standard_library_corpus().texts("train"), tokenizer)
arguments = StatePassingConfig(
    output_dir=options.output,
    max_steps=options.steps,
    per_device_train_batch_size=4,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = StatePassingTrainer(model, arguments, train_dataset=PackedBlocks(stream, 128), processing_class=tokenizer)
trainer.train()
trainer.save_model()  # a stock checkpoint

model.eval()
state, attention_cache = None, model.new_attention_cache()
code = "def add(a, b):\n    return a + b\n\n" * 20
text, question = (
    tokenizer(x, add_special_tokens=False, return_tensors="pt").input_ids.to(model.device) for x in (code, "def ")
)
with torch.no_grad():
    for piece in text.split(256, dim=1):
        output = model(piece, initial_state=state, attention_cache=attention_cache, output_final_state=True)
        state = output.final_state

answer = model.generate(
    question, initial_state=state, attention_cache=attention_cache, max_new_tokens=20, do_sample=False
)
print(f"Read {text.shape[1]} tokens, then: {tokenizer.decode(answer[0])!r}")
