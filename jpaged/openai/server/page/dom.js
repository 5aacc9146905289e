// Makes elements. Whatever comes from a person or a model becomes a text node, never markup.

const SVG = "http://www.w3.org/2000/svg";

// h("button", { class: "soft", onclick: send }, "Send"): names that begin with "on" are listeners,
// true sets an attribute without a value, and false, null and undefined leave it out.
export function h(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

// The paths of the icons, on a square of 16.
const ICONS = {
  plus: "M8 3v10M3 8h10",
  menu: "M2 4h12M2 8h12M2 12h12",
  sliders: "M2 4h7M12 4h2M2 8h2M7 8h7M2 12h6M11 12h3M9 2.5v3M4.5 6.5v3M8.5 10.5v3",
  copy: "M5.5 5.5h8v8h-8zM3.5 10.5h-1v-8h8v1",
  edit: "M10.5 3l2.5 2.5L6 12.5l-3 .5.5-3z",
  again: "M13 8a5 5 0 1 1-1.6-3.7M13 2v3h-3",
  more: "M4 8h9M9.5 4.5L13 8l-3.5 3.5",
  left: "M10 3L5 8l5 5",
  right: "M6 3l5 5-5 5",
  close: "M4 4l8 8M12 4l-8 8",
  picture: "M2.5 3h11v10h-11zM2.5 11l3.5-3.5 3 3 2-2 2.5 2.5M10.5 5.5v.5",
  trash: "M3 4.5h10M6 4.5V3h4v1.5M4.5 4.5l.5 9h6l.5-9",
  tokens: "M2 4h4v3H2zM8 4h6v3H8zM2 9.5h6v3H2zM10 9.5h4v3h-4z",
  columns: "M2.5 3h4.5v10H2.5zM9 3h4.5v10H9z",
  chart: "M2 13.5h12M3.5 11V7M7 11V3M10.5 11V8.5M13.5 11V5",
  send: "M8 13V3M4 7l4-4 4 4",
  stop: "M4 4h8v8H4z",
  theme: "M8 2a6 6 0 1 0 0 12zM8 2a6 6 0 0 1 0 12",
  down: "M8 3v8M4.5 7.5L8 11l3.5-3.5M3 13.5h10",
  up: "M8 11V3M4.5 6.5L8 3l3.5 3.5M3 13.5h10",
};

export function icon(name) {
  const path = svg("path", { d: ICONS[name] });
  return svg("svg", { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" }, path);
}

// A button that shows an icon; its label is what a screen reader says and a pointer finds.
export function iconButton(name, label, onclick, more = {}) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...more }, icon(name));
}

// Copy a text, and say so on the button for a moment.
export async function copy(text, button) {
  const label = button.getAttribute("aria-label") ?? button.textContent;
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    said = copied(text) ? "Copied" : "This browser does not let the page copy";
  }
  button.classList.add("done");
  button.setAttribute("aria-label", said);
  button.title = said;
  setTimeout(() => {
    button.classList.remove("done");
    button.setAttribute("aria-label", label);
    button.title = label;
  }, 1500);
}

// Copy by a selection: browsers have navigator.clipboard only over HTTPS and on this machine.
function copied(text) {
  const field = h("textarea", { class: "unseen", "aria-hidden": "true", tabindex: "-1" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

// Offer a text as a file.
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export const whole = number => Math.round(number).toLocaleString("en");
export const short = number => (number && number < 10 ? number.toFixed(1) : whole(number));

// Seconds as a person reads them.
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds === 0) return "0";
  if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.0995 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}
