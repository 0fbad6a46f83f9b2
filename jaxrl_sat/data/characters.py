"""The tokenizer of the embedded model: one token a character, in Hugging Face format."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>")
CHARACTERS = "0123456789+-*/=() "
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<assistant>{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant speak, not ' + message['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json; a prompt is <bos><user>1+2<assistant>."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    core.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    core.save(str(folder / "tokenizer.json"))
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    _write_json(folder / "tokenizer_config.json", {**config, "add_bos_token": False, "chat_template": CHAT_TEMPLATE})
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write_json(folder / "generation_config.json", {**ids, "do_sample": True, "temperature": 1.0})


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
