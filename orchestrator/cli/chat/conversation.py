"""What has been said in a chat, and the commands that change how it goes on. Pure."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from orchestrator.api.sampling import SamplingParams
from protocol.errors import InputError

HELP = """\
/help             this list
/clear            forget what was said; the system text stays
/system TEXT      the system text, before everything else; without TEXT: none
/save FILE        write the conversation as Markdown
/temperature X    0 takes the most probable token
/seed N           equal seeds give equal answers; without N: a fresh one each time
/quit             end; so does Ctrl-D

Enter sends. Alt-Enter, or a backslash at the end of the line, begins a new line. Ctrl-C stops an answer.
A message that begins with a slash: write two."""
_OTHER_NAMES = {"?": "help", "bye": "quit", "exit": "quit", "new": "clear", "q": "quit", "reset": "clear"}
"""Names that other programs give to commands; `/help` does not list them."""


@dataclass
class ChatConversation:
    """`save` writes a text to the file that the user names; it raises InputError if it can't."""

    params: SamplingParams
    save: Callable[[str, str], None]
    system: str = ""
    over: bool = False
    """The user asked to end the chat."""
    _said: list[dict[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> list[dict[str, str]]:
        """All messages of the prompt for the answer to `question`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._said, {"role": "user", "content": question}]

    def answered(self, question: str, answer: str) -> None:
        """Add both to the conversation, unless the answer was stopped before its first word."""
        if answer:
            self._said += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> str:
        """Carry out a line for which `is_command` holds; the reply. Raises InputError for a wrong command or value."""
        name, _, rest = line[1:].strip().partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "help": lambda _: HELP,
            "clear": self._clear,
            "system": self._system,
            "save": self._save,
            "temperature": self._temperature,
            "seed": self._seed,
            "quit": self._quit,
        }
        name = _OTHER_NAMES.get(name, name)
        if name not in commands:
            begun = [each for each in commands if name and each.startswith(name)]
            near = begun or difflib.get_close_matches(name, commands, 1)
            known = f"did you mean /{near[0]}? /help lists all" if near else f"there are /{', /'.join(commands)}"
            raise InputError(f"There is no /{name}: {known}.")
        return commands[name](rest.strip())

    def markdown(self) -> str:
        """The conversation as a document."""
        parts = [f"*System:* {self.system}"] if self.system else []
        parts += [f"**{message['role'].capitalize()}:**\n\n{message['content']}" for message in self._said]
        return "\n\n".join(parts) + "\n"

    def _clear(self, _: str) -> str:
        self._said.clear()
        return "Forgotten."

    def _system(self, text: str) -> str:
        self.system = text
        return "It holds from the next message on." if text else "There is no system text."

    def _save(self, file: str) -> str:
        if not file:
            raise InputError("/save needs the name of a file.")
        self.save(file, self.markdown())
        return f"Written to {file}."

    def _temperature(self, text: str) -> str:
        try:
            self._change(temperature=float(text))
        except ValueError as error:
            raise InputError(f"/temperature needs a number, for instance 0.7, not {text!r}.") from error
        return f"The temperature is {self.params.temperature:g}."

    def _seed(self, text: str) -> str:
        try:
            self._change(seed=int(text) if text else None)
        except ValueError as error:
            raise InputError(f"/seed needs a whole number, not {text!r}.") from error
        return "Each answer has a seed of its own." if self.params.seed is None else f"The seed is {self.params.seed}."

    def _quit(self, _: str) -> str:
        self.over = True
        return ""

    def _change(self, **values: float | None) -> None:
        changed = structs.replace(self.params, **values)
        changed.submit("", "check")
        self.params = changed


def is_command(line: str) -> bool:
    return line.startswith("/") and not line.startswith("//")


def without_escape(line: str) -> str:
    """The message in a line for which `is_command` does not hold."""
    return line[1:] if line.startswith("//") else line
