// Timeline: actions of all pipeline ranks, the memory of one under the same axis, what is alive there.

const LEFT = 62, RIGHT = 118;
function timeline() {
  const T = D.timeline, measured = D.measured;
  const chunks = T.ranks.map((_, r) => T.owner.map((o, i) => [o, i]).filter((x) => x[0] === r).map((x) => x[1]));
  const most = Math.max(...chunks.map((c) => c.length)), many = most > 1;
  let cross = null, hover = null;
  const p = T.ranks.length, rows = measured ? 2 : 1;
  const tall = p <= 8 ? 30 : p <= 16 ? 21 : Math.max(9, 340 / p);
  // A run has a clock of its own, unless both are milliseconds and nearly as many.
  const length = T.end - T.begin || 1;
  const last = measured ? Math.max(...measured.ranks.flatMap((r) => [r.finish[1], ...r.actions.end]), 1e-9) : length;
  const own = measured && (!D.time || Math.max(last / length, length / last) > 3), scale = own ? length / last : 1;
  const whole = [T.begin, Math.max(T.end, T.begin + last * scale)];
  /** Moments of a row of the plan, and of one of the run, as the plan's. */
  const PLAN = [0, 1], RUN = [T.begin, scale];
  state.view = [...whole];
  const x = (time, width) => LEFT + ((time - state.view[0]) / (state.view[1] - state.view[0])) * (width - LEFT - RIGHT);
  const time = (px, width) => state.view[0] + ((px - LEFT) / (width - LEFT - RIGHT)) * (state.view[1] - state.view[0]);
  // One pipeline rank needs no strip of all of them above its row.
  const above = p > 1 ? 34 : 0, top = 18 + above, height = top + p * rows * (tall + 3) + 6;

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
  function lane(g, a, r, y, tall, width, [begin, factor]) {
    const colours = fills(r), room = { left: LEFT, right: width - RIGHT }, px = (t) => x(begin + t * factor, width);
    const first = from(a, (state.view[0] - begin) / factor);
    let end = first;
    while (end < a.end.length && begin + a.start[end] * factor < state.view[1]) end++;
    const mean = (Math.min(room.right, px(a.end[Math.max(first, end - 1)])) - Math.max(room.left, px(a.start[first]))) / (end - first);
    if (mean < 2) { columns(g, [a], Math.ceil(4 * mean), y, tall, room, px); return; }
    for (let i = first; i < end; i++) {
      const x0 = Math.max(room.left, px(a.start[i])), x1 = Math.min(room.right, px(a.end[i]));
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
  /** Actions too narrow to be told apart, of one row or of several: columns of the shares of their kinds; the rest is idle. */
  function columns(g, all, column, y, tall, room, px) {
    const n = Math.ceil((room.right - room.left) / column), shares = { F: new Float32Array(n), I: new Float32Array(n), W: new Float32Array(n) };
    for (const a of all) for (let i = 0; i < a.end.length; i++) {
      const x0 = Math.max(0, (px(a.start[i]) - room.left) / column), x1 = Math.min(n, (px(a.end[i]) - room.left) / column), kind = a.kinds[i];
      for (let c = Math.floor(x0); c < x1; c++) {
        const part = (Math.min(c + 1, x1) - Math.max(c, x0)) / all.length;
        if (kind === "B") { shares.I[c] += part * 0.7; shares.W[c] += part * 0.3; } else shares[kind][c] += part;
      }
    }
    const under = new Float32Array(n);
    for (const kind of "FIW") {
      g.fillStyle = css(ACTIONS[kind][1]);
      for (let c = 0; c < n; c++) {
        const left = room.left + c * column;
        if (shares[kind][c] > 0) g.fillRect(left, y + tall * under[c], Math.min(column, room.right - left), tall * shares[kind][c]);
        under[c] += shares[kind][c];
      }
    }
  }
  function edges(g, row, y, width, [begin, factor]) {
    g.fillStyle = css("edge");
    for (const [a, b] of [row.enter, row.finish]) {
      const x0 = Math.max(LEFT, x(begin + a * factor, width)), x1 = Math.min(width - RIGHT, x(begin + b * factor, width));
      if (b > a && x1 > x0) g.fillRect(x0, y, x1 - x0, tall);
    }
  }
  const rowY = (r) => top + r * rows * (tall + 3);
  function ticks(g, width, y, bottom) {
    const span = state.view[1] - state.view[0], least = (span * 70) / (width - LEFT - RIGHT), ten = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((n) => n * ten).find((n) => n >= least * 0.999) || ten, far = Math.max(...state.view.map(Math.abs));
    // One unit, and as many digits, for all labels that are seen.
    const [by, unit] = !D.time ? [1, ""] : far >= 1000 ? [1e-3, " s"] : far >= 1 ? [1, " ms"] : [1e3, " µs"];
    const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step * by) - 1e-9)));
    g.fillStyle = css("muted");
    g.strokeStyle = css("line");
    g.lineWidth = 1;
    for (let t = Math.ceil(state.view[0] / step) * step; t <= state.view[1] + 1e-9; t += step) {
      const at = x(t, width);
      g.textAlign = "center";
      const text = (Math.abs(t) < step / 1e6 ? 0 : t * by).toFixed(digits) + unit;
      g.fillText(text, Math.min(at, width - RIGHT - g.measureText(text).width / 2), y);
      g.textAlign = "left";
      if (bottom) { g.beginPath(); g.moveTo(at, y + 8); g.lineTo(at, bottom); g.stroke(); }
    }
  }
  function strip(g, width) {
    if (!above) return;
    const view = state.view, h = Math.max(1, 22 / p);
    state.view = whole;
    g.fillStyle = css("idle");
    g.fillRect(LEFT, 6, width - LEFT - RIGHT, 22);
    // Rows that are too low to be seen are one.
    if (h < 2) columns(g, T.ranks.map((r) => r.actions), 2, 6, 22, { left: LEFT, right: width - RIGHT }, (t) => x(t, width));
    else for (let r = 0; r < p; r++) lane(g, T.ranks[r].actions, r, 6 + r * (22 / p), h, width, PLAN);
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
    if (!hover || hover[2]) return;
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
    ticks(g, width, above + 8, height - 4);
    for (let r = 0; r < p; r++) {
      const y = rowY(r), c = D.classes[r];
      if (r === state.rank && p > 1) { g.fillStyle = css("idle"); g.fillRect(0, y - 1.5, width, rows * (tall + 3)); }
      g.fillStyle = hatch(g);
      g.fillRect(LEFT, y, width - LEFT - RIGHT, tall);
      edges(g, T.ranks[r], y, width, PLAN);
      lane(g, T.ranks[r].actions, r, y, tall, width, PLAN);
      g.fillStyle = css("ink");
      g.font = (r === state.rank && p > 1 ? "600 " : "") + "12px " + getComputedStyle(document.body).fontFamily;
      g.fillText(p > 1 ? `pp ${r}` : "all ranks", 4, y + tall / 2);
      g.font = "12px " + getComputedStyle(document.body).fontFamily;
      if (measured) {
        g.fillStyle = css("muted");
        g.fillText("run", 14, y + tall + 3 + tall / 2);
        edges(g, measured.ranks[r], y + tall + 3, width, RUN);
        lane(g, measured.ranks[r].actions, r, y + tall + 3, tall, width, RUN);
      }
      peaks(g, c, y, width);
    }
    g.fillStyle = css("muted");
    g.fillText(state.limit ? "peak, limit" : "peak", width - RIGHT + 8, above + 8);
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
    g.moveTo(x(cross, width), Math.max(0, above - 2));
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
      g.fillStyle = fillOn(g, colour);
      g.beginPath();
      const n = m.t.length, up = [];
      for (let i = 0; i < n; i++) {
        const under = base[i];
        base[i] += typeof own === "number" ? own : own[i];
        const x0 = x(i ? m.t[i] : Math.min(m.t[0], T.begin), width), x1 = i + 1 < n ? x(m.t[i + 1], width) : x(T.end, width);
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
    const at = (kind) => (cross === null ? c.at_peak[kind] || 0 : m.bytes[kind] === undefined ? 0 : typeof m.bytes[kind] === "number" ? m.bytes[kind] : m.bytes[kind][i]);
    const all = KINDS.map(([k, name, colour]) => [k, name, colour, at(k)]).filter((k) => k[3] > 0), sum = all.reduce((n, k) => n + k[3], 0);
    const tensors = [...c.tensors].sort((a, b) => b.bytes - a.bytes).slice(0, 14);
    panel.replaceChildren(h("h3", {}, `${p > 1 ? `pp ${state.rank}, at` : "At"} ${cross === null ? "the peak" : stamp(cross)}: ${sized(sum)}`), bar(all.map((k) => [k[2], k[3], k[1]]), Math.max(1, sum)),
      h("table", {}, all.map((k) => h("tr", {}, h("td", {}, swatch(k[2]), k[1]), h("td", { "data-tip": exact(k[3]) }, sized(k[3]))))),
      h("h3", { style: "margin-top:10px" }, "Largest at the peak"),
      h("table", { class: "largest" }, tensors.map((t) => h("tr", {},
        h("td", { class: t.name.startsWith("%") ? "mono" : null, "data-tip": t.name }, swatch(KINDS.find((k) => k[0] === t.kind)[2]), short(t.name) + (t.count > 1 ? " × " + t.count : "")),
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
  const told = (r, i, run) => {
    const a = (run ? measured : T).ranks[r].actions, kind = a.kinds[i], stage = a.stages[i];
    const layers = D.classes[r].layers[chunks[r].indexOf(stage)];
    // What a stage sends backward is the gradient of its input: W makes none.
    const phase = kind === "F" ? "forward" : "backward", sends = kind === "W" || run ? [] : T.transfers.filter((t) => t.stage === stage && t.phase === phase);
    const [from, to] = [a.start[i], a.end[i]], times = run ? `${seconds(from / 1e3)} – ${seconds(to / 1e3)} of the run, ${seconds((to - from) / 1e3)}` : `${stamp(from)} – ${stamp(to)}, ${stamp(to - from)}`;
    return `${ACTIONS[kind][0]} of microbatch ${a.microbatches[i]}\nstage ${stage}, layers ${layers}${p > 1 ? `, pipeline rank ${r}` : ""}\n${times}` +
      sends.map((t) => `\nsends ${t.value}, ${sized(t.bytes)}, to pp ${t.to}`).join("");
  };
  /** What stands under a point of the rows: pipeline rank, action, and whether of the run. */
  const under = (y, t) => {
    const r = Math.floor((y - top) / (rows * (tall + 3))), inside = (y - top) % (rows * (tall + 3)), run = inside >= tall + 3;
    if (r >= p || (inside > tall && !run)) return null;
    const a = (run ? measured : T).ranks[r].actions, own = run ? (t - RUN[0]) / RUN[1] : t, i = from(a, own);
    return i < a.end.length && a.start[i] <= own ? [r, i, run] : null;
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
      hover = under(e.offsetY, t);
      if (hover) say(told(...hover), e.clientX, e.clientY);
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
      const strip = c === lanes && e.offsetY < above - 2;
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
  const ratio = last / length, slower = ratio > 1 ? `${Number(ratio.toPrecision(3))} × slower` : `${Number((1 / ratio).toPrecision(3))} × faster`;
  const unit = !measured ? "" : `; below each row, a run${own ? `, ${D.time ? slower + ", " : ""}drawn to the same length` : ""}`;
  const later = (c) => `background:color-mix(in srgb,var(--panel) ${(50 * c) / Math.max(1, most - 1)}%,var(--f))`;
  section("time", "Timeline and memory over time",
    `One step. ${p > 1 ? "A row is a pipeline rank: all ranks with that pp coordinate do the same" : "All ranks do the same"}. ${D.time ? "Times are by price" : "Time in " + T.unit}${unit}` +
    (p < 2 ? "" : D.time ? "; who receives from another stage is drawn as idle" : "; transfers take no time here") +
    ". Where actions are too narrow to be seen, columns are stacked by the shares of their kinds. Memory over time counts whole frames, each as one kind; the part of the peak above it " +
    "is gaps. Drag to pan; click, then use the wheel, to zoom; click a row to see its memory.",
    h("div", { class: "row" }, h("ul", { class: "legend", style: "margin:0" }, legend.map(([c, name]) => h("li", {}, swatch(c), name)), h("li", {}, h("span", { class: "swatch hatch" }), "idle"),
      many ? h("li", {}, Array.from({ length: most }, (_, c) => h("span", { class: "swatch", style: later(c) + ";margin-right:1px" })), ` the ${most} chunks of a rank, first to last`) : null, h("li", {}, h("span", { class: "swatch", style: "background:var(--over);height:3px;vertical-align:3px" }), "path of the microbatch under the pointer")),
      h("span", { class: "end row", style: "margin-bottom:0" }, rankChoice(), limitChoice(), h("button", { type: "button", onclick: () => zoom(1.4), "aria-label": "zoom out" }, "−"), h("button", { type: "button", onclick: () => zoom(0.7), "aria-label": "zoom in" }, "+"),
        h("button", { type: "button", onclick: all }, "Whole step ", h("kbd", {}, "0")))),
    h("div", { class: "split" }, h("div", { class: "panel" }, lanes, memory), panel));
  return { all };
}
