// Collectives: a layer as a lane, all calls as rows, each with why it is there; where the time goes; two plans.

function explained(n) {
  const parts = D.explanations && D.explanations[n];
  if (!parts) return h("p", { class: "none" }, "explained for another rank class: select its pipeline rank, or run shardc explain");
  return h("div", {}, h("h3", {}, `collective:${n}`), h("dl", {}, parts.map(([name, lines]) => [h("dt", {}, name), h("dd", {}, lines.map((l) => h("div", { class: name === "line" || /%\w/.test(l) ? "mono" : null }, l)))])));
}
/** What all layers lie in, as `layers` of `model.layers.*.`: work there, in no part of a layer, is that of the residual. */
const layerList = () => (D.prefixes = D.prefixes || prefixes())[0].replace(/\.\*\.$/, "").split(".").pop();
/** Rows that differ in nothing but their place are one: equal layers of several stages, and what goes to other stages. */
function merged(rows) {
  const all = new Map();
  for (const r of rows) {
    const between = r.kind === "send" || r.kind === "recv", layers = r.first !== null;
    const key = JSON.stringify(between || layers ? [r.phase, r.kind, r.axis, r.calls, r.bytes, between] : [r.where, r.phase, r.kind, r.axis, r.bytes]);
    const one = all.get(key);
    if (!one) { all.set(key, { ...r, between, places: [r] }); continue; }
    one.places.push(r);
    one.calls_per_step += r.calls_per_step;
    one.bytes_per_step += r.bytes_per_step;
  }
  return [...all.values()];
}
/** Where the calls of a row are, in a few words and in all. */
function place(r) {
  const name = (x) => (x.first === null ? short(x.where) : x.first === x.last ? String(x.first) : `${x.first}-${x.last}`);
  const names = r.places.map(name), layers = r.first !== null, one = layers && names.length === 1 && r.first === r.last;
  const few = names.length > 4 ? `${names.slice(0, 2).join(", ")}, … ${names[names.length - 1]} (${names.length})` : names.join(", ");
  if (layers) return [`${one ? "layer" : "layers"} ${few}`, `layers ${names.join(", ")}`];
  return [r.between && names.length > 1 ? `${names.length} stages` : few, r.places.map((x) => x.where).join("\n")];
}
function collectives() {
  const lane = h("div", {}), body = h("tbody"), about = h("div", { class: "why", "aria-live": "polite" });
  let open = null;
  const draw = () => {
    const c = D.classes[state.rank], calls = merged(c.calls), most = Math.max(1, ...calls.map((r) => r.bytes_per_step)), list = layerList();
    lane.replaceChildren();
    if (c.lane) {
      lane.append(h("h3", {}, `One layer (${c.lane.layer}), one microbatch`));
      for (const p of c.lane.phases) lane.append(h("div", { class: "lane" }, h("b", {}, p.phase), h("div", {}, p.items.map((i) => i.kind
        ? h("button", { type: "button", class: "pill", style: `background:var(--${family(i.axis)})`, "data-tip": exact(i.bytes), onclick: () => about.replaceChildren(explained(i.number)) }, `${i.kind.replace(/_/g, "-")} · ${i.axis} · ${sized(i.bytes)}`)
        : h("span", { class: "work" }, `${!i.scope || i.scope === list ? "residual" : i.scope} · ${i.ops} op${i.ops > 1 ? "s" : ""}`)))));
      lane.append(about);
    } else lane.append(h("p", { class: "none" }, "no layer"));
    about.replaceChildren();
    body.replaceChildren(...calls.flatMap((r, i) => {
      const n = r.numbers[0], [where, all] = place(r), silent = r.kind === "recv";
      const shown = open === i && n ? h("tr", { class: "why" }, h("td", { colspan: 7 }, explained(n))) : null;
      const name = `${r.calls > 1 && r.phase !== "step" ? r.calls + " × " : ""}${r.kind.replace(/_/g, "-")}`;
      return [h("tr", {}, h("td", { class: "place", "data-tip": all }, where), h("td", {}, r.phase), h("td", {}, n ? h("button", { type: "button", class: "link", "aria-expanded": open === i, onclick: () => { open = open === i ? null : i; draw(); } }, name) : name),
        h("td", {}, badge(r.axis)), h("td", { class: "n" }, count(r.calls_per_step)), h("td", { class: "n", "data-tip": exact(r.bytes) }, silent || r.phase === "step" ? "–" : sized(r.bytes)),
        h("td", { class: "n track", "data-tip": exact(r.bytes_per_step) }, h("div", { class: "sum" }, h("div", {}, meter(silent ? 0 : r.bytes_per_step, most, family(r.axis))), silent ? "–" : sized(r.bytes_per_step)))), shown].filter(Boolean);
    }));
  };
  watchers.push(draw);
  section("collectives", "Collectives", "What one rank sends, assuming ring algorithms. Select a row or a pill to see why the collective is there, its mirror in backward, and what would remove it.",
    h("div", { class: "row" }, rankChoice()), h("div", { class: "panel", style: "margin-bottom:12px" }, lane),
    h("div", { class: "panel scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, ["Where", "Phase", "Call", "Axis", "Calls per step", "Sent per layer and microbatch", "Sent per step"].map((x, i) => h("th", { class: i > 3 ? "n one" : "" }, x)))), body)));
}

const PARTS = {
  products: ["products", "products (matrix multiplication)"], attention: ["attention", "attention"], memory: ["kernels", "memory-bound kernels"], recompute: ["recompute", "recompute"],
  tp: ["tp", "tp"], cp: ["cp", "cp"], ep: ["ep", "ep"], send: ["pp", "sends between stages"], bubble: ["hatch", "bubble"], dp: ["dp", "dp"], optimizer: ["update", "optimizer"],
};
/** The colour of a part of a step, and what it is called. */
const part = (name) => PARTS[name] || ["edge", name];
/** Whether the largest peak fits the device, with what may lie beside it. */
function fit(t) {
  const peak = Math.max(...D.classes.map((c) => c.peak_bytes)), beside = t.beside ? `, and beside the plan up to ${sized(t.beside)} for the driver's context, NCCL's buffers and cuBLASLt` : "";
  const of = `${sized(peak)} of ${sized(t.memory)}${beside}`;
  if (peak > t.memory) return h("p", { class: "over", style: "margin:2px 0" }, `does not fit: ${of}`);
  return h("p", { class: peak + t.beside > t.memory ? "over" : "label", style: "margin:2px 0" }, peak + t.beside > t.memory ? `may not fit: ${of}` : `memory: ${of}`);
}
/** Functions that a step calls as often and that take as long are one row. */
function functions(all) {
  const out = new Map();
  for (const f of all) {
    const key = f.calls + seconds(f.seconds);
    if (!out.has(key)) out.set(key, { ...f, names: [] });
    out.get(key).names.push("@" + f.name);
  }
  return [...out.values()].map((f) => ({ ...f, name: f.names.length > 3 ? `${f.names[0]}, ${f.names[1]}, … ${f.names[f.names.length - 1]} (${f.names.length})` : f.names.join(", ") }));
}
const track = (n, whole, colour) => h("td", { class: "track" }, meter(n, whole, colour));
function times() {
  const t = D.time, m = D.measured, out = [];
  if (t) {
    const of = D.facts.pipeline > 1 ? `; for pipeline rank ${t.class}, which finishes last` : "";
    const parts = t.parts.map(([name, n]) => [...part(name), n]).map(([colour, name, n]) => [colour, name + (name === "bubble" ? ` of pipeline rank ${t.class}` : ""), n]);
    out.push(h("div", { class: "panel" }, h("p", { class: "label" }, `A step on ${t.device}, ${t.precision}${of}`), h("p", { class: "big", style: "font-size:32px;margin:0" }, seconds(t.step_s)), fit(t),
      h("p", { class: "label" }, `${count(Math.round(t.tokens_per_s))} tokens/s${t.mfu === null ? "" : `, ${(100 * t.mfu).toFixed(1)} % of the peak`}. ${t.trust[0].toUpperCase() + t.trust.slice(1)}.`),
      bar(parts.map(([colour, name, n]) => [colour, n, name, `${name} ${seconds(n)}`]), t.step_s),
      h("table", { class: "list" }, parts.map(([colour, name, n]) => h("tr", {}, h("td", {}, swatch(colour), name), h("td", { class: "n" }, seconds(n)), h("td", { class: "n" }, percent(n, t.step_s)), track(n, t.step_s, colour))))));
    const head = (names) => h("tr", {}, names.map((x, i) => h("th", { class: i ? "n" : "" }, x)));
    const longest = Math.max(...t.launches.map((l) => l.seconds), 1e-12);
    out.push(h("div", { class: "panel scroll", style: "margin-top:12px" }, h("h3", {}, "Its functions, and what takes most of the time"),
      h("table", { class: "list" }, head(["function", "calls", "each", "in all"]),
        functions(t.functions).map((f) => h("tr", {}, h("td", { class: "mono" }, f.name),
          h("td", { class: "n" }, count(f.calls) + (f.names.length > 1 ? " each" : "")), h("td", { class: "n" }, seconds(f.seconds)),
          h("td", { class: "n" }, seconds(f.seconds * f.calls * f.names.length))))),
      h("table", { class: "list", style: "margin-top:10px" },
        head(["launch or exchange", "calls of its function", "total, if nothing overlaps", ""]),
        t.launches.map((l) => h("tr", {}, h("td", {}, l.what), h("td", { class: "n" }, count(l.calls)),
          h("td", { class: "n" }, seconds(l.seconds)), track(l.seconds, longest, "accent"))))));
  }
  if (m) {
    const sum = m.rows.reduce((n, r) => n + r.measured_ms, 0), planned = m.rows.reduce((n, r) => n + (r.planned_ms || 0), 0);
    out.push(h("div", { class: "panel scroll", style: "margin-top:12px" }, h("h3", {}, "As planned, and as measured in a run: means over its steps and ranks"),
      h("table", { class: "list" }, h("tr", {}, ["stage or rank", "what", "planned", "share", "measured", "share", "measured ÷ planned"].map((x, i) => h("th", { class: i > 1 ? "n" : "" }, x))),
        m.rows.map((r) => h("tr", {}, h("td", {}, r.stage), h("td", {}, ACTIONS[r.kind] ? ACTIONS[r.kind][0] : r.kind), h("td", { class: "n" }, r.planned_ms === null ? "–" : seconds(r.planned_ms / 1e3)), h("td", { class: "n" }, r.planned_ms === null ? "–" : percent(r.planned_ms, planned)),
          h("td", { class: "n" }, seconds(r.measured_ms / 1e3)), h("td", { class: "n" }, percent(r.measured_ms, sum)), h("td", { class: "n" }, r.planned_ms ? (r.measured_ms / r.planned_ms).toFixed(2) : "–"))))));
  }
  if (out.length) section("cost", "Where the time goes", t ? "Estimated times of every launch and exchange of the programs, simulated on all pipeline ranks." : "As measured in a run; give --machine to compare with an estimate.", ...out);
}

function compare() {
  const o = D.compare;
  if (!o) return;
  const most = (d) => d.classes.reduce((a, b) => (b.peak_bytes > a.peak_bytes ? b : a));
  const busiest = (d) => d.classes.reduce((a, b) => (total(b.sent) > total(a.sent) ? b : a));
  const rows = [], row = (name, a, b, show) => rows.push([name, a, b, show]);
  row("peak memory of a rank", most(D).peak_bytes, most(o).peak_bytes, sized);
  rows.push(["at the peak"]);
  for (const [k, name] of KINDS) row(name, most(D).at_peak[k] || 0, most(o).at_peak[k] || 0, sized);
  row("sent per step by the rank that sends most", total(busiest(D).sent), total(busiest(o).sent), sized);
  const axes = [...new Set([D, o].flatMap((d) => busiest(d).sent.map((x) => x.axis)))].sort();
  for (const axis of axes) row("over " + axis, ...[D, o].map((d) => (busiest(d).sent.find((x) => x.axis === axis) || { bytes: 0 }).bytes), sized);
  row("bubble: idle ÷ total time, stages taking equally long", D.facts.bubble, o.facts.bubble, (x) => (100 * x).toFixed(1) + " %");
  if (D.time && o.time) {
    row("bubble as priced: idle ÷ total time", D.timeline.bubble, o.timeline.bubble, (x) => (100 * x).toFixed(1) + " %");
    row("step, by price", D.time.step_s, o.time.step_s, seconds);
    for (const name of new Set([...D.time.parts, ...o.time.parts].map((p) => p[0]))) row("of it " + part(name)[1], ...[D, o].map((d) => (d.time.parts.find((p) => p[0] === name) || [0, 0])[1]), seconds);
  }
  const length = (n, whole) => h("td", { class: "track", style: "width:22%" }, meter(n, whole, "accent"));
  const settings = D.settings.flatMap((g, i) => g.rows.map(([k, v], j) => [k, v, ((o.settings[i] || { rows: [] }).rows[j] || ["", "–"])[1]])).filter(([, a, b]) => a !== b);
  section("compare", "Two plans", `This plan, and ${o.title}.`, h("div", { class: "panel scroll" }, h("table", { class: "list" }, h("tr", {}, ["", "this plan", "", "the other", "", "other ÷ this"].map((x, i) => h("th", { class: i === 1 || i === 3 || i === 5 ? "n" : "" }, x))),
    rows.filter((r) => !r[3] || r[1] || r[2]).map(([name, a, b, show]) => (!show ? h("tr", {}, h("th", { colspan: 6 }, name)) : h("tr", {}, h("td", {}, name), h("td", { class: "n" }, show(a)), length(a, Math.max(a, b)), h("td", { class: "n" }, show(b)), length(b, Math.max(a, b)), h("td", { class: "n" }, a ? (b / a).toFixed(2) : "–")))))),
    h("div", { class: "panel", style: "margin-top:12px" }, h("h3", {}, "Settings that differ"), settings.length ? h("table", { class: "list" }, h("tr", {}, ["setting", "this plan", "the other"].map((x) => h("th", {}, x))), settings.map((r) => h("tr", {}, r.map((x) => h("td", {}, x))))) : h("p", { class: "none" }, "none")));
}
