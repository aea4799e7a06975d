"""Lets instructor fill a form with the model of the first argument, in three of its modes and from a stream, and prints
what came as one JSON object. The server is that of OPENAI_BASE_URL, the key that of OPENAI_API_KEY."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "Paris is the capital of France. Which city, in which country?"}]


class City(BaseModel):
    name: str
    country: str
    capital: bool


def client(mode: str):
    return instructor.from_openai(OpenAI(max_retries=0), mode=instructor.Mode[mode])


asked = {"model": sys.argv[1], "messages": MESSAGES, "response_model": City, "max_tokens": 100}
forms = {mode: client(mode).create(**asked, max_retries=0) for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA")}
*_, forms["streamed"] = client("JSON_SCHEMA").create_partial(**asked)
print(json.dumps({mode: form.model_dump() for mode, form in forms.items()}))
