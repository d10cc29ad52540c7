"""Text to token ids and back, whatever files a checkpoint folder brings."""

import functools
import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.plan.model_shape import ModelShape

# Any one of these makes a folder one with a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


class Tokenizer:
    """A checkpoint's tokenizer, with OPT's leading `</s>` neither lost nor doubled."""

    def __init__(self, backend: PreTrainedTokenizerBase, leading_id: int | None):
        self._backend = backend
        self._leading_id = leading_id
        self._special_ids = frozenset(backend.all_special_ids)

    def check(self, text: str, most: int) -> None:
        """Raises ValueError if a text cannot be read, or has more than `most` tokens whatever they are.

        The second is told from its length alone: tokenising millions of letters takes minutes.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt has half a surrogate pair at character {error.start}; no text has that") from None
        fewest = len(text) // self._longest_token
        if fewest > most:
            raise ValueError(
                f"prompt of {len(text):,} characters has at least {fewest:,} tokens, and the context has {most:,};"
                " shorten it"
            )

    @functools.cached_property
    def _longest_token(self) -> int:
        """The most bytes, and so the most characters, that a token stands for."""
        return max(len(token.encode(errors="surrogatepass")) for token in self._backend.get_vocab())

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens at its start included."""
        if self._leading_id is None:
            return list(self._backend(text, verbose=False).input_ids)
        return [self._leading_id, *self.encode_part(text)]

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens."""
        return list(self._backend(text, add_special_tokens=False, verbose=False).input_ids)

    def decode(self, ids: list[int]) -> str:
        """Text of generated ids, without special tokens."""
        return str(self._backend.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def decode_tail(self, ids: list[int], visible: int) -> str:
        """Text of the last `visible` ids that are not special (those have no text and would shorten the tail)."""
        shown = [token for token in ids if token not in self._special_ids]
        return self.decode(shown[-visible:])


def load_tokenizer(folder: Path, config: ModelShape) -> Tokenizer | None:
    """The tokenizer of a folder in Hugging Face format; None if it has none. Raises UsageError if it is broken."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        settings = _read_settings(folder / "tokenizer_config.json")
        backend = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the library raises for a broken file, the file is what is wrong
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"the tokenizer in {folder} cannot be loaded: {reason}") from error
    # OPT was trained with a leading `</s>`. Versions of the library differ in whether the tokenizer adds it, so where
    # its settings ask for one it is added here. Without that setting (Galactica) the tokenizer's own way stands.
    # OPT's own files (vocab.json and merges.txt) may come without settings.
    asks_for_one = settings.get("add_bos_token", not (folder / "tokenizer.json").is_file())
    leading_id = config.bos_token_id if asks_for_one else None
    return Tokenizer(backend, leading_id)


def _read_settings(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    settings = json.loads(path.read_text(encoding="utf-8"))
    return settings if isinstance(settings, dict) else {}
