"""`launch-pipeline serve` with several models: real pipelines that come and go, and one that breaks."""

import shutil
from pathlib import Path

import pytest

from orchestrator import SamplingParams
from orchestrator.text.chat_template import ChatTemplate
from tests.conftest import Reference
from tests.end_to_end.test_http_serve import CHAT, Serving
from tests.support.paths import DEMO_TARGET

ASKED = {"messages": [{"role": "user", "content": "import"}], "temperature": 0.7, "seed": 5, "max_tokens": 12}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A model whose weights are gone by the time it is loaded."""
    return Path(shutil.copytree(DEMO_TARGET, tmp_path / "broken"))


def test_models_come_and_go_as_requests_name_them(tmp_path: Path, broken: Path, reference: Reference):
    file = tmp_path / "config.toml"
    file.write_text(
        f"arena-memory = 64\nprefix-cache-memory = 16\n[models.pair]\npair = 'demo'\naliases = ['gpt-4o-mini']\n"
        f"[models.plain]\ntarget = '{DEMO_TARGET}'\nstrategy = 'ar'\n[models.broken]\ntarget = '{broken}'\n"
        "strategy = 'ar'\n"
    )
    template = ChatTemplate(DEMO_TARGET)
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=12, stop=template.stops)
    expected = reference(template.tokens(ASKED["messages"]), params).text
    # Each model takes about 1 GiB, so only one fits.
    with Serving("--models-memory", "1.5", settings=file) as server:
        for weights in broken.glob("*.safetensors"):
            weights.unlink()
        assert server.streamed(CHAT, **ASKED) == expected
        assert server.post(CHAT, **ASKED, model="plain")["choices"][0]["message"]["content"] == expected
        refused = server.client.post(CHAT, json={**ASKED, "model": "broken"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        assert "The model broken can't be loaded." in refused.json()["error"]["message"]
        assert server.streamed(CHAT, **ASKED, model="gpt-4o-mini") == expected
        told = server.client.get("/health").json()["models"]
        assert [told[name]["status"] for name in ("pair", "plain", "broken")] == ["ok", "unloaded", "failed"]
    assert (server.code, server.errors.strip().splitlines()[-1]) == (130, "Interrupted.")
