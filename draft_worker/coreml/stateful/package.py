"""A package with states, checked at load: its layout, its program and its tokenizer. Knows no engine."""

from pathlib import Path
from typing import NamedTuple

from draft_worker.coreml.program_file import ProgramFile
from draft_worker.coreml.stateful.description import description
from draft_worker.coreml.stateful.layout import StatefulLayout, layout
from protocol.errors import InputError


class StatefulPackage(NamedTuple):
    path: Path
    layout: StatefulLayout
    file: ProgramFile
    tokenizer: Path
    """Folder of the tokenizer.json."""

    @classmethod
    def open(cls, path: Path) -> "StatefulPackage":
        """Raises InputError, which says what does not fit, for a package that can't draft or lacks its tokenizer.

        The weights are not read: Core ML knows more kinds of them than the executor.
        """
        file = ProgramFile(path)
        found = layout(description(file), path)
        folder = _tokenizer_folder(path, found.source)
        size = _tokens(folder)
        if size > found.vocabulary:
            raise InputError(
                f"{folder}/tokenizer.json has {size:,} tokens and {path} has logits of {found.vocabulary:,}: "
                f"put the tokenizer.json of {found.source or 'the model that was converted'} beside the package."
            )
        return cls(path, found, file, folder)


def _tokenizer_folder(path: Path, source: str) -> Path:
    """The folder with the package's tokenizer: beside it, or in the copy of its source that was downloaded."""
    if (path.parent / "tokenizer.json").is_file():
        return path.parent
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        downloaded = try_to_load_from_cache(source, "tokenizer.json") if source else None
    except HFValidationError:
        downloaded = None
    if isinstance(downloaded, str):
        return Path(downloaded).parent
    raise InputError(
        f"{path} has no tokenizer, so its token ids can't be compared with the target's: put the tokenizer.json of "
        f"{source or 'the model that was converted'} into {path.parent}."
    )


def _tokens(folder: Path) -> int:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The library raises no type of its own.
    except Exception as error:
        raise InputError(f"{folder}/tokenizer.json is broken ({error}): download it again.") from error
    return tokenizer.get_vocab_size(with_added_tokens=True)
