// Asks the server at LAUNCH_PIPELINE_URL through each of npm's providers, whole and streamed, and prints what came as
// one JSON object: {provider: {whole, streamed, usage, finish, refused}}.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const baseURL = `${process.env.LAUNCH_PIPELINE_URL}/v1`;
const apiKey = process.env.LAUNCH_PIPELINE_API_KEY;
const compatible = createOpenAICompatible({ name: "launch-pipeline", baseURL, apiKey, includeUsage: true });
const openai = createOpenAI({ baseURL, apiKey });
const anthropic = createAnthropic({ baseURL, apiKey });
const providers = {
  "openai-compatible": (name) => compatible(name),
  "openai-responses": (name) => openai.responses(name),
  anthropic: (name) => anthropic(name),
};
globalThis.AI_SDK_LOG_WARNINGS = false;

const said = {};
for (const [provider, model] of Object.entries(providers)) {
  const asked = { prompt: "import", temperature: 0, maxOutputTokens: 16, maxRetries: 0 };
  const whole = await generateText({ ...asked, model: model("demo") });
  const stream = streamText({ ...asked, model: model("demo") });
  let streamed = "";
  for await (const text of stream.textStream) streamed += text;
  const refused = await generateText({ ...asked, model: model("other") }).then(
    () => "nothing was refused",
    (error) => `${error.statusCode} ${error.message}`,
  );
  const counted = (usage) => [usage.inputTokens, usage.outputTokens];
  said[provider] = {
    whole: whole.text,
    streamed,
    finish: [whole.finishReason, await stream.finishReason],
    usage: [counted(whole.usage), counted(await stream.usage)],
    refused,
  };
}
console.log(JSON.stringify(said));
