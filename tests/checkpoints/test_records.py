"""Which files a verification speaks for."""

from pathlib import Path

from hf_recurrent_lengthgen.checkpoints.records import verified_files


def test_a_verification_speaks_for_tokenizer_and_generation_too(tmp_path: Path) -> None:
    names = {
        *("config.json", "model.safetensors", "modeling.py", "generation_config.json", "tokenizer.json"),
        *("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "vocab.json", "merges.txt"),
        *("rwkv_vocab_v20230424.txt", "tokenizer.model", "chat_template.jinja", "additional_chat_templates/a.jinja"),
    }
    (tmp_path / "additional_chat_templates").mkdir()
    for name in (*names, "README.md", "lineage.json", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert verified_files(tmp_path).keys() == names
    before = verified_files(tmp_path)
    (tmp_path / "added_tokens.json").write_text("y")
    assert {name for name, _ in before.items() ^ verified_files(tmp_path).items()} == {"added_tokens.json"}
