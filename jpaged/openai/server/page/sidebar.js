// The list of conversations: new, find, name, delete, export and import.

import { h, icon, iconButton } from "./dom.js";

export class Sidebar {
  // actions: { begin(kind), open(id), rename(conversation, title), remove(conversation), exportAll, importFile(file), view(name) }
  constructor(actions) {
    this.actions = actions;
    this.query = "";
    this.list = h("ul", { class: "conversations" });
    const search = h("input", { type: "search", placeholder: "Find a conversation", "aria-label": "Find a conversation" });
    search.addEventListener("input", () => {
      this.query = search.value.trim().toLowerCase();
      this.#fill();
    });
    const file = h("input", { type: "file", accept: "application/json,.json", hidden: true, "aria-label": "File of conversations" });
    file.addEventListener("change", () => {
      if (file.files[0]) actions.importFile(file.files[0]);
      file.value = "";
    });
    const text = h("button", { type: "button", class: "quiet", title: "The model goes on with a text, without a chat template", onclick: () => actions.begin("text") }, "New text");
    this.element = h(
      "nav",
      { class: "sidebar", "aria-label": "Conversations", id: "sidebar" },
      h("div", { class: "new" }, h("button", { type: "button", class: "primary", onclick: () => actions.begin("chat") }, icon("plus"), " New chat"), text),
      search,
      this.list,
      h("div", { class: "side-foot" }, iconButton("down", "Export all conversations to a file", actions.exportAll), iconButton("up", "Import conversations from a file", () => file.click()), file),
    );
  }

  show(conversations, current) {
    Object.assign(this, { conversations, current });
    this.#fill();
  }

  #fill() {
    const shown = (this.conversations ?? []).filter(one => !this.query || textOf(one).includes(this.query));
    this.list.replaceChildren(...shown.map(one => this.#row(one)));
    if (!shown.length) this.list.append(h("li", { class: "soft none" }, this.query ? "None has this." : "No conversations yet."));
  }

  #row(conversation) {
    const isCurrent = conversation.id === this.current;
    const open = h("button", { type: "button", class: "open", "aria-current": isCurrent ? "page" : null, onclick: () => this.actions.open(conversation.id) }, conversation.kind === "text" ? h("span", { class: "tag" }, "text") : "", conversation.title || "Empty");
    const rename = iconButton("edit", "Rename", () => this.#rename(conversation, row, open));
    const remove = iconButton("trash", "Delete the conversation", () => this.#confirm(conversation, row));
    const row = h("li", { class: isCurrent ? "current" : "" }, open, h("span", { class: "row-actions" }, rename, remove));
    return row;
  }

  #rename(conversation, row) {
    const field = h("input", { "aria-label": "Title of the conversation", maxlength: 200 });
    field.value = conversation.title;
    let isOver = false;
    const end = isKept => {
      if (isOver) return;
      isOver = true;
      if (isKept && field.value.trim()) this.actions.rename(conversation, field.value.trim());
      else this.#fill();
    };
    field.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === "Escape") {
        event.stopPropagation();
        end(event.key === "Enter");
      }
    });
    field.addEventListener("blur", () => end(true));
    row.replaceChildren(field);
    field.select();
  }

  #confirm(conversation, row) {
    const yes = h("button", { type: "button", class: "danger", onclick: () => this.actions.remove(conversation) }, "Delete");
    const no = h("button", { type: "button", class: "quiet", onclick: () => this.#fill() }, "Keep");
    row.replaceChildren(h("span", { class: "confirm" }, "Delete it?"), yes, no);
    yes.focus();
  }
}

function textOf(conversation) {
  return [conversation.title, ...Object.values(conversation.nodes).map(node => node.content)].join("\n").toLowerCase();
}
