"""The tokenizer that tests of the data share."""

from __future__ import annotations

import pytest

from jaxrl_sat.data.characters import write_tokenizer
from jaxrl_sat.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)
