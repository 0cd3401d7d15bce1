// Collectives: a layer as a lane, all calls as rows, each with why it is there; where the time goes; two plans.

function explained(n) {
  const parts = D.explanations && D.explanations[n];
  if (!parts) return h("p", { class: "none" }, "explained for another rank class: select its pipeline rank, or run shardc explain");
  return h("div", {}, h("h3", {}, `collective:${n}`), h("dl", {}, parts.map(([name, lines]) => [h("dt", {}, name), h("dd", {}, lines.map((l) => h("div", { class: name === "line" ? "mono" : "" }, l)))])));
}
function collectives() {
  const lane = h("div", {}), body = h("tbody"), about = h("div", { class: "why", "aria-live": "polite" });
  let open = null;
  const draw = () => {
    const c = D.classes[state.rank], most = Math.max(1, ...c.calls.map((r) => r.bytes_per_step));
    lane.replaceChildren();
    if (c.lane) {
      lane.append(h("h3", {}, `One layer (${c.lane.layer}), one microbatch`));
      for (const p of c.lane.phases) lane.append(h("div", { class: "lane" }, h("b", {}, p.phase), p.items.map((i) => i.kind
        ? h("button", { type: "button", class: "pill", style: `background:var(--${family(i.axis)})`, "data-tip": exact(i.bytes), onclick: () => about.replaceChildren(explained(i.number)) }, `${i.kind.replace(/_/g, "-")} · ${i.axis} · ${sized(i.bytes)}`)
        : h("span", { class: "work" }, `${i.scope || "–"} · ${i.ops} op${i.ops > 1 ? "s" : ""}`))));
      lane.append(about);
    } else lane.append(h("p", { class: "none" }, "no layer"));
    about.replaceChildren();
    body.replaceChildren(...c.calls.flatMap((r, i) => {
      const n = r.numbers[0], place = r.first === null ? r.where : r.first === r.last ? `layer ${r.first}` : `layers ${r.first}-${r.last}`;
      const shown = open === i && n ? h("tr", { class: "why" }, h("td", { colspan: 7 }, explained(n))) : null;
      const name = `${r.calls > 1 ? r.calls + " × " : ""}${r.kind.replace(/_/g, "-")}`;
      const unit = r.where === "once per step" ? "" : r.first !== null ? " per layer, microbatch" : " per microbatch";
      const style = `width:${(100 * r.bytes_per_step) / most}px;background:var(--${family(r.axis)})`;
      return [h("tr", {}, h("td", { class: "place", "data-tip": place }, place), h("td", {}, r.phase), h("td", {}, n ? h("button", { type: "button", class: "link", "aria-expanded": open === i, onclick: () => { open = open === i ? null : i; draw(); } }, name) : name),
        h("td", {}, badge(r.axis)), h("td", { class: "n" }, count(r.calls_per_step)), h("td", { class: "n", "data-tip": exact(r.bytes) }, r.kind === "recv" ? "–" : sized(r.bytes) + unit),
        h("td", { class: "n", "data-tip": exact(r.bytes_per_step), style: "min-width:190px" },
          h("div", { style: "display:flex;gap:8px;align-items:center" }, h("div", { class: "meter", style }),
            r.kind === "recv" ? "–" : sized(r.bytes_per_step)))), shown].filter(Boolean);
    }));
  };
  watchers.push(draw);
  section("collectives", "Collectives", "What one rank sends, assuming ring algorithms. Select a row or a pill to see why the collective is there, its mirror in backward, and what would remove it.",
    h("div", { class: "row" }, rankChoice()), h("div", { class: "panel", style: "margin-bottom:12px" }, lane),
    h("div", { class: "panel scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, ["Where", "Phase", "Call", "Axis", "Calls per step", "Sent each time", "Sent per step"].map((x, i) => h("th", { class: i > 3 && i < 6 ? "n one" : "" }, x)))), body)));
}

const seconds = (t) => (t >= 1 ? `${t.toFixed(2)} s` : t >= 1e-3 ? `${(t * 1e3).toFixed(2)} ms` : `${(t * 1e6).toFixed(1)} µs`);
const PARTS = { products: "f", attention: "weights", memory: "temporaries", recompute: "w", tp: "tp", cp: "cp", ep: "ep", send: "pp", bubble: "hatch", dp: "dp", optimizer: "optimizer" };
function times() {
  const t = D.time, m = D.measured, out = [];
  if (t) {
    const meter = (n, whole, colour) => h("td", { style: "width:34%" }, h("div", { class: "meter", style: `width:${(100 * n) / whole}%;background:var(--${colour})` }));
    out.push(h("div", { class: "panel" }, h("p", { class: "label" }, `A step on ${t.device}, ${t.precision}; for pipeline rank ${t.class}, which finishes last`), h("p", { class: "big", style: "font-size:32px;margin:0" }, seconds(t.step_s)),
      h("p", { class: "label" }, `${count(Math.round(t.tokens_per_s))} tokens/s${t.mfu === null ? "" : `, ${(100 * t.mfu).toFixed(1)} % of the peak`}. ${t.trust}.`),
      bar(t.parts.map(([name, n]) => [PARTS[name] || "edge", n, name, `${name} ${seconds(n)}`]), t.step_s),
      h("table", { class: "list" }, t.parts.map(([name, n]) => h("tr", {}, h("td", {}, swatch(PARTS[name] || "edge"), name), h("td", { class: "n" }, seconds(n)), h("td", { class: "n" }, percent(n, t.step_s)), meter(n, t.step_s, PARTS[name] || "edge"))))));
    const head = (names) => h("tr", {}, names.map((x, i) => h("th", { class: i ? "n" : "" }, x)));
    const longest = Math.max(...t.launches.map((l) => l.seconds), 1e-12);
    out.push(h("div", { class: "panel scroll", style: "margin-top:12px" }, h("h3", {}, "Its functions, and what takes most of the time"),
      h("table", { class: "list" }, head(["function", "calls", "each", "in all"]),
        t.functions.map((f) => h("tr", {}, h("td", { class: "mono" }, "@" + f.name),
          h("td", { class: "n" }, count(f.calls)), h("td", { class: "n" }, seconds(f.seconds)),
          h("td", { class: "n" }, seconds(f.seconds * f.calls))))),
      h("table", { class: "list", style: "margin-top:10px" },
        head(["launch or exchange", "calls of its function", "total, if nothing overlaps", ""]),
        t.launches.map((l) => h("tr", {}, h("td", { class: "mono" }, l.what), h("td", { class: "n" }, count(l.calls)),
          h("td", { class: "n" }, seconds(l.seconds)), meter(l.seconds, longest, "accent"))))));
  }
  if (m) {
    const sum = m.rows.reduce((n, r) => n + r.measured_ms, 0), planned = m.rows.reduce((n, r) => n + (r.planned_ms || 0), 0);
    out.push(h("div", { class: "panel scroll", style: "margin-top:12px" }, h("h3", {}, "As planned, and as measured in a run: means over its steps and ranks"),
      h("table", { class: "list" }, h("tr", {}, ["stage or rank", "what", "planned", "share", "measured", "share", "measured ÷ planned"].map((x, i) => h("th", { class: i > 1 ? "n" : "" }, x))),
        m.rows.map((r) => h("tr", {}, h("td", {}, r.stage), h("td", {}, ACTIONS[r.kind] ? ACTIONS[r.kind][0] : r.kind), h("td", { class: "n" }, r.planned_ms === null ? "–" : seconds(r.planned_ms / 1e3)), h("td", { class: "n" }, r.planned_ms === null ? "–" : percent(r.planned_ms, planned)),
          h("td", { class: "n" }, seconds(r.measured_ms / 1e3)), h("td", { class: "n" }, percent(r.measured_ms, sum)), h("td", { class: "n" }, r.planned_ms ? (r.measured_ms / r.planned_ms).toFixed(2) : "–"))))));
  }
  if (out.length) section("cost", "Where the time goes", t ? "Estimated times of every launch and exchange of the programs, simulated on all pipeline ranks." : "As measured in a run; give --device to compare with an estimate.", ...out);
}

function compare() {
  const o = D.compare;
  if (!o) return;
  const most = (d) => d.classes.reduce((a, b) => (b.peak_bytes > a.peak_bytes ? b : a));
  const busiest = (d) => d.classes.reduce((a, b) => (total(b.sent) > total(a.sent) ? b : a));
  const rows = [], row = (name, a, b, show) => rows.push([name, a, b, show]);
  row("peak memory of a rank", most(D).peak_bytes, most(o).peak_bytes, sized);
  for (const [k, name] of KINDS) row(name, most(D).at_peak[k] || 0, most(o).at_peak[k] || 0, sized);
  row("sent per step by the rank that sends most", total(busiest(D).sent), total(busiest(o).sent), sized);
  const axes = [...new Set([D, o].flatMap((d) => busiest(d).sent.map((x) => x.axis)))].sort();
  for (const axis of axes) row("over " + axis, ...[D, o].map((d) => (busiest(d).sent.find((x) => x.axis === axis) || { bytes: 0 }).bytes), sized);
  row("bubble: idle ÷ total time, stages taking equally long", D.facts.bubble, o.facts.bubble, (x) => (100 * x).toFixed(1) + " %");
  if (D.time && o.time) {
    row("step, by price", D.time.step_s, o.time.step_s, seconds);
    for (const name of new Set([...D.time.parts, ...o.time.parts].map((p) => p[0]))) row("of it " + name, ...[D, o].map((d) => (d.time.parts.find((p) => p[0] === name) || [0, 0])[1]), seconds);
  }
  const meter = (n, whole) => h("td", { style: "width:22%" }, h("div", { class: "meter", style: `width:${whole ? (100 * n) / whole : 0}%;background:var(--accent)` }));
  const settings = D.settings.flatMap((g, i) => g.rows.map(([k, v], j) => [k, v, ((o.settings[i] || { rows: [] }).rows[j] || ["", "–"])[1]])).filter(([, a, b]) => a !== b);
  section("compare", "Two plans", `This plan, and ${o.title}.`, h("div", { class: "panel scroll" }, h("table", { class: "list" }, h("tr", {}, ["", "this plan", "", "the other", "", "other ÷ this"].map((x, i) => h("th", { class: i === 1 || i === 3 || i === 5 ? "n" : "" }, x))),
    rows.filter((r) => r[1] || r[2]).map(([name, a, b, show]) => h("tr", {}, h("td", {}, name), h("td", { class: "n" }, show(a)), meter(a, Math.max(a, b)), h("td", { class: "n" }, show(b)), meter(b, Math.max(a, b)), h("td", { class: "n" }, a ? (b / a).toFixed(2) : "–"))))),
    h("div", { class: "panel", style: "margin-top:12px" }, h("h3", {}, "Settings that differ"), settings.length ? h("table", { class: "list" }, h("tr", {}, ["setting", "this plan", "the other"].map((x) => h("th", {}, x))), settings.map((r) => h("tr", {}, r.map((x) => h("td", {}, x))))) : h("p", { class: "none" }, "none")));
}
