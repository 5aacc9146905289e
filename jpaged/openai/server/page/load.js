// The load of the server: charts over time, the requests that run now, and what serves them.

import { Chart } from "./chart.js";
import { duration, h, short, whole } from "./dom.js";
import { sample, sum } from "./metrics.js";

const KEPT_S = 900, QUANTILES_S = 60;
const WINDOWS = [[60, "1 min"], [300, "5 min"], [900, "15 min"]];
const percent = value => `${Math.round(100 * value)} %`;

export class Load {
  constructor() {
    this.readings = [];
    this.samples = [];
    this.window = 300;
    this.speeds = new Map();
    this.charts = [
      new Chart("Tokens a second", [{ name: "generated", of: s => s.decode }, { name: "of prompts", of: s => s.prefill }], short),
      new Chart("Completions", [{ name: "running", of: s => s.running }, { name: "waiting", of: s => s.waiting }], whole, 4),
      new Chart("Time to first token", [{ name: "p50", of: s => s.firstP50 }, { name: "p99", of: s => s.firstP99 }], duration),
      new Chart("Time between pieces", [{ name: "p50", of: s => s.betweenP50 }, { name: "p99", of: s => s.betweenP99 }], duration),
      new Chart("Time of a request", [{ name: "p50", of: s => s.wholeP50 }, { name: "p99", of: s => s.wholeP99 }], duration),
      new Chart("Engine and KV cache", [{ name: "device", of: s => s.device }, { name: "host", of: s => s.host }, { name: "KV blocks", of: s => s.blocks }], percent, 1),
    ];
    this.facts = h("dl", { class: "facts" });
    this.totals = h("dl", { class: "facts" });
    this.rows = h("tbody");
    this.none = h("p", { class: "soft" }, "Nothing runs.");
    const windows = WINDOWS.map(([seconds, label]) => h("button", { type: "button", "aria-pressed": String(seconds === this.window), onclick: event => this.#choose(seconds, event.currentTarget) }, label));
    this.windows = h("div", { class: "choices", role: "group", "aria-label": "Time shown" }, windows);
    const heads = ["Request", "Model", "Prompt", "Tokens", "Tokens/s", "Time"].map(text => h("th", { scope: "col" }, text));
    const table = h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Requests that run" }, h("table", { class: "requests" }, h("thead", {}, h("tr", {}, heads)), this.rows));
    this.element = h(
      "div",
      { class: "load" },
      h("div", { class: "load-head" }, h("h2", {}, "Load"), this.windows, h("p", { class: "soft" }, `p50 and p99 are of the last ${QUANTILES_S} s, from the buckets of /metrics.`)),
      h("div", { class: "charts" }, this.charts.map(chart => chart.element)),
      h("section", { class: "card", "aria-labelledby": "running-now" }, h("h3", { id: "running-now" }, "Running now"), this.none, table),
      h("div", { class: "two" }, h("section", { class: "card", "aria-labelledby": "this-server" }, h("h3", { id: "this-server" }, "This server"), this.facts), h("section", { class: "card", "aria-labelledby": "since-start" }, h("h3", { id: "since-start" }, "Since the start"), this.totals)),
    );
    this.table = table;
  }

  // Take a reading of /metrics and of /status.
  take(metrics, status) {
    const now = { at: Date.now() / 1000, metrics };
    const before = this.readings.at(-1);
    const past = this.readings.find(reading => reading.at >= now.at - QUANTILES_S) ?? now;
    this.readings = [...this.readings.filter(reading => reading.at >= now.at - QUANTILES_S), now];
    // A server that began again counts from zero.
    if (before && before.metrics.jpaged_start_time_seconds === metrics.jpaged_start_time_seconds) {
      this.samples = [...this.samples.filter(one => one.at >= now.at - KEPT_S), sample(now, before, past)];
    } else this.readings = [now];
    this.latest = { metrics, status, at: now.at };
    this.#measure(status.requests, now.at);
  }

  // Return the last sample, or undefined.
  get last() {
    return this.samples.at(-1);
  }

  // A request's speed is that of the last seconds, once there are two readings of it.
  #measure(requests, at) {
    const speeds = new Map();
    for (const request of requests) {
      const seen = [...(this.speeds.get(request.id)?.seen ?? []), { at, tokens: request.generated_tokens }].slice(-6);
      const first = seen[0], seconds = at - first.at;
      speeds.set(request.id, { seen, speed: seconds > 0.2 ? (request.generated_tokens - first.tokens) / seconds : request.tokens_per_second });
    }
    this.speeds = speeds;
  }

  #choose(seconds, button) {
    this.window = seconds;
    for (const other of this.windows.children) other.setAttribute("aria-pressed", String(other === button));
    this.draw();
  }

  draw() {
    if (!this.latest) return;
    const { metrics: m, status, at } = this.latest, shown = this.samples.filter(one => one.at >= at - this.window);
    for (const chart of this.charts) chart.draw(shown, at, this.window);
    this.none.hidden = status.requests.length > 0;
    this.table.hidden = !status.requests.length;
    this.rows.replaceChildren(
      ...status.requests.map(request => {
        const speed = this.speeds.get(request.id)?.speed ?? 0, many = request.completions > 1 ? ` × ${request.completions}` : "";
        const cells = [`${request.route.replace("/v1/", "")}${many}${request.stream ? "" : " (whole)"}`, request.model, whole(request.prompt_tokens), whole(request.generated_tokens), request.generated_tokens ? short(speed) : "waits", duration(request.seconds)];
        return h("tr", {}, cells.map(text => h("td", {}, text)));
      }),
    );
    const devices = status.devices > 1 ? `${status.devices} × ` : "";
    facts(this.facts, [
      ["Model", status.model],
      ["Adapters", status.adapters.length ? status.adapters.join(", ") : "none"],
      ["Context", `${whole(status.max_model_len)} tokens`],
      ["Rows", whole(status.max_num_seqs)],
      ["Device", `${devices}${status.device} (${status.platform})`],
      ["Computes in", [status.dtype, status.quantization && `weights ${status.quantization}`, status.kv_cache_dtype && `KV ${status.kv_cache_dtype}`].filter(Boolean).join(", ")],
      ["jpaged", `${status.version}, jax ${status.jax_version}`],
      ["Up", `${duration(status.uptime_s)}, since ${new Date(1000 * status.started_at).toLocaleString("en-GB")}`],
    ]);
    facts(this.totals, [
      ["Requests answered", whole(sum(m, 'jpaged_http_requests_total{path="/v1/'))],
      ["Errors", whole(sum(m, "jpaged_http_errors_total"))],
      ["Refused, too many waited", whole(m.jpaged_http_rejected_total)],
      ["Completions", whole(sum(m, "jpaged_completions_total"))],
      ["Prompt tokens", whole(m.jpaged_prompt_tokens_total)],
      ["of them in the cache", whole(m.jpaged_cached_prompt_tokens_total)],
      ["Generated tokens", whole(m.jpaged_generated_tokens_total)],
      ["Preemptions", whole(m.jpaged_preemptions_total)],
    ]);
  }
}

function facts(list, pairs) {
  list.replaceChildren(...pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}
