// The token view: an answer as its tokens, shaded by how improbable each was; what else could have come
// there, and a click that goes on from that instead.

import { h } from "./dom.js";

const LINE = "\n";

export const percent = logprob => {
  const p = 100 * Math.exp(logprob);
  return p >= 99.95 ? "100 %" : p >= 10 ? `${p.toFixed(1)} %` : p >= 0.005 ? `${p.toFixed(2)} %` : "< 0.01 %";
};

// Return a token's text so that spaces and line breaks can be seen.
export function visible(token) {
  if (token.text === undefined) return `#${token.id}`;
  if (token.text === "") return "∅";
  return token.text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\ufffd", "▯");
}

// The same where tokens stand one after the other: a space is as wide as a space.
const inline = token => visible(token).replaceAll("·", " ");

// How improbable a token was, from 0 to 1: what its shade says.
export const surprise = logprob => (logprob === null || logprob === undefined ? 0 : Math.min(Math.max(1 - Math.exp(logprob), 0), 1));

let numbers = 0;

export class TokenView {
  // branch(index, token): go on from another token at this place; null where that cannot be
  constructor(branch) {
    this.branch = branch;
    this.number = numbers++;
    this.at = -1;
    this.isPinned = false;
    this.list = h("div", {
      class: "token-list",
      role: "listbox",
      tabindex: "0",
      "aria-label": "Tokens of the answer. Arrow keys move, Enter shows what else could have come.",
      onkeydown: event => this.#key(event),
      onpointerover: event => this.#point(event),
      onpointerleave: event => this.#leave(event),
      onclick: event => this.#click(event),
      onfocusout: event => this.#blur(event),
    });
    this.popup = h("div", { class: "popup", hidden: true, role: "group", "aria-label": "What else could have come", onpointerleave: event => this.#leave(event), onkeydown: event => this.#popupKey(event) });
    this.summary = h("p", { class: "soft token-summary" });
    this.element = h("div", { class: "token-view" }, this.list, this.popup, this.summary);
    this.tokens = [];
  }

  // Show these tokens. Those that were shown before keep their nodes.
  show(tokens) {
    const old = this.list.children.length;
    const isSame = old <= tokens.length && this.tokens.slice(0, old).every((token, i) => token === tokens[i] && token.shown === undefined);
    const start = isSame && old === this.tokens.length ? old : 0;
    if (!start) this.list.replaceChildren();
    this.tokens = [...tokens];
    this.list.append(...tokens.slice(start).map((token, i) => this.#node(token, start + i)));
    const scored = tokens.filter(token => token.logprob !== null && token.logprob !== undefined);
    const sum = scored.reduce((total, token) => total + token.logprob, 0);
    this.summary.textContent = scored.length
      ? `${tokens.length} tokens, log-probability ${sum.toFixed(2)}, perplexity ${Math.exp(-sum / scored.length).toFixed(2)}. A darker shade is a less probable token.`
      : `${tokens.length} tokens. Their probabilities are not known: set how many alternatives to ask for.`;
  }

  // Make the nodes again, since texts of tokens are known now.
  refresh() {
    const tokens = this.tokens;
    this.tokens = [];
    this.list.replaceChildren();
    this.show(tokens);
  }

  #node(token, index) {
    const text = token.text ?? `#${token.id}`;
    const node = h("span", { class: "token", role: "option", id: `token-${this.number}-${index}`, "data-index": index, "aria-selected": "false" }, inline(token));
    if (/^\s+$/.test(text)) node.setAttribute("aria-label", visible(token));
    node.style.setProperty("--surprise", surprise(token.logprob).toFixed(3));
    if (token.branched) node.classList.add("branched");
    if (text.includes(LINE)) node.classList.add("ends-line");
    return node;
  }

  #mark(index) {
    this.list.children[this.at]?.setAttribute("aria-selected", "false");
    this.at = index;
    const node = this.list.children[index];
    if (!node) {
      this.list.removeAttribute("aria-activedescendant");
      this.popup.hidden = true;
      return;
    }
    node.setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", node.id);
    this.#explain(index, node);
  }

  #explain(index, node) {
    const token = this.tokens[index], tops = token.tops ?? [];
    const all = tops.some(top => top.id === token.id) || token.logprob === null || token.logprob === undefined ? tops : [...tops, token];
    const head = h("div", { class: "popup-head" }, h("b", {}, visible(token)), h("span", { class: "soft" }, ` token ${index + 1}, id ${token.id}${token.logprob === null || token.logprob === undefined ? "" : `, ${percent(token.logprob)}, log ${token.logprob.toFixed(3)}`}`));
    const rows = all.map(top => {
      const isChosen = top.id === token.id;
      const bar = h("span", { class: "bar", "aria-hidden": "true" });
      bar.style.setProperty("--part", Math.exp(top.logprob).toFixed(4));
      const row = h("button", { type: "button", class: isChosen ? "alternative chosen" : "alternative", disabled: !this.branch, title: isChosen ? "Draw again from here on" : "Go on from this token instead" }, h("span", { class: "what" }, visible(top)), bar, h("span", { class: "much" }, percent(top.logprob)));
      row.addEventListener("click", () => this.branch?.(index, top));
      return row;
    });
    const note = h("div", { class: "soft note" }, this.branch ? "Click one to go on from it, in a branch." : "");
    this.popup.replaceChildren(head, ...rows, note);
    this.popup.hidden = false;
    const box = this.element.getBoundingClientRect(), at = node.getClientRects()[0] ?? node.getBoundingClientRect();
    const width = Math.min(this.popup.offsetWidth, box.width);
    this.popup.style.left = `${Math.max(0, Math.min(at.left - box.left, box.width - width))}px`;
    const below = at.bottom - box.top + 2, room = innerHeight - at.bottom;
    const isAbove = room < this.popup.offsetHeight + 8 && at.top > this.popup.offsetHeight + 60;
    this.popup.style.top = `${isAbove ? at.top - box.top - this.popup.offsetHeight - 2 : below}px`;
  }

  #index(event) {
    const node = event.target.closest?.("[data-index]");
    return node ? Number(node.dataset.index) : -1;
  }

  #point(event) {
    const index = this.#index(event);
    if (index >= 0 && !this.isPinned && event.pointerType !== "touch") this.#mark(index);
  }

  #leave(event) {
    if (!this.isPinned && !this.element.contains(event.relatedTarget)) this.#mark(-1);
  }

  #blur(event) {
    if (!this.element.contains(event.relatedTarget)) this.unpin();
  }

  #click(event) {
    const index = this.#index(event);
    if (index < 0) return this.unpin();
    this.isPinned = !(this.isPinned && index === this.at);
    this.#mark(index);
  }

  unpin() {
    this.isPinned = false;
    this.#mark(-1);
  }

  #key(event) {
    const last = this.tokens.length - 1, at = this.at;
    const to = { ArrowRight: Math.min(at + 1, last), ArrowLeft: Math.max(at - 1, 0), Home: 0, End: last }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      this.isPinned = true;
      this.#mark(to);
      this.list.children[to]?.scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter" && at >= 0) {
      event.preventDefault();
      event.stopPropagation();
      this.isPinned = true;
      this.popup.querySelector("button")?.focus();
    } else if (event.key === "Escape" && at >= 0) {
      event.stopPropagation();
      this.unpin();
    }
  }

  #popupKey(event) {
    const rows = [...this.popup.querySelectorAll("button")], at = rows.indexOf(document.activeElement);
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      rows[(at + (event.key === "ArrowDown" ? 1 : rows.length - 1)) % rows.length]?.focus();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      this.list.focus();
    }
  }
}
