// The panel of settings: what a conversation asks of the server. With two answers side by side there
// are two of them, A and B.

import { h, icon } from "./dom.js";
import { NUMBERS, newSettings } from "./request.js";

const FORMS = [
  ["none", "any text"],
  ["json_schema", "JSON by a schema"],
  ["json_object", "any JSON object"],
  ["regex", "a regular expression"],
  ["choice", "one of some texts"],
  ["grammar", "a grammar (Lark or GBNF)"],
];
const HINTS = {
  json_schema: '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}',
  regex: "[a-z]+@[a-z]+\\.org",
  choice: "one choice a line",
  grammar: 'start: "yes" | "no"',
};
const TOOLS_HINT = '[{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]';
let numbers = 0;

export class SettingsPanel {
  // changed(): the settings of the conversation have changed
  constructor(changed) {
    this.changed = changed;
    this.side = "A";
    this.fields = new Map();
    this.status = null;
    this.models = [];
    this.tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Settings of the two answers", hidden: true }, ["A", "B"].map(side => h("button", { type: "button", role: "tab", id: `side-${side}`, "aria-controls": "settings-fields", "aria-selected": "false", onclick: () => this.turn(side) }, `Answer ${side}`)));
    this.body = h("div", { class: "fields", id: "settings-fields" });
    this.element = h("div", { class: "settings" }, this.tabs, this.body);
    this.#build();
  }

  show(conversation) {
    this.conversation = conversation;
    if (!conversation.other) this.side = "A";
    this.#fill();
  }

  turn(side) {
    this.side = side;
    this.#fill();
  }

  get settings() {
    return this.side === "B" && this.conversation.other ? this.conversation.other : this.conversation.settings;
  }

  // What the server tells: its defaults are shown where nothing is set.
  serve(status, models) {
    Object.assign(this, { status, models });
    if (this.conversation) this.#fill();
  }

  focus(field) {
    const input = this.fields.get(field);
    input?.closest("details")?.setAttribute("open", "");
    input?.focus();
  }

  mark(field, message) {
    for (const [name, input] of this.fields) {
      if (name === field && message) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    }
  }

  #field(name, label, input, { hint, isWide } = {}) {
    const id = `setting-${name}-${numbers++}`;
    input.id = id;
    input.addEventListener("input", () => {
      this.settings[name] = input.value;
      input.removeAttribute("aria-invalid");
      if (name === "form") this.#fillForm();
      this.changed();
    });
    this.fields.set(name, input);
    return h("div", { class: isWide ? "field wide" : "field" }, h("label", { for: id }, label), input, hint ? h("p", { class: "soft hint" }, hint) : "");
  }

  #number(name) {
    const [label, least, most, step] = NUMBERS[name];
    return this.#field(name, label, h("input", { type: "number", min: least, max: most, step: step === 1 ? 1 : "any", inputmode: step === 1 ? "numeric" : "decimal" }));
  }

  #area(name, label, rows, more = {}) {
    return this.#field(name, label, h("textarea", { rows, spellcheck: "false", placeholder: more.placeholder }), { ...more, isWide: true });
  }

  #build() {
    const model = this.#field("model", "Model or adapter", h("select"), { isWide: true });
    this.system = this.#area("system", "System prompt", 3);
    const sampling = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"].map(name => this.#number(name));
    const penalties = ["presence_penalty", "frequency_penalty", "repetition_penalty", "alternatives"].map(name => this.#number(name));
    const stop = this.#area("stop", "Stop strings, one a line", 2);
    const form = this.#field("form", "Answers are", h("select", {}, FORMS.map(([value, label]) => h("option", { value }, label))), { isWide: true });
    this.formText = this.#area("form_text", "Schema", 5);
    this.tools = h("details", {}, h("summary", {}, "Tools"), this.#area("tools", "Functions, as a JSON list", 5, { placeholder: TOOLS_HINT }), this.#field("tool_choice", "The model", h("select", {}, [["auto", "may call them"], ["required", "must call one"], ["none", "must not call them"]].map(([value, label]) => h("option", { value }, label))), { isWide: true }));
    this.chat = h("details", {}, h("summary", {}, "Reasoning and template"), this.#field("effort", "Reasoning effort", h("select", {}, [["", "the model's own"], ["none", "none"], ["minimal", "minimal"], ["low", "low"], ["medium", "medium"], ["high", "high"]].map(([value, label]) => h("option", { value }, label))), { isWide: true }), this.#area("template", "Variables of the chat template, as JSON", 2, { placeholder: '{"enable_thinking": false}' }));
    const reset = h("button", { type: "button", class: "quiet", onclick: () => this.#reset() }, icon("again"), " Back to the server's defaults");
    this.body.append(
      model,
      this.system,
      h("div", { class: "grid" }, sampling),
      h("details", {}, h("summary", {}, "Structured output"), form, this.formText),
      this.tools,
      this.chat,
      h("details", {}, h("summary", {}, "More sampling"), h("div", { class: "grid" }, penalties), stop),
      reset,
    );
  }

  #reset() {
    const { model, system } = this.settings;
    Object.assign(this.settings, newSettings(), { model, system });
    this.#fill();
    this.changed();
  }

  #fill() {
    if (!this.conversation) return;
    const settings = this.settings, isChat = this.conversation.kind === "chat";
    const select = this.fields.get("model");
    const names = this.models.map(model => model.id);
    if (settings.model && !names.includes(settings.model)) names.push(settings.model);
    select.replaceChildren(...names.map((name, i) => h("option", { value: i ? name : "" }, name)));
    for (const [name, input] of this.fields) {
      if (document.activeElement !== input || input.value !== settings[name]) input.value = settings[name];
      input.removeAttribute("aria-invalid");
    }
    const defaults = this.status?.defaults ?? {};
    for (const name of Object.keys(NUMBERS)) {
      const value = name in defaults ? defaults[name] : { max_tokens: isChat ? "to the end" : 128, seed: "drawn", presence_penalty: 0, frequency_penalty: 0, alternatives: "off" }[name];
      this.fields.get(name).placeholder = value ?? "";
    }
    if (this.status) this.fields.get("alternatives").max = this.status.max_logprobs;
    for (const part of [this.system, this.tools, this.chat]) part.hidden = !isChat;
    this.#fillForm();
    const hasTwo = Boolean(this.conversation.other);
    this.tabs.hidden = !hasTwo;
    if (hasTwo) {
      this.body.setAttribute("role", "tabpanel");
      this.body.setAttribute("aria-labelledby", `side-${this.side}`);
    } else {
      this.body.removeAttribute("role");
      this.body.removeAttribute("aria-labelledby");
    }
    for (const tab of this.tabs.children) tab.setAttribute("aria-selected", String(tab.id === `side-${this.side}`));
  }

  #fillForm() {
    const { form } = this.settings;
    this.formText.hidden = form === "none" || form === "json_object";
    this.formText.querySelector("label").textContent = { json_schema: "Schema", regex: "Expression", choice: "Choices", grammar: "Grammar" }[form] ?? "";
    this.fields.get("form_text").placeholder = HINTS[form] ?? "";
  }
}

// Say in which settings two differ, for the heads of two answers side by side.
export function difference(one, other) {
  const names = Object.keys(one).filter(name => name !== "seed" && one[name] !== other[name]);
  const told = name => {
    const value = one[name] === "" ? "default" : one[name];
    return `${name.replaceAll("_", " ")} ${value.length > 24 ? `${value.slice(0, 21)}...` : value}`;
  };
  return names.length ? names.map(told).join(", ") : "the same settings";
}
