"""One adapter a dialect: how a chat is asked in it, and what its answers say, whole and streamed alike."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

from orchestrator.text.chat_template import ChatTemplate
from tests.support.asked_server import CHAT, HELLO, TEMPLATE, post
from tests.support.fake_pipeline import FakePipeline

Body = dict[str, Any]
PENALTIES = ("frequency_penalty", "presence_penalty")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "reasoning_eos")


@dataclass(frozen=True)
class Reply:
    """What an answer says, in whatever dialect."""

    text: str
    thoughts: str
    """All of them, with an empty line between two."""
    calls: list[tuple[str, Any]]
    """Names and arguments."""
    cut: bool
    """It was cut off at its limit of tokens."""
    usage: tuple[int, int, int]
    """Tokens: of the prompt, of these the cached ones, of the answer."""
    warnings: list[str]


class Dialect:
    """`body` takes the fields of a chat of OpenAI's."""

    path: str

    def body(self, chat: Body) -> Body:
        raise NotImplementedError

    def whole(self, events: list[Any]) -> Any:
        """The object that the events of a stream add up to."""
        raise NotImplementedError

    def reply(self, answer: Any) -> Reply:
        raise NotImplementedError

    def events(self, response: httpx.Response) -> list[Any]:
        """Those of a stream, whose names are their types."""
        found = []
        for block in response.text.strip().split("\n\n"):
            if not block.startswith(":"):
                name, data = block.split("\n")
                found.append(json.loads(data.removeprefix("data: ")))
                assert name == f"event: {found[-1]['type']}"
        return found

    def error(self, answer: Any) -> str:
        """The sentence in an error."""
        return answer["error"]["message"]

    def logprobs(self, answer: Any) -> Any:
        raise NotImplementedError

    def asked(
        self, pipeline: FakePipeline | None = None, template: ChatTemplate = TEMPLATE, **fields: Any
    ) -> httpx.Response:
        """The response to a chat, HELLO if `fields` has no messages."""
        return post(self.path, self.body({**HELLO, **fields}), pipeline, template=template)

    def answer(
        self,
        pipeline: FakePipeline | None = None,
        template: ChatTemplate = TEMPLATE,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """The whole object, which a stream must add up to."""
        response = self.asked(pipeline, template, stream=stream, **fields)
        assert response.status_code == 200, response.text
        return self.whole(self.events(response)) if stream else response.json()


def _given(**fields: Any) -> Body:
    return {name: value for name, value in fields.items() if value is not None}


def _object(arguments: str) -> Any:
    """A call that was cut off has arguments that are no JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {"INVALID_JSON": arguments}


def _without(answer: Any, *names: str) -> Any:
    """Without fields of these names, at any depth."""
    if isinstance(answer, dict):
        return {name: _without(value, *names) for name, value in answer.items() if name not in names}
    return [_without(each, *names) for each in answer] if isinstance(answer, list) else answer


def unnamed(answer: Any) -> Any:
    """Without what is drawn again for each answer."""
    return _without(answer, "id", "call_id", "created", "created_at")


class Chat(Dialect):
    path = CHAT

    def body(self, chat: Body) -> Body:
        return {**chat, **({"stream_options": {"include_usage": True}} if chat.get("stream") else {})}

    def events(self, response: httpx.Response) -> list[Any]:
        """Without comments."""
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
        if lines[-1] == "[DONE]":
            lines.pop()
        return [json.loads(line) for line in lines]

    def whole(self, events: list[Any]) -> Any:
        *chunks, last = events
        message: Body = {"role": "assistant", "content": "", "refusal": None}
        choice: Body = {"index": 0, "message": message, "logprobs": None}
        for chunk in chunks:
            (part,) = chunk["choices"]
            assert chunk["usage"] is None
            delta = part["delta"]
            for name in ("content", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", []):
                calls, place = message.setdefault("tool_calls", []), call.pop("index")
                if "id" in call:
                    assert place == len(calls)
                    calls.append(call)
                else:
                    assert place == len(calls) - 1
                    assert call.keys() == {"function"}
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            if part["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
                choice["logprobs"]["content"] += part["logprobs"]["content"]
            choice["finish_reason"] = part["finish_reason"]
        if "tool_calls" in message:
            message["content"] = message["content"].strip() or None
        heads = {json.dumps([chunk[name] for name in ("id", "created", "model")]) for chunk in events}
        assert len(heads) == 1
        told = [warning for chunk in chunks for warning in chunk.get("warnings", [])]
        head = {**last, "object": "chat.completion", "choices": [choice]}
        return {**head, **({"warnings": told} if told else {})}

    def reply(self, answer: Any) -> Reply:
        (choice,) = answer["choices"]
        message, usage = choice["message"], answer["usage"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert (choice["finish_reason"] == "tool_calls") == (bool(calls) and choice["finish_reason"] != "length")
        return Reply(
            message["content"] or "",
            message.get("reasoning_content", ""),
            [(call["name"], _object(call["arguments"])) for call in calls],
            choice["finish_reason"] == "length",
            (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]),
            answer.get("warnings", []),
        )

    def logprobs(self, answer: Any) -> Any:
        return answer["choices"][0]["logprobs"]["content"]


class Responses(Dialect):
    path = "/v1/responses"

    def body(self, chat: Body) -> Body:
        form = chat.get("response_format")
        choice = chat.get("tool_choice")
        flat = form and {"type": form["type"], **form.get("json_schema", {})}
        return {
            "input": [item for turn in chat["messages"] for item in self._items(turn)],
            **_given(
                **{name: chat.get(name) for name in (*SAMPLING, "stream", "parallel_tool_calls", "top_logprobs")},
                max_output_tokens=chat.get("max_tokens"),
                tools=chat.get("tools") and [{"type": "function", **tool["function"]} for tool in chat["tools"]],
                tool_choice={"type": "function", **choice["function"]} if isinstance(choice, dict) else choice,
                text=flat and {"format": flat},
                include=chat.get("logprobs") and ["message.output_text.logprobs"],
            ),
        }

    def _items(self, turn: Body) -> list[Body]:
        if turn["role"] == "tool":
            output = [{"type": "input_text", "text": turn["content"]}]
            return [{"type": "function_call_output", "call_id": turn["tool_call_id"], "output": output}]
        kind = "output_text" if turn["role"] == "assistant" else "input_text"
        said = {"role": turn["role"], "content": [{"type": kind, "text": turn["content"]}]}
        thought = [{"type": "reasoning_text", "text": turn.get("reasoning_content")}]
        calls = [
            {"type": "function_call", "call_id": call["id"], **call["function"]} for call in turn.get("tool_calls", [])
        ]
        return [*([{"type": "reasoning", "content": thought}] if thought[0]["text"] else []), said, *calls]

    def events(self, response: httpx.Response) -> list[Any]:
        found = super().events(response)
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        return found

    def whole(self, events: list[Any]) -> Any:
        """The last event has it; the small steps before must add up to its items."""
        created, begun, *steps, last = events
        assert [created["type"], begun["type"]] == ["response.created", "response.in_progress"]
        answer = last["response"]
        warnings = created["response"].get("warnings", [])
        assert answer.get("warnings", [])[: len(warnings)] == warnings
        assert last["type"] == f"response.{answer['status']}"
        assert self.rebuilt(steps) == answer["output"]
        return answer

    def rebuilt(self, steps: list[Any]) -> list[Any]:
        """The items that the events tell of, by their small steps alone. One ends before the next begins."""
        items: list[Any] = []
        kinds: list[str] = []
        # Signs of life come between any two steps.
        for event in (step for step in steps if step["type"] != "response.in_progress"):
            content: Any = items[-1].get("content") if items else None
            kinds = [*kinds, event["type"].removeprefix("response.")]
            match kinds[-1]:
                case "output_item.added":
                    kinds = kinds[-1:]
                    assert event["output_index"] == len(items)
                    items.append(event["item"])
                case "content_part.added":
                    items[-1]["content"] = [event["part"]]
                case "output_text.delta" | "reasoning_text.delta":
                    content[event["content_index"]]["text"] += event["delta"]
                    content[event["content_index"]].get("logprobs", []).extend(event.get("logprobs", []))
                case "output_text.done" | "reasoning_text.done":
                    assert content[event["content_index"]]["text"] == event["text"]
                case "function_call_arguments.delta":
                    items[-1]["arguments"] += event["delta"]
                case "custom_tool_call_input.delta":
                    items[-1]["input"] += event["delta"]
                case "output_item.done":
                    items[-1]["status"] = event["item"]["status"]
                    assert items[-1] == event["item"]
                    _, *inner, _ = dict.fromkeys(kinds)
                    if "content" in items[-1]:
                        first, *inner, last = inner
                        assert (first, last) == ("content_part.added", "content_part.done")
                    assert [kind.rpartition(".")[2] for kind in inner] == ["delta", "done"]
            assert event.get("output_index", len(items) - 1) == len(items) - 1
        return items

    def reply(self, answer: Any) -> Reply:
        usage = answer["usage"]
        kinds: dict[str, list[Any]] = {"message": [], "reasoning": [], "function_call": []}
        for item in answer["output"]:
            kinds[item["type"]].append(item)
        cut = answer["status"] == "incomplete"
        assert answer["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        return Reply(
            "".join(item["content"][0]["text"] for item in kinds["message"]),
            "\n\n".join(item["content"][0]["text"] for item in kinds["reasoning"]),
            [(item["name"], _object(item["arguments"])) for item in kinds["function_call"]],
            cut,
            (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]),
            answer.get("warnings", []),
        )

    def logprobs(self, answer: Any) -> Any:
        return answer["output"][0]["content"][0]["logprobs"]


class Messages(Dialect):
    path = "/v1/messages"

    def body(self, chat: Body) -> Body:
        form = chat.get("response_format")
        return {
            "messages": [self._turn(turn) for turn in chat["messages"]],
            "max_tokens": chat.get("max_tokens", 99),
            **_given(
                **{name: chat.get(name) for name in (*SAMPLING, "stream")},
                stop_sequences=chat.get("stop"),
                tools=chat.get("tools") and [self._tool(**tool["function"]) for tool in chat["tools"]],
                tool_choice=self._choice(chat.get("tool_choice"), chat.get("parallel_tool_calls")),
                output_config=form and {"format": {"type": form["type"], **form.get("json_schema", {})}},
            ),
        }

    def _tool(self, parameters: Any, **named: Any) -> Body:
        return {**named, "input_schema": parameters}

    def _choice(self, choice: Any, several: bool | None) -> Body | None:
        if isinstance(choice, dict):
            return {"type": "tool", **choice["function"]}
        at_most_one = {} if several is None else {"disable_parallel_tool_use": not several}
        return (
            {"type": {None: "auto", "required": "any"}.get(choice, choice), **at_most_one}
            if (choice or at_most_one)
            else None
        )

    def _turn(self, turn: Body) -> Body:
        text = {"type": "text", "text": turn["content"]}
        if turn["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": turn["tool_call_id"], "content": [text]}
            return {"role": "user", "content": [result]}
        thought = turn.get("reasoning_content")
        calls = [
            {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            for call in turn.get("tool_calls", [])
        ]
        thoughts = [{"type": "thinking", "thinking": thought, "signature": "s"}] if thought else []
        return {"role": turn["role"], "content": [*thoughts, text, *calls]}

    def whole(self, events: list[Any]) -> Any:
        events = [event for event in events if event["type"] != "ping"]
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
        message, arguments = events[0]["message"], ""
        blocks, warnings = message["content"], message.pop("warnings", [])
        for event in events[1:-1]:
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(blocks)
                    blocks.append(event["content_block"])
                    arguments = ""
                case "content_block_delta" if event["delta"]["type"] == "input_json_delta":
                    arguments += event["delta"]["partial_json"]
                case "content_block_delta":
                    name = event["delta"]["type"].removesuffix("_delta")
                    blocks[event["index"]][name] += event["delta"][name]
                case "content_block_stop":
                    if arguments:
                        blocks[event["index"]]["input"] = _object(arguments)
                case "message_delta":
                    message |= event["delta"]
                    message["usage"] |= event["usage"]
                    message["speculation"] = event["speculation"]
                    warnings = [*warnings, *event.get("warnings", [])]
        stopped = [event["index"] for event in events if event["type"] == "content_block_stop"]
        assert stopped == list(range(len(blocks)))
        return {**message, **({"warnings": warnings} if warnings else {})}

    def reply(self, answer: Any) -> Reply:
        usage, blocks = answer["usage"], answer["content"]
        calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        assert all(block["signature"] for block in blocks if block["type"] == "thinking")
        assert (answer["stop_reason"] == "tool_use") == (bool(calls) and answer["stop_reason"] != "max_tokens")
        cached = usage["cache_read_input_tokens"]
        return Reply(
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            "\n\n".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            calls,
            answer["stop_reason"] == "max_tokens",
            (usage["input_tokens"] + cached, cached, usage["output_tokens"]),
            answer.get("warnings", []),
        )


class Ollama(Dialect):
    path = "/api/chat"

    def body(self, chat: Body) -> Body:
        form = chat.get("response_format") or {}
        schema = form.get("json_schema", {}).get("schema")
        options = {name: chat[name] for name in (*SAMPLING, *PENALTIES, "stop") if name in chat}
        return {
            "messages": [self._turn(turn) for turn in chat["messages"]],
            "stream": bool(chat.get("stream")),
            "options": {**options, **_given(num_predict=chat.get("max_tokens"))},
            **{name: chat[name] for name in ("tools", "logprobs", "top_logprobs") if name in chat},
            **_given(format=schema or ("json" if form.get("type") == "json_object" else None)),
        }

    def _turn(self, turn: Body) -> Body:
        return {**turn, **_given(thinking=turn.get("reasoning_content"))}

    def events(self, response: httpx.Response) -> list[Any]:
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.text.splitlines()]

    def whole(self, events: list[Any]) -> Any:
        assert [event["done"] for event in events] == [False] * (len(events) - 1) + [True]
        message: Body = {"role": "assistant", "content": ""}
        logprobs: list[Any] = []
        for event in events:
            for name, value in event["message"].items():
                if name != "role":
                    message[name] = message[name] + value if name in message else value
            logprobs += event.get("logprobs", [])
        return {**events[-1], "message": message, **({"logprobs": logprobs} if logprobs else {})}

    def reply(self, answer: Any) -> Reply:
        message = answer["message"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        return Reply(
            message["content"],
            message.get("thinking", ""),
            [(call["name"], call["arguments"]) for call in calls],
            answer["done_reason"] == "length",
            # This API tells nothing of what was cached.
            (answer["prompt_eval_count"], 1, answer["eval_count"]),
            answer.get("warnings", []),
        )

    def error(self, answer: Any) -> str:
        return answer["error"]

    def logprobs(self, answer: Any) -> Any:
        return answer["logprobs"]


CHATS, RESPONSES, MESSAGES, OLLAMA = Chat(), Responses(), Messages(), Ollama()
DIALECTS: dict[str, Dialect] = {"chat": CHATS, "responses": RESPONSES, "messages": MESSAGES, "ollama": OLLAMA}
