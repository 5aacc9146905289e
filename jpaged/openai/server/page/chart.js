// Charts over time, as SVG: axes with round numbers, lines with a legend, and values under the pointer.

import { h, svg } from "./dom.js";

const HEIGHT = 170, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 22;

// Return about `count` round numbers from 0 to at least `most`.
export function ticks(most, count = 4) {
  if (!(most > 0)) return [0, 1];
  const rough = most / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(n => n * power).find(n => n >= rough * 0.999);
  const found = [];
  for (let i = 0; ; i++) {
    found.push(Number((i * step).toPrecision(12)));
    if (i * step >= most * 0.999) return found;
  }
}

export class Chart {
  // title: of the chart; series: [{ name, of(sample), dashed }]; format: of a value; most: the least top
  // of the axis.
  constructor(title, series, format, most = 0) {
    Object.assign(this, { series, format, most });
    this.id = `chart-${title.toLowerCase().replaceAll(/\W+/g, "-")}`;
    this.legend = h("div", { class: "legend" });
    this.svg = svg("svg", { class: "chart", role: "img", "aria-labelledby": this.id, height: HEIGHT, onpointermove: event => this.#point(event), onpointerleave: () => this.#point(null) });
    this.element = h("section", { class: "card", "aria-labelledby": this.id }, h("div", { class: "chart-head" }, h("h3", { id: this.id }, title), this.legend), this.svg);
    this.samples = [];
    this.pointed = null;
  }

  // Draw samples, each with `at` in seconds, of the last `window` seconds up to `now`.
  draw(samples, now, window) {
    Object.assign(this, { samples, now, window });
    const width = this.svg.clientWidth || 480, right = width - RIGHT, bottom = HEIGHT - BOTTOM;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const values = samples.flatMap(sample => this.series.map(one => one.of(sample))).filter(Number.isFinite);
    const marks = ticks(Math.max(this.most, ...values, 0)), top = marks.at(-1);
    const x = at => LEFT + (right - LEFT) * (1 - (now - at) / window), y = value => bottom - (bottom - TOP) * (value / top);
    Object.assign(this, { x, left: LEFT, right });
    const parts = [];
    for (const mark of marks) {
      parts.push(svg("line", { class: "gridline", x1: LEFT, x2: right, y1: y(mark), y2: y(mark) }));
      parts.push(svg("text", { class: "tick", x: LEFT - 6, y: y(mark) + 4, "text-anchor": "end" }, this.format(mark)));
    }
    const count = Math.max(2, Math.min(5, Math.floor((right - LEFT) / 90)));
    for (let i = 0; i <= count; i++) {
      const at = now - window + (i * window) / count, anchor = i === 0 ? "start" : i === count ? "end" : "middle";
      parts.push(svg("text", { class: "tick", x: x(at), y: HEIGHT - 6, "text-anchor": anchor }, clock(at)));
      parts.push(svg("line", { class: "gridline", x1: x(at), x2: x(at), y1: bottom, y2: bottom + 4 }));
    }
    this.series.forEach((one, i) => {
      let d = "", isOpen = false;
      for (const sample of samples) {
        const value = one.of(sample);
        if (!Number.isFinite(value)) isOpen = false;
        else {
          d += `${isOpen ? "L" : "M"}${x(sample.at).toFixed(1)} ${y(value).toFixed(1)}`;
          isOpen = true;
        }
      }
      parts.push(svg("path", { class: `line line-${i}`, d: d || "M0 0" }));
    });
    this.svg.replaceChildren(...parts);
    this.#tell();
  }

  #point(event) {
    if (event === null) this.pointed = null;
    else {
      const box = this.svg.getBoundingClientRect();
      const at = this.now - this.window * (1 - (event.clientX - box.left - this.left) / (this.right - this.left));
      this.pointed = this.samples.reduce((best, sample) => (best && Math.abs(best.at - at) < Math.abs(sample.at - at) ? best : sample), null);
    }
    this.#tell();
  }

  // Write the values at the pointer, or the last ones, into the legend.
  #tell() {
    const sample = this.pointed ?? this.samples.at(-1);
    this.svg.querySelector(".cursor")?.remove();
    if (this.pointed) this.svg.append(svg("line", { class: "cursor", x1: this.x(sample.at), x2: this.x(sample.at), y1: TOP, y2: HEIGHT - BOTTOM }));
    const told = this.series.map((one, i) => {
      const value = sample ? one.of(sample) : NaN;
      return h("span", { class: `key line-${i}` }, `${one.name} `, h("b", {}, Number.isFinite(value) ? this.format(value) : "–"));
    });
    this.legend.replaceChildren(...told, this.pointed ? h("span", { class: "soft" }, clock(sample.at)) : "");
  }
}

function clock(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString("en-GB");
}
