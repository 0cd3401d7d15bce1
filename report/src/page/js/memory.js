// What is alive at the peak, as a treemap: area is bytes.

/** Rectangles of amounts in a rectangle, as near to squares as their order allows (Bruls et al., 2000). */
function squares(items, x, y, w, t, put) {
  const sum = items.reduce((n, i) => n + i.bytes, 0);
  if (!sum || w <= 0 || t <= 0) return;
  const scale = (w * t) / sum;
  let at = 0;
  while (at < items.length) {
    const short = Math.min(w, t);
    let end = at, area = 0, worst = Infinity;
    while (end < items.length) {
      const next = area + items[end].bytes * scale, thick = next / short;
      const ratio = Math.max(...[items[at], items[end]].map((i) => { const l = (i.bytes * scale) / thick; return Math.max(l / thick, thick / l); }));
      if (ratio > worst) break;
      worst = ratio;
      area = next;
      end++;
    }
    if (end === at) end = at + 1, area = items[at].bytes * scale;
    const thick = area / short;
    let along = 0;
    for (let i = at; i < end; i++) {
      const length = area ? (items[i].bytes * scale) / thick : 0;
      if (w >= t) put(items[i], x, y + along, thick, length);
      else put(items[i], x + along, y, length, thick);
      along += length;
    }
    if (w >= t) { x += thick; w -= thick; } else { y += thick; t -= thick; }
    at = end;
  }
}
/** A name that fits with its count: without its first parts, or the last one without its middle. */
function label(g, name, times, room) {
  const fits = (text) => g.measureText(text + times).width <= room, parts = name.split(".");
  for (let k = 0; k < parts.length; k++) if (fits(parts.slice(k).join("."))) return parts.slice(k).join(".") + times;
  const last = parts[parts.length - 1];
  for (let n = last.length - 1; n >= 5; n--) {
    const text = last.slice(0, Math.ceil(n / 2)) + "…" + last.slice(last.length - Math.floor(n / 2));
    if (fits(text)) return text + times;
  }
  return "";
}
function treemap() {
  let boxes = [], hover = null;
  const table = h("table", {}), aside = h("div", { class: "hidden" }, table);
  const legend = h("ul", { class: "legend" });
  const canvas = picture(360, (g, width, tall) => {
    const c = D.classes[state.rank], kinds = KINDS.map(([k, name, colour]) => ({ kind: k, name, colour, bytes: c.at_peak[k] || 0 })).filter((k) => k.bytes > 0);
    boxes = [];
    kinds.sort((a, b) => b.bytes - a.bytes);
    squares(kinds, 0, 0, width, tall, (k, x, y, w, t) => {
      const head = w > 54 && t > 34 ? 17 : 0;
      g.fillStyle = fillOn(g, k.colour);
      g.fillRect(x, y, Math.max(0, w - 2), Math.max(0, t - 2));
      const light = onDark(css(k.colour));
      if (head) {
        g.fillStyle = light;
        g.font = "600 12px " + getComputedStyle(document.body).fontFamily;
        const names = [`${k.name} ${sized(k.bytes)}`, k.name, k.name.split(" ")[0]];
        g.fillText(names.find((n) => g.measureText(n).width <= w - 10) || clipped(g, k.name, w - 10), x + 5, y + 9);
        g.font = "12px " + getComputedStyle(document.body).fontFamily;
      }
      const own = c.tensors.filter((x) => x.kind === k.kind && x.bytes > 0).sort((a, b) => b.bytes - a.bytes);
      squares(own, x + 2, y + head, w - 6, t - head - 4, (tensor, bx, by, bw, bt) => {
        boxes.push([tensor, k, bx, by, bw, bt]);
        if (k.kind === "gaps") return;
        g.fillStyle = pale(css(k.colour), hover === tensor ? 0.45 : 0.12);
        g.fillRect(bx + 0.5, by + 0.5, Math.max(0, bw - 1), Math.max(0, bt - 1));
        if (bw < 54 || bt < 15) return;
        g.fillStyle = light;
        const name = short(tensor.name).replace(k.kind === "grads" ? / gradient$/ : "", ""), times = tensor.count > 1 ? ` × ${tensor.count}` : "";
        const words = label(g, name, times, bw - 8);
        g.fillText(words, bx + 4, by + 9);
        if (words && bt >= 32 && g.measureText(sized(tensor.bytes)).width <= bw - 8) g.fillText(sized(tensor.bytes), bx + 4, by + 24);
      });
    });
    legend.replaceChildren(...kinds.map((k) => h("li", { "data-tip": exact(k.bytes) }, swatch(k.colour), `${k.name} `, h("b", {}, sized(k.bytes)), ` ${percent(k.bytes, c.peak_bytes)}`)));
    table.replaceChildren(h("caption", {}, "tensors alive at the peak"), ...c.tensors.map((t) => h("tr", {}, h("td", {}, t.kind), h("td", {}, t.name), h("td", {}, String(t.count)), h("td", {}, exact(t.bytes)))));
  }, "treemap of memory at the peak; a hidden table has the same data");
  canvas.addEventListener("mousemove", (e) => {
    const found = boxes.find(([, , x, y, w, t]) => e.offsetX >= x && e.offsetX < x + w && e.offsetY >= y && e.offsetY < y + t);
    const before = hover;
    hover = found ? found[0] : null;
    if (hover !== before) canvas.paint();
    if (!found) { say(""); return; }
    const [t, k] = found, peak = D.classes[state.rank].peak_bytes;
    say(`${t.name}\n${k.name}${t.type ? ", " + t.type : ""}\n${sized(t.bytes)} = ${exact(t.bytes)}${t.count > 1 ? `, ${count(t.count)} of ${sized(t.bytes / t.count)}` : ""}, ${percent(t.bytes, peak)} of the peak`, e.clientX, e.clientY);
  });
  canvas.addEventListener("mouseleave", () => { hover = null; say(""); canvas.paint(); });
  section("memory", "Memory at the peak", "Area is bytes on one rank. Corresponding tensors of all layers and microbatches share one box.",
    h("div", { class: "row" }, rankChoice()), legend, h("div", { class: "panel", style: "padding:4px" }, canvas), aside);
}
/** Ink that is read on a colour. */
function onDark(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => { const c = parseInt(colour.slice(i, i + 2), 16) / 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#14181d" : "#ffffff";
}
