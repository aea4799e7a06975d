"""The programs that can be launched, and what each one reads. Pure.

Sources: the programs' own documentation and `--help`; tests/end_to_end/test_agents.py runs them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class AskedServer:
    """A server, and the model that a program asks it for."""

    address: str
    """http://HOST:PORT, without a path."""
    key: str
    model: str
    context: int | None = None
    """Tokens of prompt and answer together; None if the server does not say."""
    knows_tools: bool = True
    """Whether the model's chat template does."""

    @property
    def openai(self) -> str:
        """The address that clients of OpenAI's API take."""
        return f"{self.address}/v1"


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """Settings for one process. The user's files stay as they are."""

    options: tuple[str, ...] = ()
    """Before the user's own. Every program on the machine can read them, so none holds the key."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables to set; those that are None are removed."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Variables to set unless the user has set them."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Content by name, for the private folder that options and environment point to."""


@dataclass(frozen=True, kw_only=True)
class AgentProgram:
    command: str
    """The name of the executable."""
    install: str
    """The command line that gets it."""
    settings: Callable[[AskedServer, Path], Invocation]
    """Pure: `Path` is the private folder, which need not exist."""


_NAME = "launch-pipeline"
_KEY = "LAUNCH_PIPELINE_API_KEY"
"""The variable for programs whose settings name one."""
_COMPACTS = "Azure"
"""The name of a provider that Codex asks for compaction with the turns' own tools, so that their KV is used again. It
shows the provider's key in its place. Others are asked for a summary in a prompt without tools."""
_CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
_CLAUDE_OUTPUT = 32_000
_CLAUDE_CLOUDS = ("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY")


def _codex(server: AskedServer, _: Path) -> Invocation:
    """`-c` overrules ~/.codex/config.toml key by key; its values are TOML, which JSON's strings are too."""
    provider = f"model_providers.{_NAME}"
    values: dict[str, str | int] = {
        "model": server.model,
        "model_provider": _NAME,
        f"{provider}.name": _COMPACTS,
        f"{provider}.base_url": server.openai,
        f"{provider}.env_key": _KEY,
        f"{provider}.wire_api": "responses",
    }
    if server.context is not None:
        values["model_context_window"] = server.context
    options = [word for key, value in values.items() for word in ("-c", f"{key}={_json(value)}")]
    return Invocation(options=tuple(options), environment={_KEY: server.key})


def _claude(server: AskedServer, folder: Path) -> Invocation:
    """The `env` of a user's settings.json overrules the environment, and that of `--settings` overrules both."""
    values = {
        "ANTHROPIC_BASE_URL": server.address,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        **dict.fromkeys(_CLAUDE_MODELS, server.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    defaults: dict[str, str] = {}
    if server.context is not None:
        values["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(server.context)
        # It summarizes a conversation that fills the context less the output; it would take 32,000 tokens as output.
        defaults["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(min(_CLAUDE_OUTPUT, server.context // 4))
    name = "claude.json"
    return Invocation(
        options=("--settings", str(folder / name)),
        environment={**values, "ANTHROPIC_API_KEY": None, **dict.fromkeys(_CLAUDE_CLOUDS)},
        defaults=defaults,
        files={name: _json({"env": values})},
    )


def _opencode(server: AskedServer, _: Path) -> Invocation:
    """OPENCODE_CONFIG_CONTENT is merged over the user's and the project's configuration."""
    model: dict[str, object] = {"name": server.model}
    if server.context is not None:
        # It summarizes a conversation that fills the context less the output.
        model["limit"] = {"context": server.context, "output": server.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _NAME,
        "options": {"baseURL": server.openai, "apiKey": f"{{env:{_KEY}}}"},
        "models": {server.model: model},
    }
    chosen = f"{_NAME}/{server.model}"
    content = {"provider": {_NAME: provider}, "model": chosen, "small_model": chosen}
    return Invocation(environment={"OPENCODE_CONFIG_CONTENT": _json(content), _KEY: server.key})


def _qwen(server: AskedServer, folder: Path) -> Invocation:
    """The environment overrules the model of the user's settings. System defaults are below the user's settings."""
    environment = {"OPENAI_BASE_URL": server.openai, "OPENAI_API_KEY": server.key, "OPENAI_MODEL": server.model}
    files: dict[str, str] = {}
    if server.context is not None:
        name = "qwen-defaults.json"
        files[name] = _json({"model": {"generationConfig": {"contextWindowSize": server.context}}})
        environment["QWEN_CODE_SYSTEM_DEFAULTS_PATH"] = str(folder / name)
    return Invocation(options=("--auth-type", "openai"), environment=environment, files=files)


def _aider(server: AskedServer, folder: Path) -> Invocation:
    """A user's .env files overrule the environment; that of `--env-file` is read last."""
    values = {"OPENAI_API_BASE": server.openai, "OPENAI_API_KEY": server.key}
    model = f"openai/{server.model}"
    files = {"aider.env": "".join(f"{name}={_json(value)}\n" for name, value in values.items())}
    options = ("--env-file", str(folder / "aider.env"), "--model", model, "--weak-model", model)
    if server.context is not None:
        limits = dict.fromkeys(("max_tokens", "max_input_tokens", "max_output_tokens"), server.context)
        free = dict.fromkeys(("input_cost_per_token", "output_cost_per_token"), 0)
        facts = {"litellm_provider": "openai", "mode": "chat"}
        files["aider-models.json"] = _json({model: {**limits, **free, **facts}})
        options += ("--model-metadata-file", str(folder / "aider-models.json"))
    return Invocation(options=options, environment=dict(values), files=files)


def _continue(server: AskedServer, folder: Path) -> Invocation:
    """`--config` takes the place of the user's configuration. YAML, which JSON is too."""
    model: dict[str, object] = {
        "name": server.model,
        "provider": "openai",
        "model": server.model,
        "apiBase": server.openai,
        "apiKey": server.key,
        "roles": ["chat", "edit", "apply", "summarize"],
    }
    if server.context is not None:
        model["defaultCompletionOptions"] = {"contextLength": server.context}
    name = "continue.yaml"
    content = {"name": _NAME, "version": "1.0.0", "schema": "v1", "models": [model]}
    return Invocation(options=("--config", str(folder / name)), files={name: _json(content)})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


PROGRAMS = {
    "codex": AgentProgram(command="codex", install="npm install -g @openai/codex", settings=_codex),
    "claude": AgentProgram(command="claude", install="npm install -g @anthropic-ai/claude-code", settings=_claude),
    "opencode": AgentProgram(command="opencode", install="npm install -g opencode-ai", settings=_opencode),
    "qwen": AgentProgram(command="qwen", install="npm install -g @qwen-code/qwen-code", settings=_qwen),
    "aider": AgentProgram(command="aider", install="pipx install aider-chat", settings=_aider),
    "continue": AgentProgram(command="cn", install="npm install -g @continuedev/cli", settings=_continue),
}
NEED_TOOLS = PROGRAMS.keys() - {"aider"}
"""Those that always send tools, so that the model's chat template must know them."""
