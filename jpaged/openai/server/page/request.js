// Settings of a conversation, and the bodies of requests that follow from them. No document, no server.

// What a person may set. An empty value leaves the choice to the server.
export function newSettings() {
  return {
    model: "",
    system: "",
    temperature: "",
    top_p: "",
    top_k: "",
    min_p: "",
    max_tokens: "",
    seed: "",
    presence_penalty: "",
    frequency_penalty: "",
    repetition_penalty: "",
    stop: "",
    alternatives: "5",
    form: "none",
    form_text: "",
    tools: "",
    tool_choice: "auto",
    effort: "",
    template: "",
  };
}

// { name: [label, least, most, step, whether it is whole] }
export const NUMBERS = {
  temperature: ["Temperature", 0, null, 0.1, false],
  top_p: ["Top p", 0, 1, 0.05, false],
  top_k: ["Top k", 0, null, 1, true],
  min_p: ["Min p", 0, 1, 0.01, false],
  max_tokens: ["Most tokens", 1, null, 1, true],
  seed: ["Seed", 0, null, 1, true],
  presence_penalty: ["Presence penalty", -2, 2, 0.1, false],
  frequency_penalty: ["Frequency penalty", -2, 2, 0.1, false],
  repetition_penalty: ["Repetition penalty", 0, null, 0.05, false],
  alternatives: ["Alternatives of a token", 0, 20, 1, true],
};

// A setting that cannot be sent. field: its name.
export class SettingError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

function number(settings, name) {
  const text = String(settings[name] ?? "").trim();
  if (!text) return undefined;
  const [label, least, most, , isWhole] = NUMBERS[name], value = Number(text);
  if (!Number.isFinite(value) || (isWhole && !Number.isSafeInteger(value))) throw new SettingError(name, `${label}: ${text} is not a ${isWhole ? "whole " : ""}number`);
  if (value < least || (most !== null && value > most)) throw new SettingError(name, `${label}: ${text} is not ${most === null ? `at least ${least}` : `from ${least} to ${most}`}`);
  return value;
}

function object(settings, name, label, isList) {
  const text = settings[name].trim();
  if (!text) return undefined;
  let value;
  try {
    value = JSON.parse(text);
  } catch (e) {
    throw new SettingError(name, `${label}: this is not JSON: ${e.message}`);
  }
  if (isList ? !Array.isArray(value) : typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new SettingError(name, `${label}: must be a JSON ${isList ? "list" : "object"}`);
  }
  return value;
}

// Return the fields that the form of an answer is asked for with.
function form(settings) {
  const text = settings.form_text;
  switch (settings.form) {
    case "none":
      return {};
    case "json_object":
      return { response_format: { type: "json_object" } };
    case "json_schema": {
      const schema = object(settings, "form_text", "Schema", false);
      if (!schema) throw new SettingError("form_text", "Schema: paste a JSON schema");
      // A whole response_format, or the part of it that names the schema, may be pasted too.
      const named = schema.json_schema ?? schema;
      return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: named.schema ?? named } } };
    }
    case "choice": {
      const choices = text.split("\n").map(line => line.trim()).filter(Boolean);
      if (!choices.length) throw new SettingError("form_text", "Choices: write one a line");
      return { structured_outputs: { choice: choices } };
    }
    default:
      if (!text.trim()) throw new SettingError("form_text", `Structured output: the ${settings.form} is empty`);
      return { structured_outputs: { [settings.form]: text.trim() } };
  }
}

// Return the fields of a body that chats and texts share. seed: what draws, if the settings have none.
export function sampling(settings, seed) {
  const body = { stream: true, stream_options: { include_usage: true }, return_token_ids: true, return_tokens_as_token_ids: true };
  if (settings.model) body.model = settings.model;
  for (const name of Object.keys(NUMBERS)) {
    const value = number(settings, name);
    if (value !== undefined && name !== "alternatives") body[name] = value;
  }
  body.seed ??= seed;
  const stops = settings.stop.split("\n").filter(Boolean).map(unescaped);
  if (stops.length) body.stop = stops;
  return { ...body, ...form(settings) };
}

// Stop strings are written one a line, with \n for a line break.
function unescaped(text) {
  return text.replace(/\\([nt\\])/g, (_, c) => ({ n: "\n", t: "\t", "\\": "\\" })[c]);
}

// Return the body of a chat. begins: token ids that the answer begins with; goesOn: whether the last
// message is the beginning of the answer.
export function chatBody(settings, messages, { seed, begins = [], goesOn = false, most = 20 } = {}) {
  const body = { ...sampling(settings, seed), messages };
  const alternatives = number(settings, "alternatives");
  if (alternatives !== undefined) Object.assign(body, { logprobs: true, top_logprobs: Math.min(alternatives, most) });
  const tools = object(settings, "tools", "Tools", true);
  if (tools?.length) Object.assign(body, { tools: tools.map(asTool), tool_choice: settings.tool_choice });
  if (settings.effort) body.reasoning_effort = settings.effort;
  const variables = object(settings, "template", "Template variables", false);
  if (variables) body.chat_template_kwargs = variables;
  if (begins.length) body.answer_token_ids = begins;
  if (goesOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

// A function may be pasted without the object around it.
function asTool(tool) {
  return tool?.function ? tool : { type: "function", function: tool };
}

// Return the body of a completion of a text. prompt: text or token ids.
export function textBody(settings, prompt, { seed, most = 20 } = {}) {
  const body = { ...sampling(settings, seed), prompt };
  const alternatives = number(settings, "alternatives");
  if (alternatives !== undefined) body.logprobs = Math.min(alternatives, most);
  body.max_tokens ??= 128;
  return body;
}

// Add an event of a stream to what there is of an answer. Return whether it changed.
//
// answer: { content, reasoning, calls, tokens, finish, usage }
export function addEvent(answer, event, isChat, texts) {
  if (event.usage) answer.usage = event.usage;
  const [choice] = event.choices ?? [];
  if (!choice) return false;
  const delta = isChat ? choice.delta ?? {} : { content: choice.text };
  if (delta.content) answer.content += delta.content;
  if (delta.reasoning_content) answer.reasoning += delta.reasoning_content;
  for (const call of delta.tool_calls ?? []) {
    const known = (answer.calls[call.index] ??= { id: "", name: "", arguments: "" });
    if (call.id) known.id = call.id;
    if (call.function?.name) known.name = call.function.name;
    known.arguments += call.function?.arguments ?? "";
  }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  addTokens(answer, choice, isChat, texts);
  return true;
}

function addTokens(answer, choice, isChat, texts) {
  if (isChat && choice.logprobs?.content) {
    for (const entry of choice.logprobs.content) {
      answer.tokens.push({ ...token(entry, texts), tops: entry.top_logprobs.map(top => token(top, texts)) });
    }
  } else if (!isChat && choice.logprobs) {
    const { tokens, token_logprobs, top_logprobs } = choice.logprobs;
    const named = (name, logprob) => ({ id: idOf(name), text: texts.get(idOf(name)), logprob });
    tokens.forEach((name, i) => {
      const tops = Object.entries(top_logprobs?.[i] ?? {}).map(([other, logprob]) => named(other, logprob));
      tops.sort((a, b) => b.logprob - a.logprob);
      answer.tokens.push({ ...named(name, token_logprobs[i]), tops });
    });
  } else {
    for (const id of choice.token_ids ?? []) answer.tokens.push({ id, text: texts.get(id), logprob: null, tops: [] });
  }
}

function idOf(name) {
  return Number(name.slice("token_id:".length));
}

function token(entry, texts) {
  const id = idOf(entry.token);
  if (entry.bytes) texts.set(id, new TextDecoder().decode(Uint8Array.from(entry.bytes)));
  return { id, text: texts.get(id), logprob: entry.logprob };
}

// Return the ids of tokens whose text is not known yet, in these tokens and their alternatives.
export function unknown(tokens) {
  return tokens.flatMap(one => [one, ...one.tops]).filter(one => one.text === undefined).map(one => one.id);
}

export function fill(tokens, texts) {
  for (const one of tokens.flatMap(token => [token, ...token.tops])) one.text ??= texts.get(one.id);
}
