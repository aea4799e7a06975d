"""The chat itself: message after message until the user has had enough."""

from orchestrator.cli.chat.answer import Answerer
from orchestrator.cli.chat.conversation import ChatConversation, is_command, without_escape
from orchestrator.cli.chat.screen import Screen
from protocol.errors import PipelineError

_ENDING = "Ctrl-C again, or Ctrl-D, ends the chat."


def converse(screen: Screen, conversation: ChatConversation, answerer: Answerer) -> None:
    """Until /quit, the end of the input, or two Ctrl-C in a row. Raises PipelineError where nobody looks on."""
    interrupted = False
    while not conversation.over:
        try:
            line = screen.ask()
        except KeyboardInterrupt:
            if interrupted or not screen.lasting:
                raise
            interrupted = True
            screen.tell(_ENDING)
            continue
        if line is None:
            return
        interrupted = False
        if line.strip():
            try:
                interrupted = _turn(screen, conversation, answerer, line.strip())
            except PipelineError as error:
                if not screen.lasting:
                    raise
                screen.tell(str(error), wrong=True)


def _turn(screen: Screen, conversation: ChatConversation, answerer: Answerer, line: str) -> bool:
    """One message or command; whether Ctrl-C stopped its answer."""
    if is_command(line):
        words = conversation.command(line)
        if words:
            screen.tell(words)
        return False
    question = without_escape(line)
    with screen.answering() as shown:
        answer = answerer.answer(conversation, question, shown.show)
        shown.finish(answer.text, answer.status)
    conversation.answered(question, answer.text)
    if answer.stopped and not screen.lasting:
        raise KeyboardInterrupt
    return answer.stopped
