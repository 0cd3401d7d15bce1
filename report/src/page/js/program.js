// The program: only lines that are seen exist. Then what begins it all.

function program(text) {
  const lines = text.split("\n"), funcs = [], LINE = 19;
  lines.forEach((l, i) => { const m = /^func @(\S+?)\(/.exec(l); if (m) funcs.push({ name: m[1], line: i }); });
  funcs.forEach((f, k) => {
    f.end = k + 1 < funcs.length ? funcs[k + 1].line : lines.length;
    f.body = f.line;
    while (f.body < f.end - 1 && !/^\S.*\{\s*$/.test(lines[f.body])) f.body++;
    f.folded = f.body - f.line > 2;
  });
  const ofLine = (i) => { let lo = 0, hi = funcs.length - 1, at = -1; while (lo <= hi) { const mid = (lo + hi) >> 1; if (funcs[mid].line <= i) { at = mid; lo = mid + 1; } else hi = mid - 1; } return at < 0 ? null : funcs[at]; };
  let seen = [], hits = [], hit = -1, marked = null;
  const layout = () => { seen = []; for (let i = 0; i < lines.length; i++) { const f = ofLine(i); if (f && f.folded && i > f.line && i < f.body) continue; seen.push(i); } };
  layout();
  const pre = h("pre"), room = h("div", { style: "width:1px" }), code = h("div", { class: "panel code", tabindex: 0, role: "region", "aria-label": "program" }, room, pre);
  const word = /(%[A-Za-z0-9_.{}\-+]+)|(\/\/.*$)|(@[A-Za-z_][\w.]*)|\b(func|mesh|repeat|return|in|is|at)\b|\b(all_reduce|all_gather|reduce_scatter|all_to_all_v|all_to_all|permute)\b/g;
  const spans = (i) => {
    const out = [], l = lines[i];
    let at = 0;
    for (const m of l.matchAll(word)) {
      if (m.index > at) out.push(l.slice(at, m.index));
      if (m[1]) out.push(h("span", { class: "v" + (marked && marked.name === m[1] && ofLine(i) === marked.func ? " use" : "") }, m[1]));
      else out.push(h("span", { class: m[2] ? "cm" : m[4] ? "kw" : m[5] ? "cl" : "" }, m[0]));
      at = m.index + m[0].length;
    }
    out.push(l.slice(at));
    return out;
  };
  const draw = () => {
    room.style.height = seen.length * LINE + "px";
    const first = Math.max(0, Math.floor(code.scrollTop / LINE) - 10), last = Math.min(seen.length, first + Math.ceil(code.clientHeight / LINE) + 20);
    pre.style.top = first * LINE + "px";
    pre.replaceChildren(...seen.slice(first, last).map((i) => {
      const f = ofLine(i), folds = f && f.line === i && f.body - f.line > 2;
      return h("span", { class: "ln" + (i === hits[hit] ? " hit" : ""), "data-line": i }, h("span", { class: "no" }, String(i + 1)),
        folds ? h("button", { type: "button", class: "fold", "aria-expanded": !f.folded, "aria-label": "signature of @" + f.name, onclick: () => { f.folded = !f.folded; layout(); draw(); } }, f.folded ? "▸" : "▾") : null,
        spans(i), folds && f.folded ? h("span", { class: "cm" }, ` … ${f.body - f.line - 1} lines`) : null);
    }));
  };
  const go = (i) => { const f = ofLine(i); if (f && f.folded && i > f.line && i < f.body) { f.folded = false; layout(); } code.scrollTop = Math.max(0, seen.indexOf(i) * LINE - code.clientHeight / 3); draw(); };
  const sizes = Object.fromEntries(D.mesh.axes.map((a) => [a.name, a.size]));
  /** What a rank holds of a type: sizes and bytes. */
  const local = (type) => {
    const m = /^(f32|bf16|f16|i32|i64|u8)\[([^\]]*)\]/.exec(type);
    if (!m) return "";
    const dims = m[2].split(",").filter(Boolean).map((d) => {
      const [n, cuts] = d.split("@");
      const ways = (cuts || "").split("*").filter(Boolean).reduce((k, a) => k * (Number((/\)(\d+)$/.exec(a) || [])[1]) || sizes[a] || 1), 1);
      return Math.ceil(Number(n) / ways);
    });
    const each = { f32: 4, i32: 4, bf16: 2, f16: 2, i64: 8, u8: 1 }[m[1]];
    return `\non a rank [${dims.join(", ")}], ${sized(dims.reduce((a, b) => a * b, each))}`;
  };
  const defined = (name, f) => {
    for (let i = f.line; i < f.end; i++) {
      const l = lines[i], at = l.indexOf(name);
      if (at < 0) continue;
      const equals = l.indexOf(" = "), after = l[at + name.length];
      if (/[\w.]/.test(after || "")) continue;
      if (i <= f.body ? after === ":" : equals > at) {
        const rest = i <= f.body ? l.slice(at + name.length + 1).trim() : l.slice(l.lastIndexOf(" : ") + 3);
        return { line: i, type: rest.replace(/\s*\/\/.*$/, "").replace(/,\s*$/, "") };
      }
    }
    return null;
  };
  pre.addEventListener("mousemove", (e) => {
    const v = e.target.closest(".v"), f = v && ofLine(Number(v.closest(".ln").dataset.line));
    const d = f && defined(v.textContent, f);
    say(d ? `${v.textContent} : ${d.type.slice(0, 240)}${local(d.type)}` : "", e.clientX, e.clientY);
  });
  pre.addEventListener("click", (e) => {
    const v = e.target.closest(".v");
    if (!v) return;
    const f = ofLine(Number(v.closest(".ln").dataset.line));
    marked = f ? { name: v.textContent, func: f } : null;
    const d = f && defined(v.textContent, f);
    if (d) go(d.line); else draw();
  });
  code.addEventListener("scroll", draw, { passive: true });
  new ResizeObserver(draw).observe(code);
  const said = h("span", { class: "label", role: "status" });
  const find = h("input", { type: "search", placeholder: "Search the program ( / )", "aria-label": "search the program", id: "find" });
  const step = (by) => { if (!hits.length) return; hit = (hit + by + hits.length) % hits.length; said.textContent = `${hit + 1} of ${count(hits.length)}`; go(hits[hit]); };
  find.addEventListener("input", () => {
    const q = find.value;
    hits = q ? lines.reduce((all, l, i) => (l.includes(q) ? (all.push(i), all) : all), []) : [];
    hit = -1;
    said.textContent = q && !hits.length ? "not there" : "";
    if (hits.length) step(1); else draw();
  });
  find.addEventListener("keydown", (e) => { if (e.key === "Enter") { e.preventDefault(); step(e.shiftKey ? -1 : 1); } if (e.key === "Escape") { find.value = ""; find.dispatchEvent(new Event("input")); find.blur(); } });
  const unfold = h("button", { type: "button", onclick: () => { const to = funcs.some((f) => f.folded); funcs.forEach((f) => { f.folded = !to && f.body - f.line > 2; }); unfold.textContent = to ? "Fold signatures" : "Unfold signatures"; layout(); draw(); } }, "Unfold signatures");
  section("program", "Program", "What ranks run, with the types of all values. Layers that differ only in their numbers are shown once, as repeat. Point at a value to see its type; select it to see its definition and all its uses.",
    h("div", { class: "row" }, find, h("button", { type: "button", "aria-label": "search backward", onclick: () => step(-1) }, "↑"), h("button", { type: "button", "aria-label": "search forward", onclick: () => step(1) }, "↓"), said, h("span", { class: "end" }, unfold)),
    h("div", { class: "program" }, h("div", { class: "panel funcs" }, funcs.map((f) => h("button", { type: "button", onclick: () => go(f.line) }, h("span", { class: "mono" }, "@" + f.name), h("span", { class: "none" }, String(f.end - f.line))))), code));
  draw();
}

function keys(time) {
  const all = [
    ["1 – 9", "sections"], ["J, K", "next, previous pipeline rank"], ["T", "theme: system, light, dark"],
    ["/", "search the program; Enter, Shift-Enter step"], ["← → + − 0", "in the timeline: pan, zoom, whole step"],
    ["arrows", "in the mesh: select a rank"], ["?", "these keys"], ["Esc", "close"],
  ];
  const box = document.getElementById("keys"), button = document.getElementById("help");
  box.append(h("table", {}, all.map(([k, w]) => h("tr", {}, h("td", {}, h("kbd", {}, k)), h("td", {}, w)))));
  const toggle = (to) => { box.hidden = !to; button.setAttribute("aria-expanded", String(to)); };
  button.addEventListener("click", () => toggle(box.hidden));
  document.getElementById("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % 3]));
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName)) return;
    const to = (by) => { state.rank = (state.rank + by + D.classes.length) % D.classes.length; changed(); };
    const link = /^[1-9]$/.test(e.key) && document.querySelector(`#links a[data-key="${e.key}"]`);
    if (link) { location.hash = link.getAttribute("href"); return; }
    const acts = {
      j: () => to(1),
      k: () => to(-1),
      t: () => document.getElementById("theme").click(),
      "/": () => { const f = document.getElementById("find"); if (f) f.focus(); },
      "?": () => toggle(box.hidden),
      Escape: () => { toggle(false); say(""); },
      0: e.target.tagName === "CANVAS" ? null : time.all,
    };
    const act = acts[e.key.length === 1 ? e.key.toLowerCase() : e.key];
    if (act) { e.preventDefault(); act(); }
  });
  const links = [...document.querySelectorAll("#links a")];
  const near = () => {
    const above = links.filter((l) => document.querySelector(l.getAttribute("href")).getBoundingClientRect().top < innerHeight / 3);
    links.forEach((l) => l.setAttribute("aria-current", String(l === (above[above.length - 1] || links[0]))));
  };
  addEventListener("scroll", near, { passive: true });
  near();
}

(async () => {
  try {
    D = JSON.parse(await unpack("data"));
    if (D.version !== 1) throw new Error(`data version ${D.version}`);
    state.limit = D.facts.limit || (D.time && D.time.memory) || null;
    state.rank = D.classes.reduce((a, b) => (b.peak_bytes > a.peak_bytes ? b : a)).class;
    theme = "system";
    document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    overview();
    mesh();
    const time = timeline();
    treemap();
    weights();
    collectives();
    times();
    compare();
    changed();
    performance.mark("usable");
    await new Promise((done) => setTimeout(done));
    program(await unpack("text"));
    document.getElementById("page").append(h("footer", {}, `shardc ${D.shardc} · a single file that loads nothing else`));
    keys(time);
    if (location.hash) { const e = document.querySelector(location.hash); if (e) e.scrollIntoView(); }
    performance.mark("ready");
    document.documentElement.dataset.ready = "yes";
  } catch (e) {
    const box = document.getElementById("failed");
    box.hidden = false;
    box.textContent = "This page cannot be displayed: " + e.message + ". It needs a browser from 2023 or later.";
    throw e;
  }
})();
