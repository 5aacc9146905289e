// Asks the server: JSON, streams of events, and the texts of tokens.

// An answer that is an error. status: of HTTP, 0 if there was no answer.
export class ApiFailure extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// The key lives as long as the tab.
let key = "";
try {
  key = sessionStorage.getItem("jpaged.key") ?? "";
} catch {
  // Without storage the key lasts as long as the page.
}

export function currentKey() {
  return key;
}

export function setKey(value) {
  key = value.trim();
  try {
    sessionStorage.setItem("jpaged.key", key);
  } catch {
    // As above.
  }
}

async function ask(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (e) {
    if (e.name === "AbortError") throw e;
    throw new ApiFailure("the server does not answer", 0);
  }
  if (!response.ok) throw new ApiFailure(await reason(response), response.status);
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answers ${response.status}`;
  }
}

export async function json(path, body, signal) {
  return (await ask(path, body, signal)).json();
}

export async function text(path, signal) {
  return (await ask(path, undefined, signal)).text();
}

// Yield the events of a stream. Throws ApiFailure for an event that is an error.
export async function* stream(path, body, signal) {
  const response = await ask(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (e) {
      if (e.name === "AbortError") throw e;
      throw new ApiFailure("the connection broke", 0);
    }
    if (piece.done) return;
    const { events, left } = split(rest + piece.value);
    rest = left;
    for (const event of events) {
      if (event.error) throw new ApiFailure(event.error.message, response.status);
      yield event;
    }
  }
}

// Return the whole events of a text, and what is left of it.
export function split(text) {
  const parts = text.split("\n\n"), left = parts.pop(), events = [];
  for (const part of parts) {
    for (const line of part.split("\n")) {
      if (line.startsWith("data: {")) events.push(JSON.parse(line.slice(6)));
    }
  }
  return { events, left };
}

// The texts of single tokens by id, which the server is asked for once each.
export class TokenTexts {
  #texts = new Map();

  get(id) {
    return this.#texts.get(id);
  }

  set(id, text) {
    this.#texts.set(id, text);
  }

  async load(ids) {
    const missing = [...new Set(ids)].filter(id => !this.#texts.has(id));
    if (!missing.length) return;
    const { token_strs } = await json("detokenize", { tokens: missing, return_token_strs: true });
    missing.forEach((id, i) => this.#texts.set(id, token_strs[i]));
  }
}
