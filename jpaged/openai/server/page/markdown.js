// A small renderer of markdown. `parse` makes a tree of plain objects and knows no document; `render`
// makes nodes of it. Text stays text: HTML in it is shown as it was written, a link goes to http,
// https or mailto alone, and an image becomes a link, since the page loads nothing from elsewhere.
//
// The time is bounded by the length of the text: every search that can fail is remembered or is of
// bounded length, and nesting is too.

import { copy, h, icon } from "./dom.js";

const DEEPEST = 12; // lists and quotes within each other
const DEEPEST_SPAN = 6; // emphasis within emphasis
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)|\s*$| )/;
const QUOTE = /^ {0,3}>\s?/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const LINK = /!?\[((?:[^[\]\\]|\\.){0,500})\]\(\s*<?([^()\s<>]{0,2000}(?:\([^()\s]{0,500}\)[^()\s<>]{0,500})?)>?(?:\s+"[^"\n]{0,300}")?\s*\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const MARK = /[\\`*_~[!h\n]/g;
const SPACE = /\s/;
const LETTER = /[\p{L}\p{N}]/u;

// Return the blocks of a text: { type, raw, ... }. Equal `raw` and place mean an equal block.
export function parse(text) {
  return blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  const add = (block, start) => found.push({ ...block, raw: lines.slice(start, at).join("\n") });
  while (at < lines.length) {
    const line = lines[at], start = at;
    if (!line.trim()) {
      at++;
      continue;
    }
    const fence = FENCE.exec(line);
    if (fence) {
      const closing = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
      const indent = line.length - line.trimStart().length;
      at++;
      while (at < lines.length && !closing.test(lines[at])) at++;
      const body = lines.slice(start + 1, at).map(l => l.slice(Math.min(indent, l.length - l.trimStart().length)));
      const isClosed = at < lines.length;
      if (isClosed) at++;
      add({ type: "code", language: fence[2], text: body.join("\n"), isClosed }, start);
      continue;
    }
    if (line.startsWith("    ")) {
      while (at < lines.length && (lines[at].startsWith("    ") || (!lines[at].trim() && lines[at + 1]?.startsWith("    ")))) at++;
      const body = lines.slice(start, at).map(l => l.slice(4));
      add({ type: "code", language: "", text: body.join("\n"), isClosed: true }, start);
      continue;
    }
    const heading = HEADING.exec(line);
    if (heading) {
      at++;
      add({ type: "heading", level: heading[1].length, spans: spans(heading[2] ?? "") }, start);
      continue;
    }
    if (RULE.test(line)) {
      at++;
      add({ type: "rule" }, start);
      continue;
    }
    if (QUOTE.test(line) && depth < DEEPEST) {
      const inner = [];
      while (at < lines.length && QUOTE.test(lines[at])) inner.push(lines[at++].replace(QUOTE, ""));
      add({ type: "quote", blocks: blocks(inner, depth + 1) }, start);
      continue;
    }
    if (ITEM.test(line) && depth < DEEPEST) {
      const list = listAt(lines, at, depth);
      at = list.end;
      add({ type: "list", isOrdered: list.isOrdered, first: list.first, items: list.items }, start);
      continue;
    }
    if (line.includes("|") && at + 1 < lines.length && DIVIDER.test(lines[at + 1]) && lines[at + 1].includes("-")) {
      const head = cells(line), divider = cells(lines[at + 1]);
      if (head.length === divider.length) {
        at += 2;
        const rows = [];
        while (at < lines.length && lines[at].trim() && lines[at].includes("|")) rows.push(cells(lines[at++]));
        const aligns = divider.map(cell => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "start"));
        const fitted = rows.map(row => head.map((_, i) => spans(row[i] ?? "")));
        add({ type: "table", aligns, head: head.map(spans), rows: fitted }, start);
        continue;
      }
    }
    at++;
    while (at < lines.length && goesOn(lines[at], depth)) at++;
    add({ type: "paragraph", spans: spans(lines.slice(start, at).map(l => l.trimStart()).join("\n")) }, start);
  }
  return found;
}

// Whether a line goes on with the paragraph before it.
function goesOn(line, depth) {
  if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return false;
  return depth >= DEEPEST || !(QUOTE.test(line) || /^ {0,3}(?:[-*+]|1[.)]) +\S/.test(line));
}

function listAt(lines, at, depth) {
  const first = ITEM.exec(lines[at]), isOrdered = /\d/.test(first[2]), items = [];
  const sign = first[2].at(-1);
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[2].at(-1) !== sign || (RULE.test(lines[at]) && items.length)) break;
    const width = item[1].length + item[2].length + (item[3]?.length ?? 1);
    const inner = [lines[at++].slice(width)];
    while (at < lines.length) {
      const line = lines[at], indent = line.length - line.trimStart().length;
      if (!line.trim()) {
        // A blank line belongs to the item if the next line that is not blank does.
        let next = at + 1;
        while (next < lines.length && !lines[next].trim()) next++;
        const after = lines[next];
        if (after === undefined || after.length - after.trimStart().length < Math.min(width, 2)) break;
        inner.push("");
        at++;
      } else if (indent >= width || (indent >= 2 && ITEM.test(line.trimStart()))) {
        inner.push(line.slice(Math.min(indent, width)));
        at++;
      } else if (goesOn(line, depth) && inner.at(-1).trim() && !ITEM.test(line)) {
        inner.push(line.trimStart());
        at++;
      } else break;
    }
    items.push(blocks(inner, depth + 1));
    let next = at;
    while (next < lines.length && !lines[next].trim()) next++;
    const after = ITEM.exec(lines[next] ?? "");
    if (after && after[2].at(-1) === sign) at = next;
  }
  return { isOrdered, first: isOrdered ? Number.parseInt(first[2], 10) : 1, items, end: at };
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
}

// Return the spans of a line of text: { type: "text" | "code" | "strong" | "em" | "del" | "link" | "break" }.
export function spans(text, depth = 0) {
  const found = [], absent = new Set();
  let plain = "", at = 0;
  const flush = () => {
    if (plain) found.push({ type: "text", text: plain });
    plain = "";
  };
  const add = (span, end) => {
    flush();
    found.push(span);
    at = end;
  };
  while (at < text.length) {
    MARK.lastIndex = at;
    const next = MARK.exec(text);
    plain += text.slice(at, next ? next.index : text.length);
    if (!next) break;
    at = next.index;
    const c = text[at];
    if (c === "\\" && at + 1 < text.length && !LETTER.test(text[at + 1]) && !SPACE.test(text[at + 1])) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    if (c === "`") {
      const ticks = run(text, at, "`"), mark = "`".repeat(ticks);
      const end = closing(text, mark, at + ticks, absent);
      if (end >= 0) {
        const code = text.slice(at + ticks, end);
        add({ type: "code", text: /^ .* $/s.test(code) ? code.slice(1, -1) : code }, end + ticks);
        continue;
      }
      plain += mark;
      at += ticks;
      continue;
    }
    if ((c === "*" || c === "_" || c === "~") && depth < DEEPEST_SPAN) {
      const size = Math.min(run(text, at, c), 3), before = text[at - 1] ?? " ", after = text[at + size] ?? " ";
      const opens = !SPACE.test(after) && !(c === "_" && LETTER.test(before)) && (c !== "~" || size === 2);
      const mark = c.repeat(size);
      const end = opens ? emphasisEnd(text, mark, at + size, absent) : -1;
      if (end > at + size) {
        const inner = spans(text.slice(at + size, end), depth + 1);
        const em = { type: "em", spans: inner };
        add(c === "~" ? { type: "del", spans: inner } : size === 1 ? em : { type: "strong", spans: size === 3 ? [em] : inner }, end + size);
        continue;
      }
      plain += mark;
      at += size;
      continue;
    }
    if (c === "[" || (c === "!" && text[at + 1] === "[")) {
      LINK.lastIndex = at;
      const link = LINK.exec(text), href = link && safe(link[2]);
      if (href) {
        add({ type: "link", href, spans: depth < DEEPEST_SPAN ? spans(link[1] || link[2], DEEPEST_SPAN) : [{ type: "text", text: link[1] }] }, at + link[0].length);
        continue;
      }
    }
    if (c === "h" && !LETTER.test(text[at - 1] ?? " ")) {
      ADDRESS.lastIndex = at;
      const address = ADDRESS.exec(text)?.[0].replace(/[.,;:!?)\]*_]+$/, ""), href = address && safe(address);
      if (href) {
        add({ type: "link", href, spans: [{ type: "text", text: address }] }, at + address.length);
        continue;
      }
    }
    if (c === "\n") {
      add({ type: "break" }, at + 1);
      continue;
    }
    plain += c;
    at++;
  }
  flush();
  return found;
}

function run(text, at, c) {
  let end = at;
  while (text[end] === c) end++;
  return end - at;
}

// Return where a run of exactly these backticks is, from a place on. A mark that was not found is not
// searched for again.
function closing(text, mark, from, absent) {
  if (absent.has(mark)) return -1;
  for (let at = text.indexOf(mark, from); at >= 0; ) {
    const length = run(text, at, "`");
    if (length === mark.length) return at;
    at = text.indexOf(mark, at + length);
  }
  absent.add(mark);
  return -1;
}

// Return where emphasis ends that began before a place: at its mark, after something other than space.
function emphasisEnd(text, mark, from, absent) {
  if (absent.has(mark)) return -1;
  for (let at = text.indexOf(mark, from); at >= 0; ) {
    const length = run(text, at, mark[0]);
    const fits = length === mark.length || (mark.length < 3 && length > 2 && at > from);
    const end = at + length;
    if (fits && !SPACE.test(text[at - 1]) && !(mark[0] === "_" && LETTER.test(text[end] ?? " "))) {
      return end - mark.length;
    }
    at = text.indexOf(mark, end);
  }
  absent.add(mark);
  return -1;
}

// Return an address that a link may have, else null.
export function safe(href) {
  try {
    const url = new URL(href);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null; // a relative address would be one of this server
  }
}

// Show a text in a container. Blocks that are as they were keep their nodes, so that a text that grows
// costs its last block alone.
export function render(container, text) {
  const old = container.markdown ?? [], now = parse(text);
  let same = 0;
  while (same < old.length && same < now.length && old[same].raw === now[same].raw && old[same].type === now[same].type) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...now.slice(same).map(node));
  container.markdown = now;
}

function node(block) {
  switch (block.type) {
    case "code":
      return codeBlock(block);
    case "heading":
      // The page has the first levels of headings.
      return h(`h${Math.min(block.level + 2, 6)}`, {}, block.spans.map(spanNode));
    case "rule":
      return h("hr");
    case "quote":
      return h("blockquote", {}, block.blocks.map(node));
    case "list": {
      const items = block.items.map(item => h("li", {}, item.length === 1 && item[0].type === "paragraph" ? item[0].spans.map(spanNode) : item.map(node)));
      return block.isOrdered ? h("ol", { start: block.first }, items) : h("ul", {}, items);
    }
    case "table": {
      const row = (cells, name) => h("tr", {}, cells.map((cell, i) => h(name, { class: `to-${block.aligns[i]}` }, cell.map(spanNode))));
      const table = h("table", {}, h("thead", {}, row(block.head, "th")), h("tbody", {}, block.rows.map(cells => row(cells, "td"))));
      return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "table" }, table);
    }
    default:
      return h("p", {}, block.spans.map(spanNode));
  }
}

function codeBlock(block) {
  const button = h("button", { type: "button", class: "copy-code", "aria-label": "Copy the code" }, icon("copy"));
  button.addEventListener("click", () => copy(block.text, button));
  const head = h("div", { class: "code-head" }, h("span", {}, block.language), button);
  const pre = h("pre", { tabindex: "0" }, h("code", {}, block.text));
  return h("div", { class: "code" }, head, pre);
}

function spanNode(span) {
  switch (span.type) {
    case "text":
      return document.createTextNode(span.text);
    case "code":
      return h("code", {}, span.text);
    case "break":
      return h("br");
    case "link":
      return h("a", { href: span.href, target: "_blank", rel: "noopener noreferrer nofollow" }, span.spans.map(spanNode));
    default:
      return h(span.type, {}, span.spans.map(spanNode));
  }
}
