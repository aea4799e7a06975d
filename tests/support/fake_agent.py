"""A stand-in for codex: it asks the server that its options name, and writes what it was told and answered."""

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import json, os, signal, sys, time, tomllib, urllib.request
signal.signal(signal.SIGINT, lambda *_: sys.exit(9))
words = sys.argv[1:]
settings = tomllib.loads("\\n".join(value for option, value in zip(words, words[1:]) if option == "-c"))
provider = settings["model_providers"][settings["model_provider"]]
body = {{"model": settings["model"], "prompt": "def quicksort(items):", "temperature": 0, "max_tokens": 8}}
request = urllib.request.Request(
    provider["base_url"] + "/completions",
    json.dumps(body).encode(),
    {{"authorization": "Bearer " + os.environ[provider["env_key"]], "content-type": "application/json"}},
)
with urllib.request.urlopen(request, timeout=60) as answer:
    text = json.load(answer)["choices"][0]["text"]
base, arguments = provider["base_url"], words[words.index("exec"):]
print(json.dumps({{"text": text, "base": base, "model": settings["model"], "arguments": arguments}}), flush=True)
if "wait" in words:
    time.sleep(60)
sys.exit(3)
"""


def write_fake_codex(folder: Path) -> Path:
    """Returns the folder for PATH. Its exit code is 3; with the argument `wait` it waits for Ctrl-C, then it is 9."""
    folder.mkdir()
    program = folder / "codex"
    program.write_text(_PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return folder
