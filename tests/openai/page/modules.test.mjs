// The modules of the server's page that need no document, run by node.

import assert from "node:assert/strict";
import { test } from "node:test";

const page = new URL("../../../jpaged/openai/server/page/", import.meta.url);
const load = name => import(new URL(name, page));
const { parse, safe, spans } = await load("markdown.js");
const tree = await load("conversation.js");
const request = await load("request.js");
const metrics = await load("metrics.js");
const { split } = await load("api.js");
const { ticks } = await load("chart.js");
const { duration, short } = await load("dom.js");
const { percent, surprise, visible } = await load("tokens.js");
const { difference } = await load("settings.js");

const text = value => ({ type: "text", text: value });

test("blocks of markdown", () => {
  const types = source => parse(source).map(block => block.type);
  assert.deepEqual(types("# A\n\ntext\nmore\n\n- one\n- two\n\n1. x\n2. y\n\n> q\n\n---\n\n```py\nx = 1\n```"), ["heading", "paragraph", "list", "list", "quote", "rule", "code"]);
  const [code] = parse("```python\nif x:\n    y()\n```");
  assert.deepEqual([code.language, code.text, code.isClosed], ["python", "if x:\n    y()", true]);
  const [open] = parse("~~~\n# no heading");
  assert.deepEqual([open.type, open.text, open.isClosed], ["code", "# no heading", false]);
  const [table] = parse("| a | b |\n|:--|--:|\n| 1 | `2|` |\n| 3 |");
  assert.deepEqual([table.type, table.aligns, table.rows.length], ["table", ["start", "end"], 2]);
  const [list] = parse("1. one\n   - inner\n   - more\n2. two\n\n   with a paragraph\n3) other");
  assert.equal(list.items.length, 2);
  assert.deepEqual(list.items[0].map(block => block.type), ["paragraph", "list"]);
  assert.deepEqual(list.items[1].map(block => block.type), ["paragraph", "paragraph"]);
  assert.equal(parse("5. five")[0].first, 5);
  assert.deepEqual(types("text\n    indented goes on"), ["paragraph"]);
  assert.equal(parse("a\n\n    code\n    more")[1].text, "code\nmore");
});

test("a block that has not changed has the same raw text", () => {
  const before = parse("one\n\ntwo"), after = parse("one\n\ntwo and more\n\nthree");
  assert.equal(before[0].raw, after[0].raw);
  assert.notEqual(before[1].raw, after[1].raw);
});

test("spans", () => {
  assert.deepEqual(spans("a **b** *c* `d*` ~~e~~"), [text("a "), { type: "strong", spans: [text("b")] }, text(" "), { type: "em", spans: [text("c")] }, text(" "), { type: "code", text: "d*" }, text(" "), { type: "del", spans: [text("e")] }]);
  assert.deepEqual(spans("snake_case_name 2 * 3 * 4"), [text("snake_case_name 2 * 3 * 4")]);
  assert.deepEqual(spans("**a *b* c**"), [{ type: "strong", spans: [text("a "), { type: "em", spans: [text("b")] }, text(" c")] }]);
  assert.deepEqual(spans("\\*no\\*"), [text("*no*")]);
  assert.deepEqual(spans("`` a`b ``"), [{ type: "code", text: "a`b" }]);
  const [link] = spans("[x](https://a.org/b_(c))");
  assert.deepEqual([link.href, link.spans], ["https://a.org/b_(c)", [text("x")]]);
  assert.equal(spans("see https://a.org/x.")[1].href, "https://a.org/x");
  assert.deepEqual(spans("***"), [text("***")]);
});

test("HTML stays text, and no link runs anything", () => {
  for (const source of ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a <b>b</b>"]) {
    assert.deepEqual(parse(source)[0].spans, [text(source)]);
  }
  for (const href of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "vbscript:x", "file:///etc/passwd", "/metrics", "//a.org", "blob:x", " javascript:1", "java\nscript:1"]) {
    assert.equal(safe(href), null, href);
    assert.ok(!JSON.stringify(spans(`[x](${href})`)).includes('"link"'), href);
    assert.ok(!JSON.stringify(spans(`![x](${href})`)).includes('"link"'), href);
  }
  assert.equal(safe("mailto:a@b.org"), "mailto:a@b.org");
});

test("hostile markdown takes no long time", () => {
  const hostile = [
    "*".repeat(20000), "**a ".repeat(8000), "_a ".repeat(8000), "`".repeat(20000), "`a``b```".repeat(3000), "[".repeat(20000), "[a](".repeat(5000), "![".repeat(9000),
    "> ".repeat(5000), "- ".repeat(5000), "1. ".repeat(5000), "|".repeat(20000), "|a".repeat(5000) + "\n" + "|-".repeat(5000), "~~a ".repeat(6000), "\n".repeat(50000), "- a\n\n".repeat(3000),
    "a*".repeat(9000), "*a_".repeat(7000), "  ".repeat(10000) + "- x", "-".repeat(20000) + "x", "- - ".repeat(5000), "http://".repeat(5000), "\\".repeat(20000), "#".repeat(20000), "```\n".repeat(4000), "***a".repeat(5000),
  ];
  for (const source of hostile) {
    const began = performance.now();
    parse(source);
    const took = performance.now() - began;
    assert.ok(took < 2000, `${source.slice(0, 12)}...: ${took} ms`);
  }
});

test("a conversation is a tree of which one path is shown", () => {
  const c = tree.newConversation("chat", request.newSettings());
  const user = tree.add(c, null, { role: "user", content: "First line\nmore" });
  const a = tree.add(c, user.id, { role: "assistant", content: "a" });
  const b = tree.add(c, user.id, { role: "assistant", content: "b" });
  const after = tree.add(c, b.id, { role: "user", content: "and?" });
  const ids = () => tree.path(c).map(node => node.id);
  assert.equal(c.title, "First line");
  assert.deepEqual(ids(), [user.id, b.id, after.id]);
  tree.show(c, a.id);
  assert.deepEqual(ids(), [user.id, a.id]);
  assert.deepEqual(tree.siblings(c, a.id), [a.id, b.id]);
  tree.show(c, b.id);
  assert.deepEqual(ids(), [user.id, b.id, after.id]);
  user.pair = [a.id, b.id];
  tree.remove(c, b.id);
  assert.deepEqual(ids(), [user.id, a.id]);
  assert.equal(user.pair, undefined);
  assert.deepEqual(Object.keys(c.nodes).sort(), [user.id, a.id].sort());
  tree.remove(c, user.id);
  assert.deepEqual(ids(), []);
});

test("messages of a request", () => {
  const c = tree.newConversation("chat", request.newSettings());
  const user = tree.add(c, null, { role: "user", content: "hi" });
  const calls = [{ id: "c1", name: "f", arguments: '{"a": 1}' }];
  const answer = tree.add(c, user.id, { role: "assistant", content: "", reasoning: "hm", calls });
  const result = tree.add(c, answer.id, { role: "tool", content: "2", callId: "c1" });
  assert.deepEqual(tree.messagesTo(c, result.id, "be brief"), [
    { role: "system", content: "be brief" },
    { role: "user", content: "hi" },
    { role: "assistant", content: null, reasoning_content: "hm", tool_calls: [{ id: "c1", type: "function", function: { name: "f", arguments: '{"a": 1}' } }] },
    { role: "tool", content: "2", tool_call_id: "c1" },
  ]);
  assert.deepEqual(tree.messagesTo(c, null, " "), []);
});

test("conversations go to a file and come back; a broken file is refused", () => {
  const c = tree.newConversation("text", request.newSettings());
  const user = tree.add(c, null, { role: "user", content: "one " });
  const a = tree.add(c, user.id, { role: "assistant", content: "two", tokens: [{ id: 3, text: "two", logprob: -1, tops: [{ id: 3, text: "two", logprob: -1 }] }], calls: [] });
  tree.add(c, user.id, { role: "assistant", content: "three" });
  tree.show(c, a.id);
  const [back] = tree.imported(tree.exported([c]));
  assert.notEqual(back.id, c.id);
  assert.deepEqual(tree.path(back).map(node => node.content), ["one ", "two"]);
  assert.deepEqual(tree.path(back)[1].tokens, a.tokens);
  assert.equal(tree.textTo(back, a.id), "one two");
  const broken = change => {
    const data = JSON.parse(tree.exported([c]));
    change(data.conversations[0], data);
    return JSON.stringify(data);
  };
  const changes = [
    (one, data) => (data.format = "other"),
    one => (one.kind = "nothing"),
    one => (one.roots = ["absent"]),
    one => (one.nodes[user.id].content = 5),
    one => (one.nodes[user.id].role = "system"),
    one => one.nodes[a.id].children.push(user.id), // a circle
    one => (one.nodes.extra = { id: "extra", parent: null, children: [], role: "user", content: "" }),
    one => (one.nodes[a.id].parent = null),
  ];
  for (const change of changes) assert.throws(() => tree.imported(broken(change)), change.toString());
  assert.throws(() => tree.imported("{"));
  const odd = tree.imported(broken(one => Object.assign(one.nodes[a.id], { tokens: [null, 5], calls: "x", info: { speed: "fast" } })))[0];
  assert.equal(tree.path(odd)[1].info.speed, null);
});

test("bodies follow from settings", () => {
  const settings = { ...request.newSettings(), temperature: "0.5", top_k: "7", stop: "a\\n\nb", max_tokens: "9", tools: '[{"name": "f"}]', template: '{"x": 1}', effort: "low" };
  const body = request.chatBody(settings, [{ role: "user", content: "x" }], { seed: 11, begins: [4, 5], most: 3 });
  assert.equal(body.seed, 11);
  assert.deepEqual([body.temperature, body.top_k, body.max_tokens, body.stop], [0.5, 7, 9, ["a\n", "b"]]);
  assert.deepEqual([body.logprobs, body.top_logprobs, body.answer_token_ids], [true, 3, [4, 5]]);
  assert.deepEqual(body.tools, [{ type: "function", function: { name: "f" } }]);
  assert.deepEqual([body.chat_template_kwargs, body.reasoning_effort, body.tool_choice], [{ x: 1 }, "low", "auto"]);
  assert.ok(!("top_p" in body) && !("model" in body));
  assert.equal(request.chatBody({ ...settings, seed: "3" }, [], { seed: 11 }).seed, 3);
  assert.ok(!("logprobs" in request.chatBody({ ...settings, alternatives: "" }, [], {})));
  const schema = { type: "object" };
  for (const pasted of [schema, { name: "x", schema }, { type: "json_schema", json_schema: { name: "x", schema } }]) {
    const asked = request.textBody({ ...settings, form: "json_schema", form_text: JSON.stringify(pasted) }, [1, 2], {});
    assert.deepEqual(asked.response_format.json_schema.schema, schema);
  }
  assert.deepEqual(request.textBody({ ...settings, form: "choice", form_text: "a\n\n b " }, "x", {}).structured_outputs, { choice: ["a", "b"] });
  assert.deepEqual(request.textBody({ ...settings, form: "regex", form_text: "[a-z]+" }, "x", {}).structured_outputs, { regex: "[a-z]+" });
});

test("a wrong setting is named", () => {
  const wrong = { temperature: "warm", top_p: "2", top_k: "1.5", seed: "-1", tools: "{}", template: "[]", min_p: "1e999" };
  for (const [name, value] of Object.entries(wrong)) {
    assert.throws(() => request.chatBody({ ...request.newSettings(), [name]: value }, [], {}), error => error.field === name, name);
  }
  for (const [form, value] of [["json_schema", "{"], ["json_schema", ""], ["choice", " "], ["regex", ""]]) {
    assert.throws(() => request.chatBody({ ...request.newSettings(), form, form_text: value }, [], {}), error => error.field === "form_text");
  }
});

test("events of a chat add up", () => {
  const texts = new Map(), answer = { content: "", reasoning: "", calls: [], tokens: [], finish: null, usage: null };
  const entry = (id, bytes, logprob) => ({ token: `token_id:${id}`, bytes, logprob });
  const events = [
    { choices: [{ delta: { role: "assistant", content: "" } }] },
    { choices: [{ delta: { reasoning_content: "hm" }, logprobs: { content: [{ ...entry(1, [104, 109], -0.1), top_logprobs: [entry(1, [104, 109], -0.1), entry(2, null, -3)] }] } }] },
    { choices: [{ delta: { content: "yes" }, logprobs: null, token_ids: [7] }] },
    { choices: [{ delta: { tool_calls: [{ index: 0, id: "c", function: { name: "f", arguments: "" } }] } }] },
    { choices: [{ delta: { tool_calls: [{ index: 0, function: { arguments: '{"a"' } }] } }] },
    { choices: [{ delta: { tool_calls: [{ index: 0, function: { arguments: ": 1}" } }] }, finish_reason: "tool_calls" }] },
    { choices: [], usage: { prompt_tokens: 3 } },
  ];
  for (const event of events) request.addEvent(answer, event, true, texts);
  assert.deepEqual([answer.reasoning, answer.content, answer.finish, answer.usage.prompt_tokens], ["hm", "yes", "tool_calls", 3]);
  assert.deepEqual(answer.calls, [{ id: "c", name: "f", arguments: '{"a": 1}' }]);
  assert.deepEqual(answer.tokens.map(token => [token.id, token.text]), [[1, "hm"], [7, undefined]]);
  assert.deepEqual(request.unknown(answer.tokens), [2, 7]);
  texts.set(2, "x").set(7, "yes");
  request.fill(answer.tokens, texts);
  assert.deepEqual([answer.tokens[0].tops[1].text, answer.tokens[1].text], ["x", "yes"]);
});

test("events of a text add up, the likeliest alternative first", () => {
  const texts = new Map([[5, "a"]]), answer = { content: "", reasoning: "", calls: [], tokens: [], finish: null, usage: null };
  const logprobs = { tokens: ["token_id:5"], token_logprobs: [-2], top_logprobs: [{ "token_id:5": -2, "token_id:6": -0.2 }] };
  request.addEvent(answer, { choices: [{ text: "a", logprobs, finish_reason: "length" }] }, false, texts);
  assert.deepEqual(answer.tokens, [{ id: 5, text: "a", logprob: -2, tops: [{ id: 6, text: undefined, logprob: -0.2 }, { id: 5, text: "a", logprob: -2 }] }]);
});

test("pieces of a stream that are cut anywhere", () => {
  const whole = 'data: {"a": 1}\n\nevent: x\ndata: {"b": 2}\n\ndata: [DONE]\n\n', events = [];
  let rest = "";
  for (const c of whole) {
    const found = split(rest + c);
    rest = found.left;
    events.push(...found.events);
  }
  assert.deepEqual(events, [{ a: 1 }, { b: 2 }]);
});

test("metrics: rates and quantiles", () => {
  const histogram = (a, b, c) => `h_seconds_bucket{le="0.1"} ${a}\nh_seconds_bucket{le="1"} ${b}\nh_seconds_bucket{le="+Inf"} ${c}\n`;
  const now = metrics.parse(`# HELP x\nx_total 5\nx{a="1"} 2\nx{a="2"} 3\n${histogram(10, 20, 20)}`);
  assert.deepEqual([now.x_total, metrics.sum(now, "x{")], [5, 5]);
  assert.equal(metrics.quantile(metrics.buckets(now, null, "h_seconds"), 0.5), 0.1);
  assert.ok(Math.abs(metrics.quantile(metrics.buckets(now, null, "h_seconds"), 0.75) - 0.55) < 1e-9);
  const later = metrics.parse(histogram(10, 20, 24));
  assert.equal(metrics.quantile(metrics.buckets(later, now, "h_seconds"), 0.5), 1);
  assert.ok(Number.isNaN(metrics.quantile(metrics.buckets(now, now, "h_seconds"), 0.5)));
  const reading = (at, decode) => ({ at, metrics: { jpaged_decode_tokens_total: decode, jpaged_kv_blocks: 8, jpaged_kv_blocks_in_use: 2 } });
  const sample = metrics.sample(reading(12, 300), reading(10, 100), reading(10, 100));
  assert.deepEqual([sample.decode, sample.blocks], [100, 0.25]);
});

test("numbers as they are shown", () => {
  assert.deepEqual(ticks(0.9), [0, 0.25, 0.5, 0.75, 1]);
  assert.deepEqual(ticks(4), [0, 1, 2, 3, 4]);
  assert.ok(ticks(1234).at(-1) >= 1234 && ticks(0.0003).at(-1) >= 0.0003);
  assert.deepEqual(ticks(0), [0, 1]);
  assert.deepEqual([duration(0.0123), duration(0.5), duration(75), duration(7300), duration(90000)], ["12.3 ms", "500 ms", "1 min 15 s", "2 h 1 min", "1 d 1 h"]);
  assert.deepEqual([short(0), short(3.14), short(1234)], ["0", "3.1", "1,234"]);
  assert.deepEqual([percent(0), percent(Math.log(0.5)), percent(-20)], ["100 %", "50.0 %", "< 0.01 %"]);
  assert.deepEqual([surprise(0), surprise(null), surprise(-Infinity)], [0, 0, 1]);
  assert.deepEqual([visible({ id: 4 }), visible({ text: " a\n" }), visible({ text: "" })], ["#4", "·a⏎", "∅"]);
  const a = request.newSettings();
  assert.equal(difference({ ...a, temperature: "2", seed: "1" }, a), "temperature 2");
  assert.equal(difference({ ...a, seed: "1" }, a), "the same settings");
});

const pictures = await load("pictures.js");

test("pictures are scaled down to what is sent", () => {
  assert.deepEqual(pictures.fitted(640, 480), [640, 480]);
  assert.deepEqual(pictures.fitted(8192, 4096), [2048, 1024]);
  assert.deepEqual(pictures.fitted(20000, 3), [2048, 1]);
  assert.ok(pictures.isSentAsItIs("image/png", 1000, 640, 480));
  assert.ok(pictures.isSentAsItIs("image/jpeg", pictures.MOST_BYTES, 2048, 2048));
  for (const [type, bytes, width, height] of [["image/gif", 9, 9, 9], ["image/webp", 9, 9, 9], ["image/svg+xml", 9, 9, 9], ["image/png", pictures.MOST_BYTES + 1, 9, 9], ["image/png", 9, 2049, 9]]) {
    assert.ok(!pictures.isSentAsItIs(type, bytes, width, height), type);
  }
  const files = [{ type: "image/png" }, { type: "text/plain" }];
  assert.deepEqual(pictures.pictureFiles({ files }), [files[0]]);
  assert.deepEqual(pictures.pictureFiles(null), []);
});

const IMAGE = { id: "p1", name: "a.png", width: 3, height: 2 }, URL_OF_IMAGE = "data:image/png;base64,AAAA";

test("messages with pictures are parts", () => {
  const talk = tree.newConversation("chat", {});
  const first = tree.add(talk, null, { role: "user", content: "", images: [IMAGE] });
  assert.equal(talk.title, "Picture");
  const part = { type: "image_url", image_url: { url: URL_OF_IMAGE } };
  const urlOf = id => (id === "p1" ? URL_OF_IMAGE : undefined);
  assert.deepEqual(tree.messagesTo(talk, first.id, "", urlOf), [{ role: "user", content: [part] }]);
  first.content = "what?";
  assert.deepEqual(tree.messagesTo(talk, first.id, "", urlOf)[0].content, [part, { type: "text", text: "what?" }]);
  assert.throws(() => tree.messagesTo(talk, first.id, ""), /a\.png is not kept any more/);
  assert.deepEqual(pictures.idsOf(talk), ["p1"]);
});

test("pictures of files that were exported", () => {
  const talk = tree.newConversation("chat", {});
  tree.add(talk, null, { role: "user", content: "x", images: [IMAGE, { id: "../x" }, { id: "p2" }] });
  const file = tree.exported([talk], [["p1", URL_OF_IMAGE]]);
  const [read] = tree.imported(file), [id] = read.roots;
  assert.deepEqual(read.nodes[id].images, [IMAGE, { id: "p2", name: "picture", width: 1, height: 1 }]);
  assert.deepEqual(tree.importedPictures(file), [["p1", URL_OF_IMAGE]]);
  for (const url of ["https://a.org/x.png", "data:image/svg+xml;base64,AAAA", "data:text/html,x", "javascript:1", 5]) {
    assert.deepEqual(tree.importedPictures(tree.exported([], [["p1", url]])), [], String(url));
  }
  assert.deepEqual(tree.importedPictures('{"pictures": null}'), []);
});

test("pictures that other conversations have stay", async () => {
  const gone = [], kept = { putPicture: async () => {}, deletePicture: async id => gone.push(id), pictures: async ids => ids.map(id => [id, URL_OF_IMAGE]) };
  const all = new pictures.Pictures(kept), one = tree.newConversation("chat", {}), two = tree.newConversation("chat", {});
  tree.add(one, null, { role: "user", content: "", images: [IMAGE, { ...IMAGE, id: "p2" }] });
  tree.add(two, null, { role: "user", content: "", images: [IMAGE] });
  await all.load(one);
  assert.equal(all.get("p2"), URL_OF_IMAGE);
  all.drop(one, [two]);
  assert.deepEqual(gone, ["p2"]);
  assert.deepEqual([all.get("p1"), all.get("p2")], [URL_OF_IMAGE, undefined]);
  const full = new pictures.Pictures({ putPicture: async () => { throw new Error("full"); } });
  await assert.rejects(full.put({ id: "p3", url: URL_OF_IMAGE }), /full/);
  assert.equal(full.get("p3"), URL_OF_IMAGE);
});
