"""What the study of mixing asks: one document of a row has the key, and text follows the last one."""

from typing import Any

import torch

from hf_recurrent_lengthgen.checkpoints.loading import load_tokenizer


def test_one_document_of_each_row_has_the_key_and_all_have_one_length(example: Any) -> None:
    study = example("passkey/mixing.py")
    tokenizer = load_tokenizer(str(study["CARDS"] / "passkey-base"))
    documents, question, answers = study["passkeys"](tokenizer, 3, 6, seed=0)
    assert {tuple(one.shape) for one in documents} == {(6, 128)}
    assert tokenizer.decode(question[0]).endswith("The pass key is")
    for row in range(6):
        key = tokenizer.decode(answers[row])
        having = [
            place for place, one in enumerate(documents) if f"The pass key is {key}" in tokenizer.decode(one[row])
        ]
        assert having == [row % 3]
        assert "pass key" not in tokenizer.decode(documents[having[0] - 1][row])


def test_text_follows_the_last_document(example: Any) -> None:
    stream = torch.arange(5000)
    documents, question, after = example("passkey/mixing.py")["texts"](stream, 2, 4, seed=0)
    assert question.shape == (4, 0)
    assert [tuple(one.shape) for one in (*documents, after)] == [(4, 128)] * 3
    assert torch.equal(after[:, 0], documents[-1][:, -1] + 1)
