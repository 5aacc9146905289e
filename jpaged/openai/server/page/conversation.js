// A conversation: a tree of messages, of which one path is shown. Plain data, which the browser keeps.
//
// node: { id, parent, role, content, images, reasoning, calls, tokens, settings, info, error, pair }
//   parent: the id of the message before it, null for a first one
//   role: "user" | "assistant" | "tool"; of a conversation of the kind "text" both are parts of one text
//   images: [{ id, name, width, height }] of a user, whose pictures pictures.js keeps by their ids
//   calls: [{ id, name, arguments }] of an assistant; callId: of a tool's result
//   tokens: [{ id, text, logprob, tops: [{ id, text, logprob }] }] of an assistant, null if unknown
//   pair: the ids of two answers to a user's message that are shown side by side

let count = 0;

export function newId() {
  return `${Date.now().toString(36)}-${(count++).toString(36)}-${Math.floor(Math.random() * 2 ** 32).toString(36)}`;
}

export function newConversation(kind, settings) {
  const now = Date.now();
  return { id: newId(), kind, title: "", created: now, updated: now, nodes: {}, roots: [], shown: {}, settings, other: null };
}

export function childrenOf(conversation, id) {
  return id === null ? conversation.roots : (conversation.nodes[id].children ??= []);
}

// Add a message after another (null: as a first one), and show it.
export function add(conversation, parent, message) {
  const node = { id: newId(), parent, children: [], ...message };
  conversation.nodes[node.id] = node;
  childrenOf(conversation, parent).push(node.id);
  show(conversation, node.id);
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node.content) || (node.images?.length ? "Picture" : "");
  return node;
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].trim();
  return line.length > 60 ? `${line.slice(0, 57)}...` : line;
}

// Have the path lead over a message.
export function show(conversation, id) {
  for (let node = conversation.nodes[id]; node; node = conversation.nodes[node.parent]) {
    conversation.shown[node.parent ?? ""] = node.id;
  }
}

// Return the messages that are shown, from the first to the last.
export function path(conversation) {
  const nodes = [];
  let id = conversation.shown[""] ?? conversation.roots.at(-1);
  while (id !== undefined) {
    const node = conversation.nodes[id];
    nodes.push(node);
    const shown = conversation.shown[id];
    id = node.children.includes(shown) ? shown : node.children.at(-1);
  }
  return nodes;
}

// Return the messages from the first to this one.
export function pathTo(conversation, id) {
  const nodes = [];
  for (let node = conversation.nodes[id]; node; node = conversation.nodes[node.parent]) nodes.unshift(node);
  return nodes;
}

export function siblings(conversation, id) {
  return childrenOf(conversation, conversation.nodes[id].parent);
}

// Remove a message and all that comes after it.
export function remove(conversation, id) {
  const node = conversation.nodes[id], beside = siblings(conversation, id);
  beside.splice(beside.indexOf(id), 1);
  const left = [id];
  while (left.length) {
    const next = left.pop();
    left.push(...conversation.nodes[next].children);
    delete conversation.nodes[next];
    delete conversation.shown[next];
  }
  const key = node.parent ?? "";
  if (conversation.shown[key] === id) {
    if (beside.length) conversation.shown[key] = beside.at(-1);
    else delete conversation.shown[key];
  }
  const parent = conversation.nodes[node.parent];
  if (parent?.pair?.includes(id)) delete parent.pair;
}

// Return the messages of a chat request for the path to a message (null: none yet). The system prompt
// is the settings'. urlOf: the data: URL of a picture by its id, undefined where there is none.
export function messagesTo(conversation, id, system, urlOf = () => undefined) {
  const begin = system.trim() ? [{ role: "system", content: system }] : [];
  if (id === null) return begin;
  return [...begin, ...pathTo(conversation, id).map(node => messageOf(node, urlOf))];
}

export function messageOf(node, urlOf) {
  if (node.images?.length) return { role: node.role, content: partsOf(node, urlOf) };
  if (node.role === "tool") return { role: "tool", content: node.content, tool_call_id: node.callId };
  const message = { role: node.role, content: node.content };
  if (node.role === "assistant") {
    if (node.reasoning) message.reasoning_content = node.reasoning;
    if (node.calls?.length) {
      message.tool_calls = node.calls.map(call => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      message.content = node.content || null;
    }
  }
  return message;
}

function partsOf(node, urlOf) {
  const parts = node.images.map(image => {
    const url = urlOf(image.id);
    if (url === undefined) throw new Error(`the picture ${image.name} is not kept any more: delete its message, or send it again`);
    return { type: "image_url", image_url: { url } };
  });
  return node.content ? [...parts, { type: "text", text: node.content }] : parts;
}

// Return the text that a conversation of the kind "text" has up to a message.
export function textTo(conversation, id) {
  return id === null ? "" : pathTo(conversation, id).map(node => node.content).join("");
}

// Return the pictures of a file that was exported: [[id, url]]. They are data: URLs of images alone.
export function importedPictures(text) {
  const { pictures } = JSON.parse(text);
  const isSound = ([id, url]) => /^[\w-]+$/.test(id) && typeof url === "string" && /^data:image\/(png|jpeg);base64,[A-Za-z0-9+/=]*$/.test(url);
  return pictures && typeof pictures === "object" ? Object.entries(pictures).filter(isSound) : [];
}

// Return conversations of a file that was exported. Throws Error for a file of another kind.
export function imported(text) {
  const data = JSON.parse(text);
  const list = Array.isArray(data?.conversations) ? data.conversations : null;
  if (data?.format !== "jpaged-conversations" || !list) throw new Error("this is no file of conversations that this page wrote");
  return list.map(checked);
}

function checked(conversation) {
  const { nodes, roots } = conversation ?? {};
  const isTree = nodes && typeof nodes === "object" && Array.isArray(roots);
  if (!isTree || !["chat", "text"].includes(conversation.kind)) throw new Error("a conversation of the file is broken");
  const seen = new Set(), left = roots.map(id => [id, null]);
  while (left.length) {
    const [id, parent] = left.pop(), node = Object.hasOwn(nodes, id) ? nodes[id] : null;
    const isSound = /^[\w-]+$/.test(id) && node && node.id === id && node.parent === parent && typeof node.content === "string" && Array.isArray(node.children) && ["user", "assistant", "tool"].includes(node.role);
    if (!isSound || seen.has(id)) throw new Error("a message of the file is broken");
    seen.add(id);
    left.push(...node.children.map(child => [child, id]));
  }
  if (seen.size !== Object.keys(nodes).length) throw new Error("a message of the file is nowhere in its conversation");
  const clean = { ...newConversation(conversation.kind, conversation.settings), title: String(conversation.title ?? ""), roots };
  for (const id of seen) clean.nodes[id] = cleaned(nodes[id]);
  for (const node of Object.values(clean.nodes)) {
    const shown = conversation.shown?.[node.id];
    if (node.children.includes(shown)) clean.shown[node.id] = shown;
  }
  if (roots.includes(conversation.shown?.[""])) clean.shown[""] = conversation.shown[""];
  return clean;
}

// Return a message of a file with what this page reads of it, each of its type.
function cleaned(node) {
  const { id, parent, children, role, content, callId, settings } = node;
  const clean = { id, parent, children, role, content, reasoning: String(node.reasoning ?? ""), calls: [], tokens: [], settings: null, info: null };
  const images = list(node.images).filter(image => /^[\w-]+$/.test(image?.id ?? ""));
  if (role === "user" && images.length) {
    clean.images = images.map(image => ({ id: String(image.id), name: String(image.name ?? "picture"), width: Number(image.width) || 1, height: Number(image.height) || 1 }));
  }
  if (role === "tool") clean.callId = String(callId ?? "");
  if (settings && typeof settings === "object") {
    clean.settings = Object.fromEntries(Object.entries(settings).filter(([, value]) => typeof value === "string"));
  }
  for (const call of list(node.calls)) clean.calls.push({ id: String(call?.id), name: String(call?.name), arguments: String(call?.arguments) });
  const scored = token => ({ id: Number(token?.id), text: String(token?.text ?? ""), logprob: Number.isFinite(token?.logprob) ? token.logprob : null });
  for (const token of list(node.tokens)) clean.tokens.push({ ...scored(token), tops: list(token?.tops).map(scored) });
  if (Array.isArray(node.pair) && node.pair.length === 2 && node.pair.every(one => children.includes(one))) clean.pair = node.pair;
  if (node.info && typeof node.info === "object") {
    const { tokens, speed, first, seconds, finish, prompt, cached } = node.info, number = value => (Number.isFinite(value) ? value : null);
    clean.info = { tokens: number(tokens), speed: number(speed), first: number(first), seconds: number(seconds), finish: typeof finish === "string" ? finish : null, prompt: number(prompt), cached: number(cached) };
  }
  return clean;
}

const list = value => (Array.isArray(value) ? value : []);

// pictures: [[id, url]] of the conversations.
export function exported(conversations, pictures = []) {
  return JSON.stringify({ format: "jpaged-conversations", version: 1, conversations, pictures: Object.fromEntries(pictures) }, null, 1);
}
