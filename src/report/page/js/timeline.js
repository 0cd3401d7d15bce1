// Timeline: actions of all pipeline ranks, the memory of one under the same axis, what is alive there.

const LEFT = 62, RIGHT = 118;
function timeline() {
  const T = D.timeline, measured = D.measured;
  const chunks = T.ranks.map((_, r) => T.owner.map((o, i) => [o, i]).filter((x) => x[0] === r).map((x) => x[1]));
  const many = Math.max(...chunks.map((c) => c.length)) > 1;
  let cross = null, hover = null;
  const p = T.ranks.length, rows = measured ? 2 : 1;
  const tall = p <= 8 ? 30 : p <= 16 ? 21 : Math.max(9, 340 / p);
  // What was measured has a clock of its own, unless both are milliseconds.
  const last = measured ? Math.max(...measured.ranks.flatMap((r) => r.end), 1e-9) : 1;
  const scale = measured && !D.time ? T.makespan / last : 1;
  const whole = [T.begin, Math.max(T.end, measured ? last * scale : 0)];
  state.view = [...whole];
  const x = (time, width) => LEFT + ((time - state.view[0]) / (state.view[1] - state.view[0])) * (width - LEFT - RIGHT);
  const time = (px, width) => state.view[0] + ((px - LEFT) / (width - LEFT - RIGHT)) * (state.view[1] - state.view[0]);
  const top = 52, height = top + p * rows * (tall + 3) + 6;

  /** The first action of a row that ends after a time. */
  const from = (a, t) => {
    let lo = 0, hi = a.end.length;
    while (lo < hi) { const mid = (lo + hi) >> 1; if (a.end[mid] <= t) lo = mid + 1; else hi = mid; }
    return lo;
  };
  const fillOf = (kind, chunk, of) => (chunk ? pale(css(ACTIONS[kind][1]), 0.5 * (chunk / Math.max(1, of - 1))) : css(ACTIONS[kind][1]));
  const fills = (r) => {
    const of = chunks[r].length, out = {};
    for (const k of "FBIW") out[k] = chunks[r].map((_, c) => fillOf(k, c, of));
    return out;
  };
  function lane(g, a, r, y, tall, width, factor) {
    const colours = fills(r), room = { left: LEFT, right: width - RIGHT };
    for (let i = from(a, state.view[0] / factor); i < a.end.length && a.start[i] * factor < state.view[1]; i++) {
      const x0 = Math.max(room.left, x(a.start[i] * factor, width)), x1 = Math.min(room.right, x(a.end[i] * factor, width));
      const w = x1 - x0, gap = w < 2.4 ? 0 : w < 5 ? 0.5 : 1, kind = a.kinds[i], chunk = Math.max(0, chunks[r].indexOf(a.stages[i]));
      g.fillStyle = colours[kind][chunk];
      g.fillRect(x0, y, Math.max(w - gap, 0.25), tall);
      if (kind === "B" && tall >= 7) {
        g.fillStyle = colours.W[chunk];
        g.fillRect(x0, y + tall * 0.7, Math.max(w - gap, 0.25), tall * 0.3);
      }
      if (w >= 15 && tall >= 13) {
        g.fillStyle = kind === "W" && !chunk ? "#fff" : "#1a1f26";
        g.textAlign = "center";
        const text = (w >= 34 ? kind : "") + a.microbatches[i];
        if (g.measureText(text).width <= w - 2) g.fillText(text, (x0 + x1) / 2, y + (kind === "B" ? tall * 0.36 : tall / 2));
        g.textAlign = "left";
      }
    }
  }
  function edges(g, r, y, width) {
    g.fillStyle = css("edge");
    for (const [a, b] of [T.ranks[r].enter, T.ranks[r].finish]) {
      const x0 = Math.max(LEFT, x(a, width)), x1 = Math.min(width - RIGHT, x(b, width));
      if (b > a && x1 > x0) g.fillRect(x0, y, x1 - x0, tall);
    }
  }
  const rowY = (r) => top + r * rows * (tall + 3);
  function ticks(g, width, y, bottom) {
    const span = state.view[1] - state.view[0], least = (span * 70) / (width - LEFT - RIGHT), ten = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((n) => n * ten).find((n) => n >= least * 0.999) || ten;
    g.fillStyle = css("muted");
    g.strokeStyle = css("line");
    g.lineWidth = 1;
    for (let t = Math.ceil(state.view[0] / step) * step; t <= state.view[1] + 1e-9; t += step) {
      const at = x(t, width);
      g.textAlign = "center";
      const text = moment(Math.abs(t) < step / 1e6 ? 0 : t);
      g.fillText(text, Math.min(at, width - RIGHT - g.measureText(text).width / 2), y);
      g.textAlign = "left";
      if (bottom) { g.beginPath(); g.moveTo(at, y + 8); g.lineTo(at, bottom); g.stroke(); }
    }
  }
  function strip(g, width) {
    const view = state.view, h = Math.max(1, 22 / p);
    state.view = whole;
    g.fillStyle = css("idle");
    g.fillRect(LEFT, 6, width - LEFT - RIGHT, 22);
    for (let r = 0; r < p; r++) lane(g, T.ranks[r].actions, r, 6 + r * (22 / p), h, width, 1);
    const [a, b] = view.map((t) => x(t, width));
    state.view = view;
    g.strokeStyle = css("ink");
    g.lineWidth = 1.5;
    g.strokeRect(a, 5, b - a, 24);
    g.fillStyle = css("muted");
    g.fillText("step", 4, 17);
  }
  /** The actions of one microbatch in the order of the model, forward and then backward. */
  function path(m) {
    const out = [];
    T.ranks.forEach((rank, r) => rank.actions.microbatches.forEach((b, i) => {
      if (b === m && rank.actions.kinds[i] !== "W") out.push([r, i]);
    }));
    const key = ([r, i]) => { const a = T.ranks[r].actions; return a.kinds[i] === "F" ? a.stages[i] : 2 * T.owner.length - a.stages[i]; };
    return out.sort((a, b) => key(a) - key(b));
  }
  function marks(g, width) {
    if (!hover) return;
    const m = T.ranks[hover[0]].actions.microbatches[hover[1]], all = path(m);
    g.save();
    g.beginPath();
    g.rect(LEFT, top - 2, width - LEFT - RIGHT, height - top + 2);
    g.clip();
    g.lineWidth = 1.5;
    g.strokeStyle = css("ink");
    T.ranks.forEach((rank, r) => rank.actions.microbatches.forEach((b, i) => {
      if (b !== m) return;
      const a = rank.actions;
      g.strokeRect(x(a.start[i], width), rowY(r), x(a.end[i], width) - x(a.start[i], width), tall);
    }));
    g.strokeStyle = css("over");
    for (let k = 1; k < all.length; k++) {
      const [r0, i0] = all[k - 1], [r1, i1] = all[k];
      if (r0 === r1) continue;
      g.beginPath();
      g.moveTo(x(T.ranks[r0].actions.end[i0], width), rowY(r0) + tall / 2);
      g.lineTo(x(T.ranks[r1].actions.start[i1], width), rowY(r1) + tall / 2);
      g.stroke();
    }
    g.restore();
  }
  function draw(g, width) {
    strip(g, width);
    ticks(g, width, 42, height - 4);
    for (let r = 0; r < p; r++) {
      const y = rowY(r), c = D.classes[r];
      if (r === state.rank && p > 1) { g.fillStyle = css("idle"); g.fillRect(0, y - 1.5, width, rows * (tall + 3)); }
      g.fillStyle = hatch(g);
      g.fillRect(LEFT, y, width - LEFT - RIGHT, tall);
      edges(g, r, y, width);
      lane(g, T.ranks[r].actions, r, y, tall, width, 1);
      g.fillStyle = css("ink");
      g.font = (r === state.rank ? "600 " : "") + "12px " + getComputedStyle(document.body).fontFamily;
      g.fillText(`pp ${r}`, 4, y + tall / 2);
      g.font = "12px " + getComputedStyle(document.body).fontFamily;
      if (measured) {
        g.fillStyle = css("muted");
        g.fillText("as run", 14, y + tall + 3 + tall / 2);
        lane(g, measured.ranks[r], r, y + tall + 3, tall, width, scale);
      }
      peaks(g, c, y, width);
    }
    g.fillStyle = css("muted");
    g.fillText(state.limit ? "peak, limit" : "peak", width - RIGHT + 8, 42);
    marks(g, width);
    line(g, width, height);
  }
  function peaks(g, c, y, width) {
    const most = Math.max(...D.classes.map((k) => k.peak_bytes), state.limit || 0, 1), x0 = width - RIGHT + 8, w = 46;
    const over = state.limit && c.peak_bytes > state.limit;
    g.fillStyle = css("idle");
    g.fillRect(x0, y + tall / 2 - 4, w, 8);
    g.fillStyle = css(over ? "over" : "muted");
    g.fillRect(x0, y + tall / 2 - 4, (w * c.peak_bytes) / most, 8);
    if (state.limit) { g.fillStyle = css("ink"); g.fillRect(x0 + (w * state.limit) / most - 1, y + tall / 2 - 6, 1.5, 12); }
    g.fillStyle = css(over ? "over" : "ink");
    if (tall >= 12 || c.class % 2 === 0) g.fillText(sized(c.peak_bytes), x0 + w + 5, y + tall / 2);
  }
  function line(g, width, bottom) {
    if (cross === null || cross < state.view[0] || cross > state.view[1]) return;
    g.strokeStyle = css("ink");
    g.lineWidth = 1;
    g.beginPath();
    g.moveTo(x(cross, width), 32);
    g.lineTo(x(cross, width), bottom);
    g.stroke();
  }
  const lanes = picture(height, draw, "timeline of all pipeline ranks: arrow keys move, plus and minus zoom, 0 shows the whole step");

  const memory = picture(210, (g, width) => drawMemory(g, width), "memory of the selected pipeline rank over time");
  function drawMemory(g, width) {
    const m = D.classes[state.rank].memory, peak = D.classes[state.rank].peak_bytes, bottom = 184, high = 150;
    const limit = state.limit && state.limit <= 2.4 * peak ? state.limit : null;
    const full = Math.max(peak, limit || 0, 1) * 1.08, yOf = (n) => bottom - (high * n) / full;
    const step = 2 ** Math.ceil(Math.log2(full / 4));
    g.fillStyle = css("ink");
    g.font = "600 12px " + getComputedStyle(document.body).fontFamily;
    g.fillText(p > 1 ? `Memory of a rank with pp ${state.rank}` : "Memory of a rank", LEFT, 10);
    g.font = "12px " + getComputedStyle(document.body).fontFamily;
    for (let n = 0; n <= full; n += step) {
      g.strokeStyle = css("line");
      g.beginPath(); g.moveTo(LEFT, yOf(n)); g.lineTo(width - RIGHT, yOf(n)); g.stroke();
      g.fillStyle = css("muted");
      g.textAlign = "right"; g.fillText(sized(n), LEFT - 6, yOf(n)); g.textAlign = "left";
    }
    const base = new Float64Array(m.t.length), lo = state.view[0], hi = state.view[1];
    g.save();
    g.beginPath(); g.rect(LEFT, 18, width - LEFT - RIGHT, bottom - 18); g.clip();
    for (const [kind, , colour] of KINDS) {
      const own = m.bytes[kind];
      if (own === undefined || own === 0) continue;
      g.fillStyle = css(colour);
      g.beginPath();
      const n = m.t.length, up = [];
      for (let i = 0; i < n; i++) {
        const under = base[i];
        base[i] += typeof own === "number" ? own : own[i];
        const x0 = x(m.t[i], width), x1 = i + 1 < n ? x(m.t[i + 1], width) : x(T.end, width);
        if (m.t[i] > hi || (i + 1 < n && m.t[i + 1] < lo)) continue;
        up.push([x0, Math.max(x1, x0 + 0.6), under, base[i]]);
      }
      if (!up.length) continue;
      g.moveTo(up[0][0], yOf(up[0][2]));
      for (const [a, b, , t] of up) { g.lineTo(a, yOf(t)); g.lineTo(b, yOf(t)); }
      for (const [a, b, u] of up.reverse()) { g.lineTo(b, yOf(u)); g.lineTo(a, yOf(u)); }
      g.fill();
    }
    g.restore();
    g.strokeStyle = css("ink");
    g.beginPath(); g.moveTo(LEFT, yOf(peak)); g.lineTo(width - RIGHT, yOf(peak)); g.stroke();
    g.fillStyle = css("ink");
    g.fillText("peak " + sized(peak), width - RIGHT + 8, yOf(peak));
    if (limit) {
      g.strokeStyle = css("over"); g.setLineDash([6, 3]);
      g.beginPath(); g.moveTo(LEFT, yOf(limit)); g.lineTo(width - RIGHT, yOf(limit)); g.stroke(); g.setLineDash([]);
      g.fillStyle = css("over");
      g.fillText("limit " + sized(limit), width - RIGHT + 8, yOf(limit) + (Math.abs(yOf(limit) - yOf(peak)) < 13 ? 13 : 0));
    } else if (state.limit) { g.fillStyle = css("muted"); g.fillText("↑ limit " + sized(state.limit), width - RIGHT + 8, 24); }
    ticks(g, width, bottom + 14, 0);
    line(g, width, bottom);
  }

  const panel = h("div", { class: "panel alive" });
  function alive() {
    const c = D.classes[state.rank], m = c.memory;
    let i = 0;
    if (cross !== null) { while (i + 1 < m.t.length && m.t[i + 1] <= cross) i++; }
    const at = (kind) => (cross === null ? c.at_peak[kind] || 0 : typeof m.bytes[kind] === "number" ? m.bytes[kind] : m.bytes[kind][i]);
    const all = KINDS.map(([k, name, colour]) => [k, name, colour, at(k)]).filter((k) => k[3] > 0), sum = all.reduce((n, k) => n + k[3], 0);
    const tensors = c.tensors.slice(0, 14);
    panel.replaceChildren(h("h3", {}, `${p > 1 ? `pp ${state.rank}, ` : ""}${cross === null ? "at the peak" : "at " + moment(cross)}: ${sized(sum)}`), bar(all.map((k) => [k[2], k[3], k[1]]), Math.max(1, sum)),
      h("table", {}, all.map((k) => h("tr", {}, h("td", {}, swatch(k[2]), k[1]), h("td", { "data-tip": exact(k[3]) }, sized(k[3]))))),
      h("h3", { style: "margin-top:10px" }, "Largest at the peak"),
      h("table", {}, tensors.map((t) => h("tr", {},
        h("td", { class: "mono", "data-tip": t.name }, swatch(KINDS.find((k) => k[0] === t.kind)[2]), short(t.name) + (t.count > 1 ? " × " + t.count : "")),
        h("td", { "data-tip": exact(t.bytes) }, sized(t.bytes))))));
  }
  watchers.push(alive);
  const redraw = () => { lanes.paint(); memory.paint(); };
  const zoom = (by, about) => {
    const [a, b] = state.view, centre = about === undefined ? (a + b) / 2 : about, span = Math.min((b - a) * by, whole[1] - whole[0]);
    const start = Math.max(whole[0], Math.min(whole[1] - span, centre - (centre - a) * (span / (b - a))));
    state.view = [start, start + Math.max(span, (whole[1] - whole[0]) / 5000)];
    redraw();
  };
  const pan = (by) => {
    const span = state.view[1] - state.view[0], start = Math.max(whole[0], Math.min(whole[1] - span, state.view[0] + by));
    state.view = [start, start + span];
    redraw();
  };
  const all = () => { state.view = [...whole]; redraw(); };
  const told = (r, i) => {
    const a = T.ranks[r].actions, kind = a.kinds[i], stage = a.stages[i];
    const layers = D.classes[r].layers[chunks[r].indexOf(stage)];
    const phase = kind === "F" ? "forward" : "backward", sends = T.transfers.filter((t) => t.stage === stage && t.phase === phase);
    return `${ACTIONS[kind][0]} of microbatch ${a.microbatches[i]}\nstage ${stage}, layers ${layers}, pipeline rank ${r}\n${moment(a.start[i])} – ${moment(a.end[i])}` +
      sends.map((t) => `\nsends ${t.value}, ${sized(t.bytes)}, to pp ${t.to}`).join("");
  };
  let drag = null;
  const move = (e) => {
    const width = e.currentTarget.clientWidth, t = time(e.offsetX, width);
    if (drag !== null) {
      if (drag.strip) { const [a, b] = [drag.t, onStrip(e.offsetX, width)].sort((p, q) => p - q); if (b - a > (whole[1] - whole[0]) / 400) state.view = [Math.max(whole[0], a), Math.min(whole[1], b)]; redraw(); } else { pan(drag.t - t); }
      return;
    }
    cross = e.offsetX >= LEFT && e.offsetX <= width - RIGHT ? t : null;
    hover = null;
    if (e.currentTarget === lanes && cross !== null && e.offsetY >= top) {
      const r = Math.floor((e.offsetY - top) / (rows * (tall + 3)));
      if (r < p && (e.offsetY - top) % (rows * (tall + 3)) <= tall) {
        const a = T.ranks[r].actions, i = from(a, t);
        if (i < a.end.length && a.start[i] <= t) { hover = [r, i]; say(told(r, i), e.clientX, e.clientY); }
      }
    }
    if (!hover) say("");
    redraw();
    alive();
  };
  const onStrip = (px, width) => whole[0] + ((px - LEFT) / (width - LEFT - RIGHT)) * (whole[1] - whole[0]);
  for (const c of [lanes, memory]) {
    c.addEventListener("mousemove", move);
    c.addEventListener("mouseleave", () => { cross = null; hover = null; drag = null; say(""); redraw(); alive(); });
    c.addEventListener("mousedown", (e) => {
      const strip = c === lanes && e.offsetY < 32;
      drag = { t: strip ? onStrip(e.offsetX, c.clientWidth) : time(e.offsetX, c.clientWidth), strip, x: e.offsetX };
    });
    c.addEventListener("mouseup", (e) => {
      const still = drag && Math.abs(e.offsetX - drag.x) < 3 && !drag.strip;
      drag = null;
      if (still && c === lanes && e.offsetY >= top) { const r = Math.floor((e.offsetY - top) / (rows * (tall + 3))); if (r < p) { state.rank = r; changed(); } }
    });
    c.addEventListener("wheel", (e) => {
      if (document.activeElement !== c) return;
      e.preventDefault();
      zoom(e.deltaY > 0 ? 1.25 : 0.8, time(e.offsetX, c.clientWidth));
    }, { passive: false });
    c.addEventListener("keydown", (e) => {
      const act = { ArrowLeft: () => pan(-(state.view[1] - state.view[0]) / 8), ArrowRight: () => pan((state.view[1] - state.view[0]) / 8), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4), 0: all }[e.key];
      if (act) { e.preventDefault(); act(); }
    });
  }
  const legend = [["f", "F forward"], ["i", "I backward, input"], ["w", "W backward, weight"], ["edge", "enter, finish: once per step"]];
  const unit = measured ? `; below each row, what was measured in a run${scale === 1 ? "" : ", its clock scaled to the same length (no --device was given)"}` : "";
  section("time", "Timeline and memory over time",
    `One step. A row is a pipeline rank: all ranks with that pp coordinate do the same. Time in ${T.unit}${unit}; ` +
    "transfers take no time here. Memory over time counts whole frames, each as one kind; the part of the peak above it " +
    "is gaps. Drag to pan; click, then use the wheel, to zoom; click a row to see its memory.",
    h("div", { class: "row" }, h("ul", { class: "legend", style: "margin:0" }, legend.map(([c, name]) => h("li", {}, swatch(c), name)), h("li", {}, h("span", { class: "swatch hatch" }), "idle"),
      many ? h("li", {}, "paler: later chunk of a rank") : null, h("li", {}, h("span", { class: "swatch", style: "background:var(--over);height:3px;vertical-align:3px" }), "path of the microbatch under the pointer")),
      h("span", { class: "end row", style: "margin-bottom:0" }, rankChoice(), limitChoice(), h("button", { type: "button", onclick: () => zoom(1.4), "aria-label": "zoom out" }, "−"), h("button", { type: "button", onclick: () => zoom(0.7), "aria-label": "zoom in" }, "+"),
        h("button", { type: "button", onclick: all }, "Whole step ", h("kbd", {}, "0")))),
    h("div", { class: "split" }, h("div", { class: "panel" }, lanes, memory), panel));
  return { all };
}
