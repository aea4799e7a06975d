"""Runs openai-agents with the model of the first argument, by chats and by Responses, and prints what came as one JSON
object. The server is that of OPENAI_BASE_URL, the key that of OPENAI_API_KEY."""

import json
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: str
    country: str


def answers(model) -> dict:
    asked = []

    # After the call the model has no tool left, so it answers with a text.
    @function_tool(is_enabled=lambda context, agent: not asked)
    def capital(country: str) -> str:
        """The capital of a country."""
        asked.append(country)
        return "Paris"

    call = ModelSettings(tool_choice="required", max_tokens=60)
    agent = Agent(name="calls", model=model, tools=[capital], model_settings=call)
    called = Runner.run_sync(agent, "What is the capital of France?")
    former = Agent(name="form", model=model, output_type=City, model_settings=ModelSettings(max_tokens=60))
    form = Runner.run_sync(former, "Paris is the capital of France. Which city, in which country?")
    items = [item.type for item in called.new_items]
    return {"asked": asked, "items": items, "said": called.final_output, "form": form.final_output.model_dump()}


client = AsyncOpenAI(max_retries=0)
kinds = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
print(json.dumps({name: answers(kind(model=sys.argv[1], openai_client=client)) for name, kind in kinds.items()}))
