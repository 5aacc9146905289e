// Runs answers: sends a request for a message of a conversation, and fills the message as events come.

import * as api from "./api.js";
import { add, messagesTo, textTo } from "./conversation.js";
import { addEvent, chatBody, fill, newSettings, textBody, unknown } from "./request.js";

const SHOW_MS = 40; // between two renderings of an answer that grows

export class Answers extends EventTarget {
  #running = new Map(); // by the message's id: what stops it
  #texts = new Map(); // by model: the texts of tokens

  // most: how many alternatives of a token the server gives at most. pictures: those of conversations
  constructor(pictures) {
    super();
    this.pictures = pictures;
    this.most = 20;
  }

  isRunning(id) {
    return this.#running.has(id);
  }

  get count() {
    return this.#running.size;
  }

  stop(id) {
    this.#running.get(id)?.abort();
  }

  stopAll() {
    for (const one of this.#running.values()) one.abort();
  }

  // Answer the message `parent` (null: a text that begins with nothing). Return the new message; its
  // answer comes later. Throws SettingError before anything is sent.
  //
  // begins: tokens, with what is known of them, that the answer begins with; from: an answer whose text
  // it begins with, where no tokens are known
  async answer(conversation, parent, settings, { begins = null, from = null } = {}) {
    const drawn = Math.floor(Math.random() * 2 ** 31);
    const seed = settings.seed === "" ? drawn : Number(settings.seed);
    const options = { seed, most: this.most, begins: (begins ?? []).map(token => token.id), goesOn: from !== null };
    const isChat = conversation.kind === "chat", last = from?.id ?? parent;
    if (!this.pictures.has(conversation)) await this.pictures.load(conversation);
    const urlOf = id => this.pictures.get(id);
    // A body is made at once, so that a wrong setting is found before there is a message.
    const body = isChat ? chatBody(settings, messagesTo(conversation, last, settings.system, urlOf), options) : textBody(settings, textTo(conversation, last), options);
    const node = add(conversation, parent, {
      role: "assistant",
      content: from?.content ?? "",
      reasoning: from?.reasoning ?? "",
      calls: [],
      tokens: begins ? [...begins] : [],
      settings: { ...settings, seed: String(seed) },
      info: null,
    });
    this.#run(conversation, node, isChat ? "v1/chat/completions" : "v1/completions", body, isChat);
    return node;
  }

  // Go on with an answer: where its tokens are known as it would have gone on by itself, else from its
  // text.
  goOn(conversation, node, settings) {
    if (!node.tokens?.length) return this.answer(conversation, node.parent, settings, { from: node });
    const next = { ...settings, seed: node.settings?.seed ?? settings.seed };
    // max_tokens counts the tokens that the answer begins with.
    if (next.max_tokens !== "" && conversation.kind === "chat") next.max_tokens = String(Number(next.max_tokens) + node.tokens.length);
    return this.answer(conversation, node.parent, next, { begins: node.tokens });
  }

  async #run(conversation, node, url, body, isChat) {
    const stop = new AbortController(), began = performance.now(), texts = this.#textsOf(body.model);
    this.#running.set(node.id, stop);
    const { content, reasoning } = node;
    const answer = { content, reasoning, calls: [], tokens: [...node.tokens], finish: null, usage: null };
    const first = node.tokens.length;
    let firstAt = null, lastAt = null, shownAt = 0, error = null;
    const take = () => {
      Object.assign(node, { content: answer.content, reasoning: answer.reasoning, calls: answer.calls.filter(Boolean), tokens: answer.tokens });
      node.info = infoOf(answer, first, began, firstAt, lastAt);
      this.dispatchEvent(new CustomEvent("change", { detail: { conversation, node } }));
    };
    take();
    try {
      if (!isChat && first) {
        const begin = await api.json("detokenize", { tokens: node.tokens.map(token => token.id) }, stop.signal);
        const prompt = await api.json("tokenize", { prompt: body.prompt }, stop.signal);
        answer.content = begin.prompt;
        body.prompt = [...prompt.tokens, ...node.tokens.map(token => token.id)];
      }
      for await (const event of api.stream(url, body, stop.signal)) {
        if (!addEvent(answer, event, isChat, texts)) continue;
        lastAt = performance.now();
        firstAt ??= lastAt;
        if (lastAt - shownAt < SHOW_MS) continue;
        shownAt = lastAt;
        take();
      }
    } catch (e) {
      if (e.name !== "AbortError") error = e.message;
      answer.finish ??= e.name === "AbortError" ? "stopped" : "error";
    }
    this.#running.delete(node.id);
    node.error = error;
    take();
    try {
      await texts.load(unknown(answer.tokens));
      fill(answer.tokens, texts);
    } catch {
      // The tokens are shown by their ids.
    }
    this.dispatchEvent(new CustomEvent("end", { detail: { conversation, node } }));
  }

  #textsOf(model) {
    const name = model ?? "";
    if (!this.#texts.has(name)) this.#texts.set(name, new api.TokenTexts());
    return this.#texts.get(name);
  }
}

function infoOf(answer, first, began, firstAt, lastAt) {
  const tokens = answer.tokens.length - first, seconds = lastAt === null ? 0 : (lastAt - began) / 1000;
  const decoding = firstAt === null ? 0 : (lastAt - firstAt) / 1000;
  return {
    tokens,
    seconds,
    first: firstAt === null ? null : (firstAt - began) / 1000,
    speed: decoding > 0 && tokens > 1 ? (tokens - 1) / decoding : null,
    finish: answer.finish,
    prompt: answer.usage?.prompt_tokens ?? null,
    cached: answer.usage?.prompt_tokens_details?.cached_tokens ?? null,
  };
}

// Settings of an older version of this page, or of a file, with all that this one knows.
export function wholeSettings(settings) {
  const whole = newSettings();
  for (const name of Object.keys(whole)) {
    if (typeof settings?.[name] === "string") whole[name] = settings[name];
  }
  return whole;
}

