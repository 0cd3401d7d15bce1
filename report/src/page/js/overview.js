// Overview, mesh and groups, how each weight is cut.

function overview() {
  const f = D.facts, main = document.getElementById("page"), mesh = D.mesh;
  const top = h("section", { id: "overview", "aria-label": "overview", style: "margin-top:0" },
    h("h1", {}, f.name, " ", mesh.axes.map((a, i) => [i ? h("small", {}, " × ") : "", badge(a.name, count(a.size))])),
    h("p", { class: "sub" }, `${count(mesh.ranks)} rank${mesh.ranks > 1 ? "s" : ""} · ${count(f.microbatches)} microbatch${f.microbatches > 1 ? "es" : ""} · ${count(f.parameters)} parameters · proof: ${f.proof ? f.proof.replace(/^not proved: (--.*)$/, "none ($1)") : "not requested"}`));
  document.getElementById("links").append(h("li", {}, h("a", { href: "#overview", "data-key": 1 }, "Overview")));
  const card = () => h("div", { class: "panel card" }), peak = card(), sent = card(), bubble = card();
  // What a plan does not have has no card: no machine, nobody to send to, no pipeline.
  const cards = [D.time ? priced(D.time) : null, peak, mesh.ranks > 1 ? sent : null, f.pipeline > 1 ? bubble : null];
  top.append(h("div", { class: "cards" }, cards.filter((c) => c)));
  watchers.push(() => {
    const all = D.classes, most = all.reduce((a, b) => (b.peak_bytes > a.peak_bytes ? b : a));
    const over = state.limit ? all.filter((c) => c.peak_bytes > state.limit).length : 0;
    const per = f.pipeline > 1 ? `largest of ${f.pipeline}: pipeline rank ${most.class}` : "all ranks alike";
    const limit = state.limit ? [", ", h("span", { class: over ? "over" : "" },
      over ? `over ${limitName(state.limit)}${f.pipeline > 1 ? ` on ${over} of ${f.pipeline} pipeline ranks` : ""}` : `under ${limitName(state.limit)}${f.pipeline > 1 ? " on all" : ""}`)] : "";
    fill(peak, "Peak memory of a rank", most.peak_bytes, KINDS.map(([k, name, c]) => [c, most.at_peak[k] || 0, name, `${name} ${exact(most.at_peak[k] || 0)}`]),
      h("p", {}, per, limit, most.peak_in ? `; in ${most.peak_in}` : ""));
    const busy = all.reduce((a, b) => (total(b.sent) > total(a.sent) ? b : a));
    fill(sent, `Sent per step by a rank${f.pipeline > 1 ? ` with pp ${busy.class}` : ""}`, total(busy.sent), busy.sent.map((x) => [family(x.axis), x.bytes, x.axis, `${x.axis} ${exact(x.bytes)}`]),
      h("p", {}, busy.sent.filter((x) => x.bytes > 0).map((x) => [h("span", { class: "pair" }, badge(x.axis), ` ${sized(x.bytes)}`), " "])));
  });
  const share = (x) => `${(100 * x).toFixed(1)}\u202f%`, idle = D.time ? D.timeline.bubble : f.bubble;
  const formula = `${share(f.textbook)} = (p−1) ÷ (v·m+p−1)`, sizes = `p=${f.pipeline}, v=${f.stages / f.pipeline}, m=${f.microbatches}`;
  const known = f.textbook !== null, same = known && Math.abs(f.textbook - f.bubble) < 5e-4;
  const even = (same ? `${formula} with ${sizes}` : share(f.bubble)) + " if all stages take equally long" + (known && !same ? `; ${formula} for 1F1B with ${sizes}` : "");
  bubble.append(h("p", { class: "label" }, `Bubble, idle ÷ total time${D.time ? ", as priced" : ""}`),
    h("p", { class: "big" }, (100 * idle).toFixed(1), h("small", {}, "\u202f%")), bar(D.time ? spent(idle) : work(1 - idle).concat([["hatch", idle, "idle"]]), 1),
    h("p", {}, even + "."));
  top.append(h("div", { class: "settings" }, D.settings.map((g) => {
    const unset = g.rows.filter(([, v]) => v === "–").map(([k]) => k);
    return h("div", { class: "panel" }, h("h3", {}, g.name),
      h("table", {}, g.rows.filter(([, v]) => v !== "–").map(([k, v]) => h("tr", {}, h("th", { scope: "row" }, k), h("td", {}, /^\d{4,}$/.test(v) && k !== "seed" ? count(v) : v)))),
      unset.length ? h("p", { class: "none" }, `none: ${unset.join(", ")}`) : "");
  })));
  main.append(top);
}
/** The card of a step on a machine: its time, what share of the machine that uses, and where it goes. */
function priced(t) {
  const [text, unit] = seconds(t.step_s).split(" ");
  return h("div", { class: "panel card" }, h("p", { class: "label" }, `Step on ${t.device}, as priced`),
    h("p", { class: "big" }, text, h("small", {}, "\u202f" + unit)),
    bar(t.parts.map(([name, n]) => { const [colour, words] = part(name); return [colour, n, words, `${words} ${seconds(n)}`]; }), t.step_s),
    h("p", {}, `${t.mfu === null ? "" : `MFU ${(100 * t.mfu).toFixed(1)}\u202f%; `}${count(Math.round(t.tokens_per_s))} tokens/s; `,
      [...t.parts].sort((a, b) => b[1] - a[1]).slice(0, 3).map(([name, n]) => `${part(name)[1]} ${percent(n, t.step_s)}`).join(", ")));
}
/** A time of work by kind of action; a whole backward is half of either kind. */
function work(time) {
  const n = { f: 0, i: 0, w: 0 };
  for (const kind of D.timeline.ranks.map((r) => r.actions.kinds).join("")) for (const part of { F: "f", I: "i", W: "w", B: "iw" }[kind]) n[part]++;
  const all = Math.max(1, n.f + n.i + n.w);
  return [["f", "forward"], ["i", "backward, input"], ["w", "backward, weight"]].map(([k, name]) => [k, (time * n[k]) / all, name]);
}
/** Shares of the time of all pipeline ranks by price. */
function spent(idle) {
  const T = D.timeline, n = { f: 0, i: 0, w: 0, edge: 0 };
  for (const r of T.ranks) {
    [...r.actions.kinds].forEach((kind, k) => { const parts = { F: "f", I: "i", W: "w", B: "iw" }[kind]; for (const p of parts) n[p] += (r.actions.end[k] - r.actions.start[k]) / parts.length; });
    for (const [a, b] of [r.enter, r.finish]) n.edge += b - a;
  }
  const whole = T.ranks.length * (T.end - T.begin) || 1;
  return [["f", "forward"], ["i", "backward, input"], ["w", "backward, weight"], ["edge", "enter, finish"]].map(([k, name]) => [k, n[k] / whole, name]).concat([["hatch", idle, "idle"]]);
}
const total = (sent) => sent.reduce((n, x) => n + x.bytes, 0);
function fill(card, name, n, parts, ...more) {
  const [text, unit] = bytes(n);
  card.replaceChildren(h("p", { class: "label" }, name), h("p", { class: "big", "data-tip": exact(n), "data-bytes": n }, text, h("small", {}, "\u202f" + unit)),
    bar(parts, Math.max(1, parts.reduce((a, p) => a + p[1], 0))), ...more);
}

/** Which rank of its group's kind: the rank number without what the group's axes add to it. */
function groupOf(rank, dims) {
  return dims.reduce((r, [size, stride]) => r - (Math.floor(rank / stride) % size) * stride, rank);
}
const coordinate = (rank, axis) => Math.floor(rank / axis.stride) % axis.size;
function classOf(rank) {
  const pp = D.mesh.axes.find((a) => a.name === "pp");
  return pp ? coordinate(rank, pp) : 0;
}

function mesh() {
  const m = D.mesh, axes = m.axes.length ? m.axes : [{ name: "rank", size: 1, stride: 1 }];
  const inner = axes.length > 1 ? axes[axes.length - 1] : { size: 1, stride: 1 };
  const outer = axes.length > 2 ? axes[0] : { name: "", size: 1, stride: m.ranks };
  // Above 65 536 ranks a cell stands for a node, or for a run of ranks.
  const each = m.ranks > 65536 ? m.node || inner.size : 1;
  let at = null;
  // As tall as it is with words, so that nothing moves when there are some.
  const words = h("p", { class: "label", "aria-live": "polite", style: `min-height:${1.45 * (3 + m.groups.length)}em` }, "Point at a rank.");
  const geometry = (width) => {
    const rows = outer.size, columns = m.ranks / rows / inner.size, left = outer.name ? 58 : 4;
    const cell = (width - left - 4) / Math.max(1, columns);
    // Ranks of the innermost axis: side by side if there is room, else on top of each other.
    const side = cell / inner.size >= 9;
    const tall = side ? Math.max(12, Math.min(26, 340 / rows)) : Math.max(inner.size * 3 + 2, Math.min(30, 340 / rows));
    return { rows, columns, left, cell, side, tall };
  };
  const box = (rank, q) => {
    const row = Math.floor(rank / (m.ranks / q.rows)), rest = rank % (m.ranks / q.rows);
    const column = Math.floor(rest / inner.size), k = rest % inner.size;
    const gap = q.cell > 6 ? 1.5 : q.cell > 3 ? 0.5 : 0;
    const x = q.left + column * q.cell, y = 18 + row * (q.tall + 3);
    return q.side ? [x + (k * (q.cell - gap)) / inner.size, y, (q.cell - gap) / inner.size - 0.6, q.tall]
      : [x, y + (k * q.tall) / inner.size, Math.max(0.5, q.cell - gap), Math.max(0.6, q.tall / inner.size - 0.4)];
  };
  /** The colour of a peak of memory, between the least and the most of all. */
  const [least, most] = [Math.min, Math.max].map((of) => of(...D.classes.map((c) => c.peak_bytes)));
  const shade = (n) => pale(css(state.limit && n > state.limit ? "over" : "accent"), most > least ? 0.72 * (1 - (n - least) / (most - least)) + 0.06 : 0.3);
  /** The colour of every cell, as a function of its rank. */
  const colours = () => {
    const group = m.groups.find((x) => x.axis === state.group);
    if (group) {
      const order = new Map(), shades = [0, 0.55, 0.28, 0.75].map((part) => pale(css(family(group.axis)), part));
      return (rank) => {
        const id = groupOf(rank, group.dims);
        if (!order.has(id)) order.set(id, order.size);
        return shades[order.get(id) % 4];
      };
    }
    const of = D.classes.map((c) => shade(c.peak_bytes));
    return (rank) => of[classOf(rank)] || of[0];
  };
  /** The cells of a row that nodes have, outlined where there is room. */
  const nodes = (g, q) => {
    if (!m.node || m.node >= m.ranks || (m.ranks / q.rows) % m.node) return;
    g.strokeStyle = css("muted");
    g.lineWidth = 1;
    for (let first = 0; first < m.ranks; first += m.node) {
      // Columns fill a row from left to right, and cells their column.
      const ends = [first, Math.min(first + inner.size, first + m.node) - 1, first + m.node - 1].map((r) => box(r, q));
      const [x0, y0] = [0, 1].map((k) => Math.min(...ends.map((b) => b[k])));
      const [x1, y1] = [0, 1].map((k) => Math.max(...ends.map((b) => b[k] + b[k + 2])));
      if (x1 - x0 > 12) g.strokeRect(x0 - 0.5, y0 - 0.5, x1 - x0 + 0.5, y1 - y0 + 1);
    }
  };
  /** The picture of all cells, which is drawn again only where something but the rank pointed at changes. */
  let kept = null;
  const cells = (g, width, tall) => {
    const key = [width, tall, g.canvas.width, state.group, state.limit, document.documentElement.dataset.theme].join();
    if (!kept || kept.key !== key) {
      const all = h("canvas", { width: g.canvas.width, height: g.canvas.height }), k = all.getContext("2d"), q = geometry(width), colour = colours();
      k.setTransform(g.getTransform());
      for (let rank = 0; rank < m.ranks; rank += each) {
        k.fillStyle = colour(rank);
        k.fillRect(...box(rank, q));
      }
      nodes(k, q);
      kept = { key, all };
    }
    return kept.all;
  };
  /** The members of the group of a rank. */
  const members = (rank, x) => Array.from({ length: x.size }, (_, i) => {
    let out = groupOf(rank, x.dims), rest = i;
    for (const [size, stride] of [...x.dims].reverse()) { out += (rest % size) * stride; rest = Math.floor(rest / size); }
    return out;
  });
  const draw = (g, width, tall) => {
    const q = geometry(width), all = cells(g, width, tall), shown = m.groups.filter((x) => x.size <= 4096);
    const fade = at !== null && m.groups.length === shown.length;
    g.globalAlpha = fade ? 0.28 : 1;
    g.drawImage(all, 0, 0, width, tall);
    g.globalAlpha = 1;
    if (at !== null) {
      const ratio = all.width / width, group = shown.find((x) => x.axis === state.group);
      for (const r of fade ? new Set((group ? [group] : shown).flatMap((x) => members(at, x)).concat(at)) : []) {
        const [x, y, w, t] = box(r, q);
        g.clearRect(x, y, w, t);
        g.drawImage(all, x * ratio, y * ratio, w * ratio, t * ratio, x, y, w, t);
      }
      g.lineWidth = 1.5;
      for (const x of shown) {
        g.strokeStyle = css(family(x.axis));
        g.beginPath();
        for (const r of members(at, x)) g.rect(...box(r, q));
        g.stroke();
      }
      g.strokeStyle = css("ink");
      g.lineWidth = 2;
      g.strokeRect(...box(at, q));
    }
    g.fillStyle = css("muted");
    for (let r = 0; r < q.rows && outer.name; r++) g.fillText(`${outer.name} ${r}`, 4, 18 + r * (q.tall + 3) + q.tall / 2);
    const middle = axes.length > 2 ? axes.slice(1, -1) : axes.length > 1 ? axes.slice(0, 1) : axes;
    const named = middle.map((a) => a.name).join("·"), step = [1, 2, 4, 8, 16, 32, 64, 128].find((n) => n * q.cell > g.measureText(named + " 0000").width + 8) || 256;
    if (q.columns > 1) for (let c = 0; c < q.columns; c += step) g.fillText(`${named} ${c}`, q.left + c * q.cell, 8);
  };
  const tall = (width) => { const q = geometry(width); return 22 + q.rows * (q.tall + 3); };
  const canvas = picture(tall, draw, `all ${m.ranks} ranks; arrow keys select one`);
  const first = (rank, x) => members(rank, { ...x, size: Math.min(4, x.size) });
  const told = (rank) => {
    const node = m.node ? `, node ${Math.floor(rank / m.node)}` : "";
    const c = D.classes[classOf(rank)] || D.classes[0];
    return `rank ${rank}: ${m.axes.map((a) => `${a.name} ${coordinate(rank, a)}`).join(", ") || "alone"}${node}\npeak ${sized(c.peak_bytes)}` +
      m.groups.map((x) => `\n${x.axis}: ${x.size > 4 ? `${first(rank, x).join(", ")}, … (${count(x.size)} ranks)` : `ranks ${first(rank, x).join(", ")}`}`).join("");
  };
  const pick = (rank, x, y) => {
    at = rank;
    canvas.paint();
    words.textContent = rank === null ? "Point at a rank." : told(rank);
    words.style.whiteSpace = "pre-line";
    if (x !== undefined) say(rank === null ? "" : told(rank), x, y);
  };
  const under = (e) => {
    const q = geometry(canvas.clientWidth), x = e.offsetX - q.left, y = e.offsetY - 18;
    const row = Math.floor(y / (q.tall + 3)), column = Math.floor(x / q.cell);
    if (x < 0 || y < 0 || row >= q.rows || column >= q.columns) return null;
    const inside = q.side ? (x % q.cell) / q.cell : (y % (q.tall + 3)) / q.tall;
    return row * (m.ranks / q.rows) + column * inner.size + Math.min(inner.size - 1, Math.floor(inside * inner.size));
  };
  canvas.addEventListener("mousemove", (e) => pick(under(e), e.clientX, e.clientY));
  canvas.addEventListener("mouseleave", () => { pick(null); say(""); });
  canvas.addEventListener("click", (e) => { const r = under(e); if (r !== null) { state.rank = classOf(r); changed(); } });
  canvas.addEventListener("keydown", (e) => {
    const by = { ArrowLeft: -inner.size, ArrowRight: inner.size, ArrowUp: -1, ArrowDown: 1 }[e.key];
    if (!by) return;
    e.preventDefault();
    pick(Math.max(0, Math.min(m.ranks - 1, (at === null ? 0 : at) + by)));
  });
  const buttons = [["memory", "peak memory"], ...m.groups.map((x) => [x.axis, x.axis])].map(([id, name]) =>
    h("button", { type: "button", onclick: () => { state.group = id; changed(); } }, name));
  watchers.push(() => buttons.forEach((b, i) => b.setAttribute("aria-pressed", state.group === (i ? m.groups[i - 1].axis : "memory"))));
  const side = h("div", { class: "panel" });
  watchers.push(() => {
    const sent = D.classes[state.rank].sent;
    side.replaceChildren(h("h3", {}, `Sent per step by a rank${D.classes.length > 1 ? ` with pp ${state.rank}` : ""}`), h("div", { class: "scroll" }, h("table", { class: "list" },
      h("tr", {}, ["axis", "groups", "sent"].concat(m.node ? "leaves node" : []).map((x, i) => h("th", { class: i ? "n" : "" }, x))),
      m.groups.map((x) => {
        const own = sent.find((y) => y.axis === x.axis) || { bytes: 0, between_nodes: null };
        return h("tr", {}, h("td", {}, badge(x.axis, count(x.size))), h("td", { class: "n" }, count(x.groups)),
          h("td", { class: "n", "data-tip": exact(own.bytes) }, sized(own.bytes)),
          m.node ? h("td", { class: "n", "data-tip": exact(own.between_nodes || 0) }, sized(own.between_nodes || 0)) : null);
      }))), m.node ? h("p", { class: "label" }, `${m.node} ranks per node. The bytes that leave a node are the mean over a group.`) : h("p", { class: "label" }, "Nodes are not known: compile with ", h("code", { style: "white-space:nowrap" }, "--node"), "."), words);
  });
  const scale = h("span", { class: "row end", style: "margin-bottom:0" });
  watchers.push(() => {
    if (state.group !== "memory") { scale.replaceChildren("neighbouring groups differ in shade"); return; }
    const ends = least < most ? [sized(least), h("span", { class: "ramp", style: `background:linear-gradient(to right,${shade(least)},${shade(most)})` }), sized(most)] : [h("span", { class: "ramp", style: `background:${shade(most)}` }), sized(most)];
    scale.replaceChildren(...ends);
  });
  const rows = outer.name ? `, each row ${outer.name === "pp" ? "a pipeline rank" : `a coordinate of ${outer.name}`}` : "";
  const inside = axes.length > 1 ? `; cells within a column are ${inner.name} 0–${inner.size - 1}` : "";
  section("mesh", "Mesh and groups", `Each cell is a ${each > 1 ? "run of " + each + " ranks" : "rank"}${rows}${inside}. ${m.order}. Point at a cell to see its groups; select an axis to see which ranks exchange data.`,
    h("div", { class: "row" }, buttons, limitChoice(), scale), h("div", { class: "split" }, h("div", { class: "panel" }, canvas), side));
}

/** A tensor as a rectangle: its last two dims (of a stack that is cut, the stack and the last), with the cuts of each and the first rank's piece. */
function cut(piece) {
  const stack = piece.dims.length > 2 && piece.dims[0].cut.length;
  const dims = stack ? [piece.dims[0], piece.dims[piece.dims.length - 1]] : piece.dims.slice(-2), wide = 96, tall = 66;
  const [rows, columns] = dims.length > 1 ? dims : [{ size: 1, cut: [] }, dims[0] || { size: 1, cut: [] }];
  const ratio = stack ? 1.5 : Math.max(0.25, Math.min(4, columns.size / rows.size));
  const w = ratio >= 1 ? wide : Math.max(16, wide * ratio), t = dims.length > 1 ? (ratio >= 1 ? Math.max(12, tall / ratio) : tall) : 12;
  const out = s("svg", { width: wide + 2, height: t + 2, viewBox: `0 0 ${wide + 2} ${t + 2}`, role: "img" });
  out.append(s("title", {}));
  out.firstChild.textContent = piece.text;
  const ways = (d) => d.cut.reduce((n, c) => n * c[1], 1);
  out.append(s("rect", { x: 1, y: 1, width: w, height: t, fill: "var(--idle)", stroke: "var(--muted)" }));
  const colour = (d) => `var(--${d.cut.length === 1 ? family(d.cut[0][0]) : "several"})`;
  const cutter = rows.cut.length && columns.cut.length ? "var(--several)" : rows.cut.length ? colour(rows) : columns.cut.length ? colour(columns) : "var(--muted)";
  // Of more cuts than can be told apart, every second one, or every third, and so on.
  const lines = (n, length) => {
    const each = Math.ceil((2.5 * n) / length);
    return Array.from({ length: Math.max(0, Math.ceil(n / each) - 1) }, (_, i) => ((i + 1) * each * length) / n);
  };
  // The piece is never too small to be seen, and stands above the cuts.
  for (const y of lines(ways(rows), t)) out.append(s("path", { d: `M1 ${1 + y}h${w}`, stroke: colour(rows), "stroke-width": 0.8 }));
  for (const x of lines(ways(columns), w)) out.append(s("path", { d: `M${1 + x} 1v${t}`, stroke: colour(columns), "stroke-width": 0.8 }));
  out.append(s("rect", { x: 1, y: 1, width: Math.max(5, w / ways(columns)), height: Math.max(5, t / ways(rows)), fill: cutter }));
  return out;
}
function weights() {
  const grid = h("div", { class: "weights" });
  const one = (name, piece, each) => h("div", {}, piece ? cut(piece) : null,
    h("p", {}, h("b", {}, name), piece ? ` ${piece.dtype}` : ""), piece ? null : h("p", { class: "none" }, "–"),
    piece ? piece.dims.map((d, i) => (d.cut.length ? h("p", {}, `dim ${i} `, d.cut.flatMap(([a, n]) => [badge(a, n), " "])) : null)) : null,
    piece && piece.sum ? h("p", {}, "partial sum over ", badge(piece.sum)) : null,
    piece ? h("p", { "data-tip": exact(piece.bytes) }, sized(piece.bytes) + each) : null);
  watchers.push(() => {
    const alike = new Map();
    for (const w of D.classes[state.rank].weights || []) {
      const key = JSON.stringify([w.shape, w.stored.text, w.in_use && w.in_use.text, w.gradient && w.gradient.text, w.layers]);
      if (!alike.has(key)) alike.set(key, { ...w, names: [] });
      alike.get(key).names.push(short(w.name));
    }
    grid.replaceChildren(...[...alike.values()].map((w) => [w, w.layers.length > 1 || w.names.length > 1 ? " each" : ""]).map(([w, each]) => h("article", { class: "panel" }, h("h3", {}, w.names.join(", ")),
      h("p", { class: "label" }, `[${(w.shape || []).map(count).join(" × ")}]${w.layers.length > 1 ? ` × ${w.layers.length} layers` : w.layers.length ? `, layer ${w.layers[0]}` : ""}`),
      h("div", { class: "pieces" }, one("stored", w.stored, each), one("in use", w.in_use || w.stored, each), one("gradient", w.gradient, each)))));
  });
  section("weights", "How each weight is cut", "The filled corner is what the first rank holds; lines are the cuts, in the colour of their axis (only some of them if there are many). Weights that are split in the same way share a card.",
    h("div", { class: "row" }, rankChoice()), grid);
}
