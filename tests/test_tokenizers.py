"""lib/tokenizers.py: the tokenizers, by name."""

import pytest
import tiktoken

from lib.errors import UserError
from lib.tokenizers import END_OF_TEXT, get_tokenizer


def test_the_bytes_tokenizer_is_one_token_a_byte():
    tokenizer = get_tokenizer("bytes")
    text = "naïve \x00 <|endoftext|>\n\n" + "a" * 100
    ids = tokenizer.encode(text, disallowed_special=())
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.n_vocab == 257 and tokenizer.encode(END_OF_TEXT, allowed_special="all") == [256]


def test_a_tokenizer_that_is_not_known_or_not_reachable_is_a_users_error(monkeypatch):
    with pytest.raises(UserError, match="tokenizer 'gpt5' is not known; choose one of gpt2, bytes"):
        get_tokenizer("gpt5")

    def offline(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match=r"GPT-2 vocabulary .*ConnectionError.*TIKTOKEN_CACHE_DIR"):
        get_tokenizer("gpt2")
