"use strict";
// Unpacking, words for numbers, elements, theme and keys. Texts of the plan are set as text, never as markup.

/** Data of the plan, as its schema has it, and what the reader chose. */
let D;
const state = { rank: 0, limit: null, group: "memory", view: null };
const watchers = [];
/** Draws again what depends on the choice. */
const changed = () => watchers.forEach((f) => f());

const KINDS = [
  ["weights", "weights", "weights"],
  ["optimizer", "optimizer", "optimizer"],
  ["grads", "gradients", "gradients"],
  ["collective_buffer", "collective buffers", "buffers"],
  ["activation", "activations", "activations"],
  ["temporary", "temporaries", "temporaries"],
  ["input", "inputs", "inputs"],
  ["gaps", "gaps between tensors", "hatch"],
];
const ACTIONS = { F: ["forward", "f"], B: ["backward", "i"], I: ["backward, input", "i"], W: ["backward, weight", "w"] };

/** The bytes of a packed block. */
async function unpack(id) {
  const raw = Uint8Array.from(atob(document.getElementById(id).textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).text();
}

/** An element; attributes that begin with `on` are listeners. */
function h(tag, attributes, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes || {})) {
    if (v === null || v === undefined || v === false) continue;
    if (k.startsWith("on")) e.addEventListener(k.slice(2), v);
    else if (k === "style") e.style.cssText = v;
    else e.setAttribute(k, v === true ? "" : v);
  }
  e.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return e;
}
function s(tag, attributes, ...children) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [k, v] of Object.entries(attributes || {})) e.setAttribute(k, v);
  e.append(...children);
  return e;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
/** The colour of an axis, or of several. */
function family(axis) {
  if (axis.includes("+")) return "several";
  const known = ["tp", "dp", "pp", "cp"].find((n) => axis.startsWith(n));
  return known || (/^e(tp|p|dp)/.test(axis) ? "ep" : "several");
}
const badge = (axis, size) => h("span", { class: "axis", style: `color:var(--${family(axis)})` }, size === undefined ? axis : `${axis} ${size}`);

/** What all names of layers begin with, as `model.layers.*.`, and its first part. */
function prefixes() {
  const of = (name) => name.slice(0, name.indexOf(".*.") + 3);
  const names = D.classes.flatMap((c) => [...(c.weights || []), ...c.tensors].map((t) => t.name)).filter((n) => /^[^%]*\.\*\./.test(n));
  const all = [...new Set(names.map(of))];
  let same = all[0] || "";
  while (same && !all.every((p) => p.startsWith(same))) same = same.replace(/[^.]*\.$/, "");
  return [same, same.replace(/\..*$/, ".")];
}
/** A name without what all others begin with. */
function short(name) {
  D.prefixes = D.prefixes || prefixes();
  const begin = D.prefixes.find((p) => p && name.startsWith(p)) || "";
  return name.slice(begin.length).replace(/\.weight\b/, "");
}

/** Thousands by thin space. */
function count(n) {
  return String(n).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
}
/** Three digits that count, with their unit. */
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let u = 0, x = n;
  while (x >= 1024 && u < units.length - 1) { x /= 1024; u++; }
  const text = u === 0 || x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2);
  return [text, units[u]];
}
const sized = (n) => bytes(n).join("\u202f");
const exact = (n) => `${count(n)} B`;
/** A time: whole numbers as such, others with four digits. */
function moment(x) {
  if (Math.abs(x - Math.round(x)) < 1e-9) return String(Math.round(x));
  return String(Number(x.toPrecision(4)));
}
const seconds = (t) => (t >= 1 ? `${t.toFixed(2)} s` : t >= 1e-3 ? `${(t * 1e3).toFixed(2)} ms` : `${(t * 1e6).toFixed(1)} µs`);
/** A moment of the timeline with its unit, if it has one. */
function stamp(x) {
  if (!D.time) return moment(x);
  const [scale, unit] = Math.abs(x) >= 1000 ? [1e-3, "s"] : Math.abs(x) >= 1 || !x ? [1, "ms"] : [1e3, "µs"];
  return `${Number((x * scale).toPrecision(5))} ${unit}`;
}
const percent = (part, whole) => `${whole ? ((100 * part) / whole).toFixed(part / whole < 0.0995 ? 1 : 0) : 0}\u202f%`;

/** Attributes of an element that has a colour, `rest` its own style: what is idle or a gap is hatched. */
const coloured = (name, colour, rest = "") => ({ class: colour === "hatch" ? (name + " hatch").trim() : name || null, style: colour === "hatch" ? rest : `${rest};background:var(--${colour})` });
/** A bar of parts: colour, amount, words. */
function bar(parts, whole) {
  return h("div", { class: "bar", role: "img", "aria-label": parts.map((p) => `${p[2]} ${percent(p[1], whole)}`).join(", ") },
    parts.filter((p) => p[1] > 0).map((p) => h("i", { ...coloured("", p[0], `width:${(100 * p[1]) / whole}%`), "data-tip": p[3] || p[2] })));
}
const swatch = (colour) => h("span", coloured("swatch", colour));
/** A part of a whole as a length; nothing has none. */
const meter = (n, whole, colour) => (n > 0 && whole > 0 ? h("div", coloured("meter", colour, `width:${(100 * n) / whole}%`)) : null);

const SHORT = { mesh: "Mesh", time: "Timeline", memory: "Memory", weights: "Weights", cost: "Time", compare: "Compare" };
/** A section with its heading, in the order in which it is made. */
function section(id, title, words, ...children) {
  const e = h("section", { id, "aria-labelledby": id + "-title" },
    h("header", {}, h("h2", { id: id + "-title" }, title), words ? h("p", {}, words) : null), ...children);
  document.getElementById("page").append(e);
  const n = document.getElementById("links").children.length + 1;
  document.getElementById("links").append(h("li", {}, h("a", { href: "#" + id, "data-key": n }, SHORT[id] || title)));
  return e;
}

/** A choice of pipeline rank that all sections share. */
function rankChoice() {
  const name = (c) => `pp ${c.class} · layers ${c.layers.join(", ")}`;
  const e = h("select", { "aria-label": "pipeline rank", onchange: () => { state.rank = Number(e.value); changed(); } },
    D.classes.map((c) => h("option", { value: c.class }, name(c))));
  watchers.push(() => { e.value = state.rank; });
  return D.classes.length > 1 ? h("label", {}, "Pipeline rank ", e) : null;
}
/** A limit of memory, by the device that has it. */
const limitName = (n) => sized(n) + (D.time && n === D.time.memory ? ` (${D.time.device})` : "");
/** A choice of the limit of memory. */
function limitChoice() {
  const own = [D.facts.limit, D.time && D.time.memory].filter(Boolean);
  const all = [...new Set([24, 40, 48, 80, 96, 141, 192].map((n) => n * 2 ** 30).concat(own))].sort((a, b) => a - b);
  const e = h("select", { "aria-label": "limit of memory", onchange: () => { state.limit = Number(e.value) || null; changed(); } },
    h("option", { value: "" }, "none"), all.map((n) => h("option", { value: n }, limitName(n))));
  watchers.push(() => { e.value = state.limit || ""; });
  return h("label", {}, "Limit ", e);
}

/** A canvas as wide as its place, drawn when that or a choice changes. */
function picture(height, draw, label) {
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": label });
  const paint = () => {
    const width = canvas.parentElement ? canvas.parentElement.clientWidth : 0;
    const style = canvas.parentElement ? getComputedStyle(canvas.parentElement) : null;
    const inner = width - (style ? parseFloat(style.paddingLeft) + parseFloat(style.paddingRight) : 0);
    if (inner <= 0) return;
    const tall = typeof height === "function" ? height(inner) : height;
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = tall + "px";
    canvas.width = Math.round(inner * ratio);
    canvas.height = Math.round(tall * ratio);
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, inner, tall);
    g.font = "12px " + getComputedStyle(document.body).fontFamily;
    g.textBaseline = "middle";
    draw(g, inner, tall);
  };
  canvas.paint = paint;
  watchers.push(paint);
  new ResizeObserver(paint).observe(canvas);
  return canvas;
}
/** A text no wider than its room. */
function clipped(g, text, room) {
  if (g.measureText(text).width <= room) return text;
  let n = text.length;
  while (n > 1 && g.measureText(text.slice(0, n) + "…").width > room) n--;
  return n > 1 ? text.slice(0, n) + "…" : "";
}

/** The fill of a colour on a canvas. */
const fillOn = (g, colour) => (colour === "hatch" ? hatch(g) : css(colour));

const tip = document.getElementById("tip");
/** Shows words near a point; none hides them. */
function say(text, x, y) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = Math.max(4, y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
}
document.addEventListener("mouseover", (e) => {
  const own = e.target.closest && e.target.closest("[data-tip]");
  if (own) say(own.dataset.tip, e.clientX, e.clientY);
  else if (!(e.target instanceof HTMLCanvasElement)) say("");
});

const THEMES = ["system", "light", "dark"];
let theme = "system";
function setTheme(next) {
  theme = next;
  const dark = next === "dark" || (next === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").textContent = "Theme: " + next;
  hatches.clear();
  changed();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(theme));
addEventListener("beforeprint", () => { const before = theme; setTheme("light"); theme = before; });
addEventListener("afterprint", () => setTheme(theme));

const hatches = new Map();
/** The hatch of what is idle. */
function hatch(g) {
  const key = css("idle") + css("hatch");
  if (!hatches.has(key)) {
    const c = h("canvas", { width: 6, height: 6 }), k = c.getContext("2d");
    k.fillStyle = css("idle");
    k.fillRect(0, 0, 6, 6);
    k.strokeStyle = css("hatch");
    for (const d of [-6, 0, 6]) { k.beginPath(); k.moveTo(d - 1, 7); k.lineTo(d + 7, -1); k.stroke(); }
    hatches.set(key, c);
  }
  return g.createPattern(hatches.get(key), "repeat");
}
/** A colour mixed half with the panel: a later chunk of a rank. */
function pale(colour, part) {
  const rgb = (c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16));
  const [a, b] = [rgb(colour), rgb(css("panel"))];
  return `rgb(${a.map((x, i) => Math.round(x + (b[i] - x) * part)).join(",")})`;
}
