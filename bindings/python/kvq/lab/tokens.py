"""The tokenizer of SmolLM2, built from the vocabulary in its GGUF file.

Byte-level BPE; digits are split off one by one before GPT-2's word pattern applies.
"""

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .model import read_gguf

TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
CONTROL = 3  # GGUF token type of <|im_start|> and its like


class Tokens:
    """Text to token ids and back."""

    def __init__(self, reader=None):
        reader = reader or read_gguf()

        def field(key):
            return reader.get_field("tokenizer.ggml." + key).contents()

        names = field("tokens")
        merges = [tuple(m.split(" ")) for m in field("merges")]
        self._bpe = Tokenizer(models.BPE({t: i for i, t in enumerate(names)}, merges))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._bpe.decoder = decoders.ByteLevel()
        kinds = field("token_type")
        self._special = {name: i for i, name in enumerate(names) if kinds[i] == CONTROL}
        self.end_of_turn = self._special[END_OF_TURN]

    def turn(self, role):
        """Token ids [n] that open a turn of a chat; role "user" or "assistant"."""
        return np.concatenate([[self._special[TURN]], self.encode(role + "\n")])

    def hand_over(self):
        """Token ids [n] that end the user's turn and open the assistant's."""
        return np.concatenate([[self.end_of_turn], self.encode("\n"), self.turn("assistant")])

    def encode(self, text):
        """Token ids [n] of plain text; names of special tokens in it are plain text too."""
        return np.array(self._bpe.encode(text).ids, np.int32)

    def decode(self, ids):
        """The text of token ids."""
        return self._bpe.decode([int(i) for i in ids], skip_special_tokens=False)
