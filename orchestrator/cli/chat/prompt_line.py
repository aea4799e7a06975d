"""The line that one types into: several lines long if wanted, remembered in a file. The only user of prompt_toolkit."""

from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from protocol.security.private_files import private_folder, read_private, write_private


def prompt_session(history: Path | None) -> PromptSession[str]:
    """Enter sends; Alt-Enter, or Enter behind a backslash, begins a new line. `history` is made if need be.

    Raises InputError for a history that somebody else could read.
    """
    known = InMemoryHistory() if history is None else FileHistory(str(_private(history)))
    return PromptSession(
        history=known, multiline=True, key_bindings=_keys(), prompt_continuation=lambda width, *_: " " * width
    )


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return keys


def _private(file: Path) -> Path:
    private_folder(file.parent)
    if read_private(file) is None:
        write_private(file, b"", replace=False)
    return file
