// Puts the page together: what is open, what runs, what is kept, and the keys.

import * as api from "./api.js";
import * as tree from "./conversation.js";
import { download, h, icon, iconButton, short } from "./dom.js";
import { Answers, wholeSettings } from "./generate.js";
import { Load } from "./load.js";
import { parse } from "./metrics.js";
import { Pictures, idsOf, pictureFiles, pictureOf, toldOf } from "./pictures.js";
import { SettingError, newSettings } from "./request.js";
import { SettingsPanel } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store, keep, kept } from "./store.js";
import { Thread } from "./thread.js";

const LOAD_MS = 1000, QUIET_MS = 5000; // between two looks at the server, with its load shown and without
const SAVE_MS = 1000;
const THEMES = ["auto", "light", "dark"];

class Page {
  constructor() {
    this.store = new Store();
    this.conversations = [];
    this.conversation = null;
    this.view = "chat";
    this.showsTokens = kept("tokens", false);
    this.saving = new Map();
    this.pictures = new Pictures(this.store);
    this.attached = []; // pictures of the message that is written
    this.noPictures = "the server has not said yet whether its model sees pictures";
    this.answers = new Answers(this.pictures);
    this.answers.addEventListener("change", event => this.#changed(event.detail));
    this.answers.addEventListener("end", event => this.#ended(event.detail));
    this.load = new Load();
    this.thread = new Thread(
      {
        show: node => this.#show(node),
        again: node => this.#again(node),
        goOn: node => this.#attempt(() => this.answers.goOn(this.conversation, node, this.conversation.settings)),
        branch: (node, index, token) => this.#branch(node, index, token),
        edit: (node, text) => this.#edit(node, text),
        remove: node => this.#remove(node),
        result: (node, call, text) => this.#result(node, call, text),
      },
      this.answers,
      this.pictures,
    );
    this.panel = new SettingsPanel(() => this.#settingsChanged());
    this.sidebar = new Sidebar({
      begin: kind => this.begin(kind),
      open: id => this.open(id),
      rename: (conversation, title) => {
        conversation.title = title;
        this.#touch(conversation);
        this.#showList();
      },
      remove: conversation => this.#forget(conversation),
      exportAll: () => this.#export(),
      importFile: file => this.#import(file),
    });
    this.#build();
  }

  #build() {
    this.state = h("span", { class: "state", role: "status" }, "connecting");
    this.keyField = h("input", { type: "password", autocomplete: "off", placeholder: "API key", "aria-label": "API key" });
    this.keyField.value = api.currentKey();
    this.keyField.addEventListener("change", () => {
      api.setKey(this.keyField.value);
      this.look();
    });
    this.keyForm = h("form", { class: "key", hidden: !api.currentKey(), onsubmit: event => event.preventDefault() }, this.keyField);
    this.title = h("h1", {}, "jpaged");
    this.views = ["chat", "load"].map(name => h("button", { type: "button", class: "tab", "aria-pressed": "false", onclick: () => this.turn(name) }, name === "chat" ? "Chat" : "Load"));
    this.tokenButton = iconButton("tokens", "Tokens and their probabilities", () => this.#toggleTokens());
    this.pairButton = iconButton("columns", "Two answers side by side", () => this.#togglePair());
    this.settingsButton = iconButton("sliders", "Settings", () => this.#toggle("settings"), { "aria-controls": "settings", "aria-expanded": "false" });
    this.menuButton = iconButton("menu", "Conversations", () => this.#toggle("sidebar"), { "aria-controls": "sidebar", "aria-expanded": "false" });
    this.themeButton = iconButton("theme", "Light or dark", () => this.#nextTheme());
    const header = h("header", {}, this.menuButton, this.title, h("div", { class: "tabs-of-page", role: "group", "aria-label": "View" }, this.views), this.state, this.keyForm, h("div", { class: "tools" }, this.tokenButton, this.pairButton, this.settingsButton, this.themeButton));
    this.input = h("textarea", { rows: 1, "aria-label": "Message", placeholder: "Message" });
    this.input.addEventListener("input", () => this.#grow());
    this.sendButton = h("button", { class: "primary send", "aria-label": "Send" }, icon("send"));
    this.problem = h("p", { class: "error problem", role: "alert", hidden: true });
    this.thumbnails = h("div", { class: "thumbnails", role: "list", "aria-label": "Pictures of the message", hidden: true });
    this.fileField = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true, "aria-label": "Pictures" });
    this.fileField.addEventListener("change", () => {
      this.#attach([...this.fileField.files]);
      this.fileField.value = "";
    });
    this.pictureButton = iconButton("picture", "Add pictures", () => this.fileField.click());
    this.composer = h("form", { class: "composer", onsubmit: event => { event.preventDefault(); this.#sendOrStop(); } }, this.problem, h("div", { class: "composer-box" }, this.thumbnails, this.pictureButton, this.fileField, this.input, this.sendButton));
    this.chatView = h("div", { class: "chat-view" }, this.thread.element, this.composer);
    this.#takeDrops();
    this.loadView = h("div", { class: "load-view", hidden: true }, this.load.element);
    this.aside = h("aside", { class: "settings-pane", id: "settings", "aria-label": "Settings" }, h("div", { class: "pane-head" }, h("h2", {}, "Settings"), iconButton("close", "Close the settings", () => this.#toggle("settings", false))), this.panel.element);
    this.main = h("main", {}, this.chatView, this.loadView);
    const veil = h("div", { class: "veil", onclick: () => { this.#toggle("sidebar", false); this.#toggle("settings", false); } });
    document.body.replaceChildren(h("div", { class: "page" }, this.sidebar.element, h("div", { class: "middle" }, header, this.main), this.aside, veil));
    const isWide = matchMedia("(min-width: 900px)").matches;
    this.#toggle("sidebar", isWide && kept("sidebar", true));
    this.#toggle("settings", matchMedia("(min-width: 1200px)").matches && kept("settings", false));
    this.#setTheme(kept("theme", "auto"));
    this.#markTokens();
    document.addEventListener("keydown", event => this.#key(event));
    document.addEventListener("paste", event => {
      const files = pictureFiles(event.clipboardData);
      if (!files.length || this.view !== "chat") return;
      event.preventDefault();
      this.#attach(files);
    });
    addEventListener("resize", () => this.view === "load" && this.load.draw());
    addEventListener("pagehide", () => this.#saveAll());
  }

  async start() {
    await this.store.open();
    this.conversations = (await this.store.all()).map(sound).filter(Boolean);
    const last = kept("open", null);
    const found = this.conversations.find(one => one.id === last);
    if (found) this.open(found.id);
    else this.begin("chat");
    if (location.hash === "#load") this.turn("load");
    this.look();
  }

  // Conversations

  begin(kind) {
    const settings = this.conversation ? { ...this.conversation.settings, seed: "" } : wholeSettings(kept("last-settings", {}));
    // One that nothing was said in is used again.
    const empty = this.conversations.find(one => !one.roots.length && one.kind === kind);
    const conversation = empty ?? tree.newConversation(kind, settings);
    if (!empty) this.conversations.unshift(conversation);
    this.open(conversation.id);
    this.input.focus();
  }

  open(id) {
    this.conversation = this.conversations.find(one => one.id === id);
    keep("open", id);
    this.turn("chat");
    if (!matchMedia("(min-width: 900px)").matches) this.#toggle("sidebar", false);
    this.thread.sticks = true;
    this.#refresh();
    this.panel.show(this.conversation);
    this.#showProblem(null);
    this.#loadPictures(this.conversation);
  }

  // Show the pictures of a conversation once they are there.
  async #loadPictures(conversation) {
    await this.pictures.load(conversation);
    if (conversation === this.conversation && idsOf(conversation).length) this.thread.show(conversation, this.showsTokens);
  }

  #forget(conversation) {
    for (const id of Object.keys(conversation.nodes)) this.answers.stop(id);
    this.conversations = this.conversations.filter(one => one !== conversation);
    clearTimeout(this.saving.get(conversation));
    this.saving.delete(conversation);
    this.store.delete(conversation.id);
    this.pictures.drop(conversation, this.conversations);
    if (conversation !== this.conversation) this.#showList();
    else if (this.conversations.length) this.open(this.conversations[0].id);
    else {
      this.conversation = null;
      this.begin("chat");
    }
  }

  async #export() {
    for (const conversation of this.conversations) await this.pictures.load(conversation);
    const ids = this.conversations.flatMap(idsOf).filter(id => this.pictures.get(id) !== undefined);
    download("conversations.json", tree.exported(this.conversations, ids.map(id => [id, this.pictures.get(id)])));
  }

  async #import(file) {
    try {
      const text = await file.text(), found = tree.imported(text).map(sound).filter(Boolean);
      for (const [id, url] of tree.importedPictures(text)) await this.pictures.put({ id, url });
      this.conversations.unshift(...found);
      found.forEach(one => this.#touch(one));
      if (found.length) this.open(found[0].id);
    } catch (e) {
      this.#showProblem(e);
    }
  }

  #refresh() {
    const { conversation } = this;
    this.thread.show(conversation, this.showsTokens);
    this.pairButton.setAttribute("aria-pressed", String(Boolean(conversation.other)));
    this.input.placeholder = conversation.kind === "chat" ? "Message" : conversation.roots.length ? "More text, or nothing: the model goes on" : "Begin a text";
    this.input.setAttribute("aria-label", conversation.kind === "chat" ? "Message" : "Text");
    this.#markSend();
    this.#markPictures();
    this.#showList();
  }

  #showList() {
    this.sidebar.show(this.conversations.filter(one => one.roots.length || one === this.conversation), this.conversation?.id);
  }

  // Note that a conversation has changed: it is saved soon, and comes first.
  #touch(conversation) {
    conversation.updated = Date.now();
    this.conversations.sort((a, b) => b.updated - a.updated);
    this.#saveSoon(conversation);
  }

  #saveSoon(conversation) {
    if (this.saving.has(conversation)) return;
    this.saving.set(conversation, setTimeout(() => this.#save(conversation), SAVE_MS));
  }

  #save(conversation) {
    clearTimeout(this.saving.get(conversation));
    this.saving.delete(conversation);
    if (this.conversations.includes(conversation) && conversation.roots.length) {
      this.store.put(conversation).catch(e => this.#showProblem(new Error(`this browser does not keep the conversation: ${e.message}`)));
    }
  }

  #saveAll() {
    for (const conversation of [...this.saving.keys()]) this.#save(conversation);
  }

  // Pictures

  #takeDrops() {
    const hasFiles = event => [...event.dataTransfer.types].includes("Files");
    const mark = isOver => this.chatView.classList.toggle("drop", isOver);
    this.chatView.addEventListener("dragover", event => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      mark(true);
    });
    this.chatView.addEventListener("dragleave", event => {
      if (!this.chatView.contains(event.relatedTarget)) mark(false);
    });
    this.chatView.addEventListener("drop", event => {
      mark(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      const files = pictureFiles(event.dataTransfer);
      if (files.length) this.#attach(files);
      else this.#showProblem(new api.ApiFailure("only pictures can be dropped here", 0));
    });
  }

  // Why the message that is written can have no pictures; null if it can.
  get #refusal() {
    return this.noPictures ?? (this.conversation?.kind === "text" ? "a text has no pictures: begin a chat" : null);
  }

  // Add pictures to the message that is written.
  async #attach(files) {
    let problem = this.#refusal;
    for (const file of problem === null ? files : []) {
      try {
        this.attached.push(await pictureOf(file));
      } catch (e) {
        problem = e.message;
      }
    }
    this.#showAttached();
    this.#showProblem(problem === null ? null : new api.ApiFailure(problem, 0));
    this.input.focus();
  }

  #showAttached() {
    this.thumbnails.hidden = !this.attached.length;
    this.thumbnails.replaceChildren(
      ...this.attached.map(picture => {
        const remove = () => {
          this.attached = this.attached.filter(one => one !== picture);
          this.#showAttached();
          this.input.focus();
        };
        const shown = h("img", { src: picture.url, alt: picture.name, title: `${picture.name}, ${picture.width} × ${picture.height}` });
        return h("div", { class: "thumbnail", role: "listitem" }, shown, iconButton("close", `Remove ${picture.name}`, remove));
      }),
    );
  }

  #markPictures() {
    const refusal = this.#refusal;
    this.pictureButton.disabled = refusal !== null;
    this.pictureButton.title = refusal ?? "Add pictures: pick, paste or drop them";
    this.pictureButton.setAttribute("aria-label", refusal === null ? "Add pictures" : `Add pictures: ${refusal}`);
  }

  // Messages

  #sendOrStop() {
    if (this.#isBusy()) this.#stop();
    else this.#send();
  }

  #isBusy() {
    return Object.keys(this.conversation.nodes).some(id => this.answers.isRunning(id));
  }

  #stop() {
    for (const id of Object.keys(this.conversation.nodes)) this.answers.stop(id);
  }

  async #send() {
    const { conversation } = this, text = this.input.value, isChat = conversation.kind === "chat";
    const last = tree.path(conversation).at(-1) ?? null;
    const sent = isChat ? this.attached : [];
    if (!text.trim() && !sent.length && (isChat ? last?.role !== "user" : last === null)) return;
    const isNew = isChat ? text.trim() !== "" || sent.length > 0 : text !== "";
    const notKept = sent.length ? await this.#keepPictures(sent) : null;
    const isSent = await this.#attempt(async () => {
      const more = sent.length ? { images: sent.map(toldOf) } : {};
      const user = isNew ? tree.add(conversation, last?.id ?? null, { role: "user", content: text, ...more }) : last;
      try {
        await this.#answer(user);
      } catch (e) {
        if (isNew) tree.remove(conversation, user.id);
        throw e;
      }
    });
    if (!isSent) return;
    this.attached = this.attached.filter(one => !sent.includes(one));
    this.#showAttached();
    if (notKept !== null) this.#showProblem(notKept);
    this.input.value = "";
    this.#grow();
    this.thread.sticks = true;
    this.thread.follow();
  }

  // Keep pictures with the conversations. Return why the browser does not, null if it does.
  async #keepPictures(pictures) {
    let problem = null;
    for (const picture of pictures) {
      try {
        await this.pictures.put(picture);
      } catch (e) {
        problem = new api.ApiFailure(`this browser does not keep the picture ${picture.name} (${e.message}): it lasts as long as the page; delete old conversations with pictures to make room`, 0);
      }
    }
    return problem;
  }

  // Answer a message, twice where two answers stand side by side.
  async #answer(user) {
    const { conversation } = this, { settings, other } = conversation;
    const first = await this.answers.answer(conversation, user.id, settings);
    if (!other) return;
    try {
      const second = await this.answers.answer(conversation, user.id, other);
      user.pair = [first.id, second.id];
      tree.show(conversation, first.id);
    } catch (e) {
      this.answers.stop(first.id);
      tree.remove(conversation, first.id);
      if (e instanceof SettingError) this.panel.turn("B");
      throw e;
    }
  }

  async #again(node) {
    await this.#attempt(async () => {
      const parent = this.conversation.nodes[node.parent];
      if (parent && parent.pair) delete parent.pair;
      if (parent && this.conversation.other) await this.#answer(parent);
      else await this.answers.answer(this.conversation, node.parent, this.conversation.settings);
    });
  }

  // Go on from another token at a place of an answer, with the answer's settings and seed.
  async #branch(node, index, token) {
    const begins = [...node.tokens.slice(0, index), { ...token, tops: node.tokens[index].tops, branched: true }];
    const isSame = token.id === node.tokens[index].id;
    await this.#attempt(async () => {
      const settings = { ...node.settings };
      // From the same token the same seed would draw the same again.
      if (isSame) settings.seed = "";
      if (settings.max_tokens !== "" && this.conversation.kind === "chat") settings.max_tokens = String(Math.max(Number(settings.max_tokens), begins.length + 1));
      const parent = this.conversation.nodes[node.parent];
      if (parent?.pair) delete parent.pair;
      await this.answers.answer(this.conversation, node.parent, settings, { begins });
    });
  }

  async #edit(node, text) {
    const { conversation } = this;
    if (text === node.content && node.role !== "user") return;
    await this.#attempt(async () => {
      const { parent } = node;
      if (node.role !== "user") {
        const { role, reasoning, calls, callId } = node;
        tree.add(conversation, parent, { role, content: text, reasoning, calls, callId, tokens: [], settings: null, info: null });
        return;
      }
      const more = node.images?.length ? { images: node.images } : {};
      const user = tree.add(conversation, parent, { role: "user", content: text, ...more });
      try {
        await this.#answer(user);
      } catch (e) {
        tree.remove(conversation, user.id);
        tree.show(conversation, node.id);
        throw e;
      }
    });
  }

  #remove(node) {
    const { conversation } = this, gone = [node.id];
    while (gone.length) {
      const id = gone.pop();
      this.answers.stop(id);
      gone.push(...conversation.nodes[id].children);
    }
    tree.remove(conversation, node.id);
    this.#touch(conversation);
    this.#refresh();
  }

  // Give the result of a call. Once all calls of an answer have theirs, the model goes on.
  async #result(node, call, text) {
    const { conversation } = this;
    await this.#attempt(async () => {
      const last = tree.path(conversation).at(-1);
      const result = tree.add(conversation, last.id, { role: "tool", content: text, callId: call.id });
      const results = new Set(tree.pathTo(conversation, result.id).filter(one => one.role === "tool").map(one => one.callId));
      if (node.calls.every(one => results.has(one.id))) await this.#answer(result);
    });
  }

  #show(node) {
    tree.show(this.conversation, node.id);
    this.#touch(this.conversation);
    this.thread.sticks = false;
    this.#refresh();
  }

  // Do something that a setting may prevent, and show the conversation as it is then. Return whether
  // it was done.
  async #attempt(action) {
    const { conversation } = this;
    let problem = null;
    try {
      await action();
    } catch (e) {
      problem = e;
    }
    this.#touch(conversation);
    if (conversation === this.conversation) this.#refresh();
    this.#showProblem(problem);
    return problem === null;
  }

  #showProblem(problem) {
    this.problem.hidden = problem === null;
    this.problem.textContent = problem?.message ?? "";
    this.panel.mark(problem?.field, problem?.message);
    if (problem instanceof SettingError) {
      this.#toggle("settings", true);
      this.panel.focus(problem.field);
    } else if (problem && !(problem instanceof api.ApiFailure)) console.error(problem);
  }

  #changed({ conversation, node }) {
    this.#saveSoon(conversation);
    if (conversation !== this.conversation) return;
    this.thread.change(node);
    this.#markSend();
  }

  #ended({ conversation, node }) {
    this.#touch(conversation);
    if (conversation === this.conversation) {
      this.thread.end(node);
      this.#markSend();
      this.#showList();
    }
    this.look();
  }

  #markSend() {
    const isBusy = this.#isBusy();
    if (this.sendButton.dataset.busy === String(isBusy)) return;
    this.sendButton.dataset.busy = String(isBusy);
    this.sendButton.setAttribute("aria-label", isBusy ? "Stop" : "Send");
    this.sendButton.replaceChildren(icon(isBusy ? "stop" : "send"));
  }

  #settingsChanged() {
    this.#touch(this.conversation);
    keep("last-settings", this.conversation.settings);
    this.#showProblem(null);
  }

  #togglePair() {
    const { conversation } = this;
    conversation.other = conversation.other ? null : { ...conversation.settings };
    this.panel.show(conversation);
    if (conversation.other) {
      this.panel.turn("B");
      this.#toggle("settings", true);
    }
    this.#touch(conversation);
    this.#refresh();
  }

  #toggleTokens() {
    this.showsTokens = !this.showsTokens;
    keep("tokens", this.showsTokens);
    this.#markTokens();
    this.thread.show(this.conversation, this.showsTokens);
  }

  #markTokens() {
    this.tokenButton.setAttribute("aria-pressed", String(this.showsTokens));
  }

  // The page

  turn(view) {
    this.view = view;
    this.chatView.hidden = view !== "chat";
    this.loadView.hidden = view !== "load";
    for (const button of this.views) button.setAttribute("aria-pressed", String(button.textContent.toLowerCase() === view));
    document.body.classList.toggle("shows-load", view === "load");
    for (const button of [this.tokenButton, this.pairButton, this.settingsButton]) button.hidden = view !== "chat";
    history.replaceState(null, "", view === "load" ? "#load" : location.pathname);
    if (view === "load") {
      this.load.draw();
      this.look();
    }
  }

  #toggle(pane, isOpen) {
    const element = pane === "sidebar" ? this.sidebar.element : this.aside, button = pane === "sidebar" ? this.menuButton : this.settingsButton;
    const opens = isOpen ?? element.hidden;
    element.hidden = !opens;
    button.setAttribute("aria-expanded", String(opens));
    keep(pane, opens);
  }

  #setTheme(theme) {
    this.theme = theme;
    keep("theme", theme);
    document.documentElement.dataset.theme = theme;
    const label = `Light or dark: ${theme === "auto" ? "as the system" : theme}`;
    this.themeButton.setAttribute("aria-label", label);
    this.themeButton.title = label;
  }

  #nextTheme() {
    this.#setTheme(THEMES[(THEMES.indexOf(this.theme) + 1) % THEMES.length]);
  }

  #grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, innerHeight * 0.4)}px`;
  }

  #key(event) {
    if (event.isComposing || event.defaultPrevented) return;
    const isIn = event.target === this.input, isAnyField = event.target.matches?.("input, textarea, select");
    if (event.key === "Enter" && isIn && !event.shiftKey && !event.altKey) {
      event.preventDefault();
      if (!this.#isBusy()) this.#send();
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.view === "chat") {
      event.preventDefault();
      if (!this.#isBusy()) this.#send();
    } else if (event.key === "Escape") {
      const isNarrow = !matchMedia("(min-width: 900px)").matches;
      if (this.#isBusy()) this.#stop();
      else if (isNarrow) {
        this.#toggle("sidebar", false);
        this.#toggle("settings", false);
      }
    } else if (event.key === "/" && !isAnyField) {
      event.preventDefault();
      this.turn("chat");
      this.input.focus();
    }
  }

  // Look at the server, and again after a while.
  async look() {
    clearTimeout(this.looking);
    const turn = (this.turns = (this.turns ?? 0) + 1);
    try {
      const [metrics, status] = await Promise.all([api.text("metrics"), api.json("status")]);
      if (!this.models || this.adapters !== String(status.adapters)) {
        this.models = (await api.json("v1/models")).data;
        this.adapters = String(status.adapters);
        this.answers.most = status.max_logprobs;
        this.panel.serve(status, this.models);
        this.#meet(status);
      }
      this.load.take(parse(metrics), status);
      if (this.view === "load") this.load.draw();
      this.#say(status);
    } catch (e) {
      const needsKey = e.status === 401;
      if (needsKey) this.keyForm.hidden = false;
      this.#state(needsKey ? "this server wants an API key" : e.message, true);
    }
    if (turn === this.turns) this.looking = setTimeout(() => this.look(), this.view === "load" ? LOAD_MS : QUIET_MS);
  }

  // Take up what the server is.
  #meet(status) {
    this.title.replaceChildren(status.model);
    this.title.title = `${status.max_model_len} tokens of context, jpaged ${status.version}`;
    document.title = `${status.model} · jpaged`;
    this.thread.model = status.model;
    this.noPictures = status.images.refused;
    this.#markPictures();
    if (!status.has_chat_template && !this.conversation.roots.length && this.conversation.kind === "chat") this.begin("text");
    this.thread.show(this.conversation, this.showsTokens);
  }

  #say(status) {
    if (!status.has_tokenizer) {
      this.#state("no tokenizer: this model takes token ids alone (/v1/completions, /inference/v1/generate); here only its load is shown", true);
      return;
    }
    const last = this.load.last;
    const busy = status.requests.length ? `${short(last?.decode ?? 0)} tokens/s, ${status.requests.length} running` : "up";
    this.#state(this.store.isKept ? busy : `${busy}; this browser keeps no conversations`, false);
  }

  #state(text, isBad) {
    if (this.state.textContent !== text) this.state.textContent = text;
    this.state.classList.toggle("bad", isBad);
  }
}

// Return a conversation that was kept, with all that this version of the page needs; null if it is broken.
function sound(conversation) {
  try {
    conversation.settings = wholeSettings(conversation.settings);
    conversation.other = conversation.other ? wholeSettings(conversation.other) : null;
    for (const node of Object.values(conversation.nodes)) node.settings &&= wholeSettings(node.settings);
    tree.path(conversation);
    return conversation;
  } catch {
    return null;
  }
}

new Page().start();
