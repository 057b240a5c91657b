"""The tokenizers, by name."""

from lib.errors import UserError

TOKENIZERS = ("gpt2", "bytes")
END_OF_TEXT = "<|endoftext|>"


def get_tokenizer(name):
    """A tiktoken.Encoding by name: `gpt2`, or `bytes`, one token per byte and <|endoftext|>.

    Raises UserError for another name, and where the GPT-2 vocabulary is neither cached nor reachable.
    """
    import tiktoken

    if name == "bytes":
        # The pattern only says where tiktoken cuts the text: short pieces keep its merge loop linear.
        return tiktoken.Encoding(
            "bytes",
            pat_str=r"[\s\S]{1,256}",
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={END_OF_TEXT: 256},
        )
    if name != "gpt2":
        raise UserError(f"tokenizer {name!r} is not known; choose one of {', '.join(TOKENIZERS)}")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever the download raised: tiktoken lets it through
        raise UserError(
            f"the GPT-2 vocabulary is not cached and could not be downloaded ({type(error).__name__}); "
            "put vocab.bpe and encoder.json into a folder as 6d1cbeee0f20b3d9449abfede4726ed8212e3aee "
            "and 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6 and set TIKTOKEN_CACHE_DIR to it"
        ) from error
