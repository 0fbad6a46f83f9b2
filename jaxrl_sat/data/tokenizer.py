"""Tokenizer and chat template of a Hugging Face model folder, without transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsInt

import jinja2
import jinja2.sandbox
import numpy as np
import tokenizers

from jaxrl_sat.types import InputError, reading

Template = Literal["chat", "none"]
"""How a problem is asked: as the user's message in the chat template, or as it stands."""

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{path} is not readable JSON: {_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _token_text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template file if there is one, else the config's own; of several named ones the one called "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, Sequence) and not isinstance(template, str):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _compile(template: str, folder: Path) -> jinja2.Template:
    """Compile a chat template as model authors expect it: trimmed blocks, loop controls, `raise_exception`."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    # A template comes with the model, so it may come from a stranger: it runs in the sandbox.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise InputError(f"the chat template in {folder} does not compile: {_line(error)}") from error


class Tokenizer:
    """Text to ids and back, and messages to text."""

    def __init__(
        self,
        folder: Path,
        core: tokenizers.Tokenizer,
        eos_ids: tuple[int, ...],
        pad_id: int,
        template: jinja2.Template | None,
        special: Mapping[str, str],
    ):
        self.folder = folder
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self._core = core
        self._template = template
        self._special = dict(special)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Read tokenizer.json, the chat template and the stop ids of a model folder.

        Stop ids are the union of what generation_config.json, config.json and tokenizer_config.json name as end of
        sequence. Raises InputError for a missing or unreadable file, or where no stop id is named.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"model folder {folder} does not exist")
        with reading(f"the tokenizer in model folder {folder}"):
            return cls._load(folder)

    @classmethod
    def _load(cls, folder: Path) -> Tokenizer:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise InputError(f"model folder {folder} has no tokenizer.json")
        try:
            core = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"{file} is not a tokenizer: {_line(error)}") from error
        core.no_padding()
        core.no_truncation()
        own = _read_json(folder / "tokenizer_config.json")
        special = {name: text for name in _SPECIAL if (text := _token_text(own.get(name))) is not None}
        eos_ids = _eos_ids(folder, core, special)
        pad = core.token_to_id(special["pad_token"]) if "pad_token" in special else None
        template = _chat_template(folder, own)
        compiled = _compile(template, folder) if template is not None else None
        return cls(folder, core, eos_ids, eos_ids[0] if pad is None else pad, compiled, special)

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return _load, (self.folder,)  # a compiled template cannot travel to another process

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._core.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as it stands: nothing is added, special tokens written in it count as such."""
        return self._core.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[SupportsInt] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; special tokens are left out unless asked for."""
        return self._core.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def asked(self, problem: str, template: Template) -> str:
        """The text of a problem as the model reads it, ready for `encode`. Raises what `render` does."""
        return problem if template == "none" else self.render([{"role": "user", "content": problem}])

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Messages ({"role", "content"}) through the chat template, ready for `encode`.

        Raises InputError where the folder has no chat template or the template refuses the messages.
        """
        if self._template is None:
            raise InputError(
                f"model folder {self.folder} has no chat template (chat_template.jinja or a chat_template "
                "in tokenizer_config.json); prompts cannot be rendered"
            )
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, tools=None, **self._special
            )
        except Exception as error:  # whatever a template does wrong is the template's fault, not ours
            raise InputError(f"the chat template in {self.folder} fails: {_line(error)}") from error


def _load(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def _eos_ids(folder: Path, core: tokenizers.Tokenizer, special: Mapping[str, str]) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        named = _read_json(folder / name).get("eos_token_id")
        ids += [named] if isinstance(named, int) else list(named or ())
    if "eos_token" in special:
        own = core.token_to_id(special["eos_token"])
        if own is None:
            raise InputError(f"eos_token {special['eos_token']!r} of {folder} is not in its tokenizer.json")
        ids.append(own)
    if not ids:
        raise InputError(f"model folder {folder} names no end of sequence: give eos_token_id in generation_config.json")
    words = core.get_vocab_size(with_added_tokens=True)
    for i in ids:
        if not isinstance(i, int) or not 0 <= i < words:
            raise InputError(f"eos_token_id {i!r} of {folder}; allowed: a word of its tokenizer, 0 to {words - 1}")
    return tuple(dict.fromkeys(ids))
