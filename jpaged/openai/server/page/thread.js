// Shows the path of a conversation: messages with what can be done with each, answers that grow, two
// answers side by side, and the token view.

import { path, siblings } from "./conversation.js";
import { copy, duration, h, iconButton, short } from "./dom.js";
import { render } from "./markdown.js";
import { difference } from "./settings.js";
import { TokenView } from "./tokens.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result" };

export class Thread {
  // actions: { again, goOn, branch, edit, show, remove, result, prefer } of messages, which main.js has
  // pictures: of the conversations
  constructor(actions, answers, pictures) {
    Object.assign(this, { actions, answers, pictures });
    this.views = new Map(); // by the message's id
    this.list = h("div", { class: "messages", role: "log", "aria-label": "Conversation", "aria-live": "off" });
    this.element = h("div", { class: "thread", tabindex: "-1" }, this.list);
    this.sticks = true;
    this.element.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.element;
      this.sticks = scrollHeight - scrollTop - clientHeight < 60;
    });
    this.showsTokens = false;
  }

  show(conversation, showsTokens) {
    if (conversation !== this.conversation || showsTokens !== this.showsTokens) this.views.clear();
    Object.assign(this, { conversation, showsTokens });
    const nodes = path(conversation), used = new Set(), shown = [];
    const viewOf = node => {
      used.add(node.id);
      const view = this.views.get(node.id) ?? new MessageView(this, node);
      this.views.set(node.id, view);
      view.update();
      return view.element;
    };
    nodes.forEach((node, i) => {
      const parent = nodes[i - 1];
      const pair = parent?.pair?.includes(node.id) ? parent.pair.map(id => conversation.nodes[id]) : null;
      shown.push(pair ? h("div", { class: "pair" }, pair.map(viewOf)) : viewOf(node));
    });
    if (!shown.length) shown.push(this.#welcome());
    this.list.className = `messages ${conversation.kind}`;
    this.list.replaceChildren(...shown);
    for (const id of this.views.keys()) if (!used.has(id)) this.views.delete(id);
    this.follow();
  }

  // Show what is new of a message.
  change(node) {
    this.views.get(node.id)?.update();
    this.follow();
  }

  // A message has ended: its actions are there, and the texts of its tokens.
  end(node) {
    const view = this.views.get(node.id);
    view?.update();
    view?.tokens?.refresh();
    this.follow();
  }

  follow() {
    if (this.sticks) this.element.scrollTop = this.element.scrollHeight;
  }

  #welcome() {
    const isChat = this.conversation.kind === "chat";
    const said = isChat ? "Ask something. The model gets it in the form of its chat template." : "Begin a text. The model goes on with it, token by token, without a template.";
    return h("div", { class: "welcome" }, h("p", {}, said), h("p", { class: "soft" }, "Enter sends, Shift+Enter begins a line, Esc stops. Conversations stay in this browser."));
  }
}

class MessageView {
  constructor(thread, node) {
    Object.assign(this, { thread, node });
    this.isEdited = false;
    this.head = h("div", { class: "message-head" });
    this.reasoning = null;
    this.gallery = h("div", { class: "pictures", hidden: true });
    this.content = h("div", { class: "content" });
    this.calls = h("div", { class: "calls" });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.foot = h("div", { class: "message-foot" });
    this.thought = h("div", { class: "content" });
    this.summary = h("summary", {});
    this.fold = h("details", { class: "reasoning", hidden: true }, this.summary, this.thought);
    this.element = h("article", { class: `message ${node.role}`, "aria-label": NAMES[node.role] }, this.head, this.fold, this.gallery, this.content, this.calls, this.error, this.foot);
    this.tokens = null;
  }

  get isRunning() {
    return this.thread.answers.isRunning(this.node.id);
  }

  update() {
    if (this.isEdited) return;
    const { node, thread } = this, isChat = thread.conversation.kind === "chat", isAnswer = node.role === "assistant";
    this.element.classList.toggle("running", this.isRunning);
    this.element.setAttribute("aria-busy", String(this.isRunning));
    const showsTokens = thread.showsTokens && isAnswer && node.tokens?.length > 0;
    if (showsTokens) this.#showTokens();
    else {
      this.tokens = null;
      this.fold.hidden = !node.reasoning;
      if (node.reasoning) {
        this.summary.textContent = this.isRunning && !node.content ? "Thinking…" : "Reasoning";
        render(this.thought, node.reasoning);
      }
      if (isAnswer && isChat) {
        if (this.content.firstElementChild?.classList.contains("token-view")) this.content.replaceChildren();
        render(this.content, node.content);
      } else this.content.replaceChildren(h("div", { class: "plain" }, node.content));
    }
    this.#showPictures();
    this.#showCalls();
    this.error.hidden = !node.error;
    this.error.textContent = node.error ?? "";
    this.#showHead();
    this.#showFoot();
  }

  #showPictures() {
    const images = this.node.images ?? [], { pictures } = this.thread;
    const key = images.map(image => `${image.id} ${pictures.get(image.id) !== undefined}`).join();
    if (key === this.shownPictures) return;
    this.shownPictures = key;
    this.gallery.hidden = !images.length;
    this.content.hidden = images.length > 0 && !this.node.content;
    this.gallery.replaceChildren(
      ...images.map(({ id, name, width, height }) => {
        const url = pictures.get(id);
        if (url === undefined) return h("p", { class: "soft missing" }, `the picture ${name} is not kept any more`);
        return h("img", { src: url, alt: name, title: `${name}, ${width} × ${height}`, width, height });
      }),
    );
  }

  #showTokens() {
    this.fold.hidden = true;
    if (!this.tokens) {
      const { node, thread } = this;
      this.tokens = new TokenView((index, token) => thread.actions.branch(node, index, token));
      this.content.markdown = undefined;
      this.content.replaceChildren(this.tokens.element);
    }
    this.tokens.show(this.node.tokens);
  }

  #showHead() {
    const { node, thread } = this, parent = thread.conversation.nodes[node.parent];
    const parts = [];
    if (parent?.pair?.includes(node.id)) {
      const at = parent.pair.indexOf(node.id), other = thread.conversation.nodes[parent.pair[1 - at]];
      const isShown = path(thread.conversation).includes(node);
      const button = h("button", { type: "button", class: isShown ? "prefer chosen" : "prefer", "aria-pressed": String(isShown), onclick: () => thread.actions.show(node) }, isShown ? "Goes on from here" : "Go on from this");
      const told = node.settings && other?.settings ? difference(node.settings, other.settings) : "";
      parts.push(h("b", { class: "side" }, "AB"[at]), h("span", { class: "soft told" }, told), button);
    } else if (node.role !== "user" || thread.conversation.kind === "chat") {
      parts.push(h("span", { class: "who" }, node.role === "assistant" ? node.settings?.model || thread.model || NAMES.assistant : NAMES[node.role]));
    }
    this.head.replaceChildren(...parts);
  }

  #showCalls() {
    const { node, thread } = this, calls = node.calls ?? [];
    const answered = new Set(thread.conversation.nodes[node.id]?.children.map(id => thread.conversation.nodes[id].callId));
    const key = JSON.stringify([calls, this.isRunning, [...answered]]);
    if (key === this.shownCalls) return;
    this.shownCalls = key;
    this.calls.replaceChildren(
      ...calls.map(call => {
        const body = h("div", { class: "call" }, h("div", { class: "call-name" }, "calls ", h("code", {}, call.name)), h("pre", { tabindex: "0" }, pretty(call.arguments)));
        if (!this.isRunning && !answered.has(call.id)) {
          const field = h("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "What the function returns", onkeydown: event => event.key === "Enter" && !event.shiftKey && (event.preventDefault(), send()) });
          const send = () => thread.actions.result(node, call, field.value);
          body.append(h("div", { class: "result" }, field, h("button", { type: "button", onclick: send }, "Give the result")));
        }
        return body;
      }),
    );
  }

  #showFoot() {
    const { node, thread } = this, { actions } = thread, beside = siblings(thread.conversation, node.id);
    const key = JSON.stringify([this.isRunning, beside, node.info?.finish, thread.conversation.kind]);
    const info = infoText(node);
    if (key === this.shownFoot) {
      if (this.info) this.info.textContent = info;
      return;
    }
    this.shownFoot = key;
    const parts = [], parent = thread.conversation.nodes[node.parent];
    if (beside.length > 1 && !parent?.pair?.includes(node.id)) {
      const at = beside.indexOf(node.id), to = i => () => actions.show(thread.conversation.nodes[beside[i]]);
      parts.push(h("span", { class: "branches", role: "group", "aria-label": "Branches" }, iconButton("left", "The branch before", to(at - 1), { disabled: at === 0 }), h("span", {}, `${at + 1} / ${beside.length}`), iconButton("right", "The next branch", to(at + 1), { disabled: at === beside.length - 1 })));
    }
    if (this.isRunning) parts.push(h("button", { type: "button", class: "small", onclick: () => thread.answers.stop(node.id) }, "Stop"));
    else {
      const copied = iconButton("copy", "Copy the text", () => copy(node.content, copied));
      parts.push(copied, iconButton("edit", node.role === "user" ? "Edit and send again" : "Edit, as a branch", () => this.#edit()));
      if (node.role === "assistant") {
        parts.push(iconButton("again", "Try again", () => actions.again(node)));
        if (!node.calls?.length) parts.push(iconButton("more", "Go on with this answer", () => actions.goOn(node)));
      }
      parts.push(iconButton("trash", "Delete this and all that follows", () => actions.remove(node)));
    }
    this.info = node.role === "assistant" ? h("span", { class: "soft info" }, info) : null;
    this.foot.replaceChildren(...parts, this.info ?? "");
  }

  #edit() {
    const { node, thread } = this, isUser = node.role === "user";
    const field = h("textarea", { class: "edit", "aria-label": "Edit the message", rows: Math.min(12, node.content.split("\n").length + 1) });
    field.value = node.content;
    const end = () => {
      this.isEdited = false;
      this.content.markdown = undefined;
      this.content.replaceChildren();
      this.shownFoot = this.shownCalls = this.shownPictures = null;
      this.tokens = null;
      this.update();
    };
    const save = () => {
      end();
      thread.actions.edit(node, field.value);
    };
    field.addEventListener("keydown", event => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey || (isUser && !event.shiftKey))) {
        event.preventDefault();
        event.stopPropagation();
        save();
      }
    });
    this.isEdited = true;
    this.fold.hidden = true;
    this.content.hidden = false;
    this.content.markdown = undefined;
    this.content.replaceChildren(field);
    this.foot.replaceChildren(h("button", { type: "button", onclick: save }, isUser ? "Send" : "Keep as a branch"), h("button", { type: "button", class: "quiet", onclick: end }, "Cancel"));
    field.focus();
  }
}

function infoText(node) {
  const info = node.info, parts = [];
  if (!info) return node.settings ? "" : "written by hand";
  if (info.tokens) parts.push(`${info.tokens} tokens`);
  if (info.speed) parts.push(`${short(info.speed)} tokens/s`);
  if (info.first !== null) parts.push(`first after ${duration(info.first)}`);
  if (node.settings?.seed) parts.push(`seed ${node.settings.seed}`);
  const ends = { length: "cut off", stopped: "stopped", error: "failed", tool_calls: "calls" }[info.finish];
  if (ends) parts.push(ends);
  return parts.join(" · ");
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
