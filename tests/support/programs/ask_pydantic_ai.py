"""Runs pydantic-ai's agents with the model of the first argument, by chats and by Responses, and prints what came as
one JSON object. The server is that of OPENAI_BASE_URL, the key that of OPENAI_API_KEY."""

import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, capture_run_messages
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.settings import ModelSettings

SETTINGS = ModelSettings(max_tokens=100)


class City(BaseModel):
    name: str
    country: str


class AskFirst(AbstractCapability):
    """The first answer is a call of `capital`, the second one the result."""

    def get_model_settings(self):
        return lambda context: ModelSettings(tool_choice=["capital" if context.run_step == 1 else "final_result"])


def answers(model: str) -> dict:
    asked = []

    def capital(country: str) -> str:
        """The capital of a country."""
        asked.append(country)
        return "Paris"

    stated = "Paris is the capital of France. Which city, in which country?"
    form = Agent(model, output_type=NativeOutput(City), model_settings=SETTINGS).run_sync(stated)
    agent = Agent(model, output_type=City, model_settings=SETTINGS, capabilities=[AskFirst()], tools=[capital])
    with capture_run_messages() as messages:
        called = agent.run_sync("What is the capital of France?")
    kinds = [part.part_kind for message in messages for part in message.parts]
    return {"form": form.output.model_dump(), "asked": asked, "called": called.output.model_dump(), "parts": kinds}


print(json.dumps({api: answers(f"{api}:{sys.argv[1]}") for api in ("openai-chat", "openai-responses")}))
