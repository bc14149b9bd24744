// Small helpers: elements made from text (never from HTML), numbers, colors, and characters that cannot be seen.
let DATA, RUNS;

function takeData(text) {
  DATA = JSON.parse(text);
  RUNS = DATA.runs;
}

takeData(document.getElementById("data").textContent);
const MANY = RUNS.length > 1; // a page that follows runs follows the same ones

const $ = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// el("p", {class: "hint"}, "text", otherElement)
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const alpha = (name, part) => css(name) + Math.round(part * 255).toString(16).padStart(2, "0");

// What Python's `visible_text` makes visible, too: control characters, direction marks, lone surrogates.
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\uffff]|\p{Cs}/gu;
const codeOf = (character) => "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
const plain = (text) => text.replace(UNSEEN, (character) => "⟨" + codeOf(character) + "⟩");

function visibleNodes(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(UNSEEN)) {
    if (match.index > at) nodes.push(text.slice(at, match.index));
    nodes.push(el("span", { class: "unseen", title: "a character that cannot be seen" }, codeOf(match[0])));
    at = match.index + match[0].length;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

function number(value, share) {
  if (value === null || value === undefined) return "–";
  if (share) return (100 * value).toFixed(1) + "%";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return value.toFixed(0);
  return String(size >= 100 ? Number(value.toFixed(1)) : Number(value.toPrecision(3)));
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const signed = (value) => (value > 0 ? "+" : "") + number(value).replace("-", "−");
const runColor = (position) => "--r" + (position % 6);

// Runs `redraw`, which replaces elements, without moving the page or taking the focus away.
function undisturbed(redraw) {
  const held = document.activeElement?.dataset?.key, top = scrollY;
  redraw();
  scrollTo({ top, behavior: "instant" });
  if (held && document.activeElement?.dataset?.key !== held) document.querySelector(`[data-key="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
}

// What the reader chose, kept in the link behind the "#": whoever opens the link sees the same.
const DEFAULTS = {
  x: "steps", // steps, tokens or time
  y: "linear", // or log
  smooth: "3", // percent of a curve's points
  hide: "", // positions of runs, with commas
  run: "", // of completions: filters, order, and the one that is shown
  answers: "",
  groups: "",
  source: "",
  from: "",
  to: "",
  search: "",
  sort: "newest",
  shown: "",
};
let state = { ...DEFAULTS };

function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  state = Object.fromEntries(Object.entries(DEFAULTS).map(([name, usual]) => [name, given.get(name) ?? usual]));
  if (!AXES[state.x]) state.x = DEFAULTS.x;
  if (!(state.smooth >= 0 && state.smooth <= 20)) state.smooth = DEFAULTS.smooth;
}

function setState(changes) {
  Object.assign(state, changes);
  const kept = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  const link = kept.map(([name, value]) => name + "=" + encodeURIComponent(value).replaceAll("%2C", ",")).join("&");
  history.replaceState(null, "", "#" + link);
}

const isHidden = (position) => MANY && state.hide.split(",").includes(String(position));

function toggleRun(position) {
  const hidden = RUNS.map((_, i) => i).filter((i) => isHidden(i) !== (i === position));
  setState({ hide: hidden.join(",") });
}
