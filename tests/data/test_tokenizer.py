"""Tokenizer, chat template and stop ids of a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxrl_sat.data.characters import CHARACTERS, SPECIAL, VOCAB_SIZE, write_tokenizer
from jaxrl_sat.data.tokenizer import Tokenizer
from jaxrl_sat.types import InputError

QUESTION = [{"role": "user", "content": "12+34"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def rewrite(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_one_token_a_character_and_back(folder):
    tokenizer = Tokenizer.load(folder)
    text = "<bos><user>" + CHARACTERS + "<assistant>46<eos>"
    ids = tokenizer.encode(text)
    assert ids == [1, 4, *range(len(SPECIAL), VOCAB_SIZE), 5, 10, 12, 2]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == CHARACTERS + "46"
    assert tokenizer.vocab_size == VOCAB_SIZE == 24
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((2,), 0)


def test_a_character_outside_the_alphabet_is_unknown_not_dropped(folder):
    assert Tokenizer.load(folder).encode("1é\n2") == [7, 3, 3, 8]


def test_chat_template(folder):
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.render(QUESTION) == "<bos><user>12+34<assistant>"
    answered = [*QUESTION, {"role": "assistant", "content": "46"}]
    assert tokenizer.render(answered, add_generation_prompt=False) == "<bos><user>12+34<assistant>46<eos>"
    with pytest.raises(InputError, match="only user and assistant speak, not system"):
        tokenizer.render([{"role": "system", "content": "be brief"}])


def test_template_file_goes_before_the_config_and_sees_what_models_expect(folder):
    (folder / "chat_template.jinja").write_text(
        "{%- for m in messages %}\n{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{{ eos_token }}\n{% endfor %}"
    )
    messages = [{"role": "user", "content": "é<"}, {"role": "user", "content": "2"}]
    assert Tokenizer.load(folder).render(messages) == '{"role": "user", "content": "é<"}<eos>\n'


def test_named_templates_and_token_objects(folder):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"}]
    rewrite(folder / "tokenizer_config.json", chat_template=named, bos_token={"content": "<bos>"})
    assert Tokenizer.load(folder).render(QUESTION) == "<bos>yes"


def test_a_template_cannot_reach_out_of_the_sandbox(folder):
    rewrite(folder / "tokenizer_config.json", chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InputError, match="chat template"):
        Tokenizer.load(folder).render(QUESTION)
    rewrite(folder / "tokenizer_config.json", chat_template="{{ messages.append(1) }}")
    with pytest.raises(InputError, match="chat template"):
        Tokenizer.load(folder).render(QUESTION)


def test_stop_ids_are_those_of_all_files_in_order(folder):
    rewrite(folder / "generation_config.json", eos_token_id=[5, 4])
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert Tokenizer.load(folder).eos_ids == (5, 4, 2)


def one_line(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        Tokenizer.load(folder).render(QUESTION)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_errors_name_the_folder_in_one_line(folder, tmp_path):
    assert "nowhere does not exist" in one_line(tmp_path / "nowhere")
    rewrite(folder / "tokenizer_config.json", chat_template="{% if %}")
    assert "does not compile" in one_line(folder)
    rewrite(folder / "tokenizer_config.json", chat_template=None)
    assert "has no chat template" in one_line(folder)
    rewrite(folder / "tokenizer_config.json", eos_token="<end>")
    assert "eos_token '<end>'" in one_line(folder)
    rewrite(folder / "tokenizer_config.json", eos_token=None)
    rewrite(folder / "generation_config.json", eos_token_id=None)
    assert "names no end of sequence" in one_line(folder)
    (folder / "tokenizer_config.json").write_text("{")
    assert "not readable JSON" in one_line(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer" in one_line(folder)
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in one_line(folder)
