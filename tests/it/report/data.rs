//! What a page of a report holds, against its schema and the plan.

use serde_json::{Value as Json, json};
use shardc::page::{Asked, PAGE, SCRIPT, STYLE, data, filled, of, page};
use shardc::pictures::step::{Lengths, Step};
use shardc::pictures::svg::escape;
use shardc::report::report;
use shardc::stored::Stored;
use shardc_passes::options::{Options, Order};
use shardc_testing::schema::misfit;
use std::collections::BTreeMap;
use std::path::Path;

/// The schema of what a page holds.
const SCHEMA: &str = include_str!("../../../docs/schemas/report.json");

fn fixture(model: &str, mesh: &[(&str, usize)], set: impl Fn(&mut Options)) -> Stored {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(model);
    let mesh = mesh.iter().map(|(n, s)| (n.to_string(), *s)).collect();
    let mut o = Options { mesh, global_batch: 8, microbatch: 1, seq: 16, ..Options::default() };
    set(&mut o);
    shardc::compile(&dir, &o, &mut |_, _| {}).expect("it compiles").stored
}

fn plans() -> Vec<Stored> {
    vec![
        fixture("gpt2", &[], |_| {}),
        fixture("llama_deep", &[("pp", 4), ("tp", 2)], |o| (o.sp, o.node) = (true, Some(2))),
        fixture("llama_deep", &[("pp", 2), ("dp_shard", 2), ("tp", 2)], |o| {
            o.schedule = Order::Named("zb-h1".into());
            (o.zero, o.dtype, o.memory) = (1, shardc_ir::types::DType::BF16, Some(1 << 30));
        }),
        fixture("deepseek_v3", &[("dp_shard", 2), ("tp", 2)], |o| {
            (o.ep, o.etp, o.sp, o.zero) = (4, Some(1), true, 1);
        }),
        fixture("llama_deep", &[("pp", 2)], |o| o.mode = shardc_ir::plan::Mode::Infer),
    ]
}

fn list(v: &Json) -> &[Json] {
    v.as_array().map_or(&[], Vec::as_slice)
}

fn sum(all: &[Json], key: &str) -> u64 {
    all.iter().map(|x| x[key].as_u64().expect("a whole number")).sum()
}

/// A stack of experts is cut over ep, nothing else is; what is left of a dim is cut over the other axes.
#[test]
fn experts_are_cut_over_ep() {
    let d = data(&plans()[3], &Asked::default()).expect("data");
    let weights = list(&d["classes"][0]["weights"]);
    let of_experts = |w: &&Json| w["name"].as_str().is_some_and(|n| n.contains(".experts."));
    let (stacks, others): (Vec<&Json>, Vec<&Json>) = weights.iter().partition(of_experts);
    let stacks: Vec<&&Json> = stacks.iter().filter(|w| list(&w["shape"]).len() == 3).collect();
    assert!(!stacks.is_empty() && !others.is_empty());
    for w in stacks {
        for at in ["stored", "in_use", "gradient"].iter().filter(|at| !w[**at].is_null()) {
            let dims = list(&w[*at]["dims"]);
            assert_eq!(dims[0]["cut"][0], json!(["ep", 4]), "{at} of {w}");
            assert!(dims[1..].iter().all(|d| !d["cut"].to_string().contains("ep")), "{at} of {w}");
        }
    }
    assert!(others.iter().all(|w| !w.to_string().contains("\"ep\"")), "{others:?}");
}

#[test]
fn the_data_are_as_the_schema_has_them() {
    let schema: Json = serde_json::from_str(SCHEMA).expect("JSON");
    let device = shardc::machine::device("h100-sxm").expect("a machine");
    let plans = plans();
    for s in &plans {
        for device in [None, Some(&device)] {
            let asked = Asked { device, ..Asked::default() };
            let d = data(s, &asked).expect("data");
            assert_eq!(misfit(&schema, &d), None);
            assert_eq!(d.get("time").is_some(), device.is_some());
        }
    }
    let mut wrong = data(&plans[0], &Asked::default()).expect("data");
    wrong["classes"][0]["tensors"][0]["bytes"] = json!(1.5);
    assert!(misfit(&schema, &wrong).is_some_and(|m| m.contains("tensors[0].bytes")));
    wrong["classes"] = json!([]);
    wrong["more"] = json!(1);
    assert!(misfit(&schema, &wrong).is_some_and(|m| m.contains("more")));
}

/// Every number is that of the plan, to the byte.
#[test]
fn the_data_are_the_plans() {
    for s in plans() {
        let d = data(&s, &Asked::default()).expect("data");
        let compiled = report(&s.plan, &[], None);
        assert_eq!(list(&d["classes"]).len(), s.plan.classes.len());
        let step = Step::of(&s.plan, Lengths::unit(&s.plan, &s.options)).expect("a schedule");
        let classes = list(&d["classes"]).iter().zip(&s.plan.classes).zip(&compiled.per_class);
        for (rank, ((c, own), r)) in classes.enumerate() {
            let peak = own.memory.peak_bytes as u64;
            assert_eq!(c["peak_bytes"], peak);
            let kinds: u64 =
                c["at_peak"].as_object().into_iter().flatten().filter_map(|x| x.1.as_u64()).sum();
            assert_eq!((kinds, sum(list(&c["tensors"]), "bytes")), (peak, peak));
            // Memory over time counts frames: its top is that of all moments, between what is alive
            // at once in a step and the arena; a kind that lies in no frame is its bytes at the peak.
            let most = most_of(&c["memory"]);
            let all = step.memory(&s.plan, rank);
            assert_eq!(Some(most), all.iter().map(|x| x.total() as u64).max());
            assert!(own.memory.live_bytes as u64 <= most && most <= peak, "{most} {peak}");
            for &(kind, n) in &own.memory.whole {
                let name = json!(kind);
                let name = name.as_str().expect("a word");
                let at_peak = c["at_peak"][name].as_u64();
                if at_peak == Some(n as u64) && own.memory.spans.iter().all(|x| x.class != kind) {
                    assert_eq!(c["memory"]["bytes"][name], n as u64, "{name}");
                }
            }
            // By axis, by row, and as compile reports it: the same calls and bytes.
            let mut by_axis: BTreeMap<String, (u64, u64)> = BTreeMap::new();
            for x in r.collectives.iter().filter(|x| x.kind != "recv") {
                let one = by_axis.entry(x.axis.clone()).or_default();
                *one = (one.0 + x.count as u64, one.1 + x.bytes as u64);
            }
            let axis = |x: &Json| {
                let n = |key: &str| x[key].as_u64().expect("a whole number");
                (x["axis"].as_str().expect("a name").to_string(), (n("calls"), n("bytes")))
            };
            assert_eq!(list(&c["sent"]).iter().map(axis).collect::<BTreeMap<_, _>>(), by_axis);
            let rows: Vec<Json> =
                list(&c["calls"]).iter().filter(|r| r["kind"] != "recv").cloned().collect();
            let all: (u64, u64) = by_axis.values().fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
            assert_eq!((sum(&rows, "calls_per_step"), sum(&rows, "bytes_per_step")), all);
            // Each row that has a number is explained.
            for row in rows.iter().filter_map(|r| r["numbers"][0].as_u64()) {
                assert!(d["explanations"][row.to_string()].is_array(), "collective:{row}");
            }
            for x in list(&c["sent"]).iter().filter(|x| x["between_nodes"].is_u64()) {
                let parts = x["between_nodes"].as_u64().zip(x["inside_node"].as_u64());
                assert_eq!(parts.map(|(a, b)| a + b), x["bytes"].as_u64());
            }
        }
        let actions: usize =
            list(&d["timeline"]["ranks"]).iter().map(|r| list(&r["actions"]["start"]).len()).sum();
        let infer = s.plan.settings.mode == shardc_ir::plan::Mode::Infer;
        let kept = |a: &&shardc_ir::schedule::Action| {
            !infer || a.kind == shardc_ir::schedule::ActionKind::Forward
        };
        assert_eq!(actions, s.plan.schedule.ranks.iter().flatten().filter(kept).count());
        let shown: Vec<&str> = list(&d["settings"])
            .iter()
            .flat_map(|g| list(&g["rows"]))
            .filter_map(|r| r[0].as_str())
            .collect();
        for word in [
            "ZeRO stage",
            "element type",
            "optimizer",
            "recompute",
            "loss chunks",
            "sequence parallel",
            "schedule",
        ] {
            assert!(shown.contains(&word), "{word}");
        }
    }
}

/// The most bytes that memory over time reaches.
fn most_of(memory: &Json) -> u64 {
    let at = |v: &Json, i: usize| v.as_u64().or(v[i].as_u64()).expect("bytes");
    let kinds: Vec<&Json> =
        memory["bytes"].as_object().into_iter().flatten().map(|x| x.1).collect();
    let sums = (0..list(&memory["t"]).len()).map(|i| kinds.iter().map(|k| at(k, i)).sum());
    sums.max().unwrap_or(0)
}

/// What a block of a page holds.
fn block(html: &str, id: &str) -> Vec<u8> {
    let from = html.split(&format!("id=\"{id}\">")).nth(1).expect("the block");
    inflated(&decode(from.split("</script>").next().unwrap_or_default()))
}

fn decode(text: &str) -> Vec<u8> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => panic!("no base64: {c}"),
    };
    let mut out = vec![];
    for four in text.trim().as_bytes().chunks(4) {
        let pad = four.iter().filter(|c| **c == b'=').count();
        let n =
            four.iter().filter(|c| **c != b'=').fold(0u32, |n, &c| n << 6 | u32::from(digit(c)));
        out.extend_from_slice(&(n << (6 * pad as u32)).to_be_bytes()[1..4 - pad]);
    }
    out
}

fn inflated(data: &[u8]) -> Vec<u8> {
    miniz_oxide::inflate::decompress_to_vec(data).expect("it was deflated")
}

#[test]
fn what_is_packed_unpacks() {
    let long: Vec<u8> =
        (0..90_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let same = vec![7u8; 70_000];
    let text = "all_gather over tp, all_reduce over tp; ".repeat(900);
    for data in [&b""[..], b"a", b"ab", b"abcabcabcabc", &long, &same, text.as_bytes()] {
        let packed = shardc::page::pack::packed(data);
        assert_eq!(inflated(&decode(&packed)), data);
    }
    assert!(shardc::page::pack::packed(text.as_bytes()).len() < text.len() / 50);
}

/// Panics unless all elements outside of scripts are closed in order.
fn check_html(s: &str) {
    let void = ["meta", "!doctype"];
    let (mut open, mut rest): (Vec<&str>, &str) = (vec![], s);
    while let Some(at) = rest.find('<') {
        let end = at + rest[at..].find('>').expect("an open tag");
        let tag = &rest[at + 1..end];
        let name = tag.split([' ', '\n']).next().unwrap_or(tag);
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else if ["script", "style"].contains(&name) {
            let close = format!("</{name}>");
            rest = &rest[rest.find(&close).expect("it is closed") + close.len()..];
        } else if !void.contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn a_page_is_whole_small_and_alone() {
    for s in plans() {
        let html = page(&s, &Asked::default()).expect("a page");
        check_html(&html);
        assert!(html.starts_with("<!doctype html>") && html.len() < 400_000, "{}", html.len());
        assert!(!html.contains("{{"), "all is filled in");
        // Nothing is fetched: the one address is the name of a format.
        let without = html.replace("http://www.w3.org/2000/svg", "");
        for word in ["http:", "https:", "src=", "@import", "url(", "fetch(", "XMLHttpRequest"] {
            assert!(!without.contains(word), "{word}");
        }
        let d: Json = serde_json::from_slice(&block(&html, "data")).expect("JSON");
        assert_eq!(d, data(&s, &Asked::default()).expect("data"));
        assert_eq!(block(&html, "text"), shardc_ir::text::print(&s.plan.module).as_bytes());
        assert_eq!(
            html,
            page(&s, &Asked::default()).expect("a page"),
            "the same plan, the same bytes"
        );
    }
    let code: usize = SCRIPT.iter().map(|s| s.len()).sum::<usize>() + STYLE.len();
    assert!(code < 120_000, "{code}");
}

/// Names that would end a script, or an attribute, stay text.
#[test]
fn names_are_text() {
    let mut s = fixture("llama_deep", &[("tp", 2)], |_| {});
    let bad = "</script><script>alert(1)</script>\"'<!--";
    (s.family, s.name) = (bad.into(), Some(bad.into()));
    for w in &mut s.plan.weights {
        w.param = w.param.replace("mlp", bad);
    }
    for f in &mut s.plan.module.funcs {
        for port in f.args.iter_mut().chain(&mut f.results) {
            if let Some(r) = &mut port.role {
                r.name = r.name.replace("mlp", bad).as_str().into();
            }
        }
    }
    let mut scopes = s.plan.module.funcs.iter_mut().flat_map(|f| &mut f.scopes);
    scopes.by_ref().for_each(|i| i.path = i.path.replace("mlp", bad).as_str().into());
    // Why values are as they are is asked of the model, which has its own names.
    let d = of(&s, &Asked::default(), false).expect("data");
    assert!(d.to_string().contains("alert(1)"), "the name is there");
    let blocks = [
        ("{{title}}", escape(&d["title"].to_string())),
        ("{{style}}", String::new()),
        ("{{data}}", shardc::page::pack::packed(d.to_string().as_bytes())),
        (
            "{{program}}",
            shardc::page::pack::packed(shardc_ir::text::print(&s.plan.module).as_bytes()),
        ),
        ("{{script}}", String::new()),
    ];
    let html = filled(PAGE, &blocks);
    check_html(&html);
    assert!(!html.contains("alert(1)</script>") && html.matches("<script").count() == 3);
    assert!(html.contains("&lt;/script&gt;"));
}

/// The page of 405B in 16 stages of 64 microbatches is small.
#[test]
fn a_large_plan_is_a_small_page() {
    let config =
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-405b.json"));
    let config: Json = serde_json::from_str(config).expect("JSON");
    let mesh = [("pp", 16), ("dp_shard", 128), ("tp", 8)];
    let mesh = mesh.iter().map(|(n, s)| (n.to_string(), *s)).collect();
    let o = Options {
        mesh,
        schedule: Order::Named("interleaved".into()),
        chunks: Some(2),
        global_batch: 8192,
        microbatch: 1,
        seq: 4096,
        zero: 1,
        sp: true,
        ..Options::default()
    };
    let s = shardc::compile_config(&config, &o).expect("it compiles").stored;
    let html = page(&s, &Asked::default()).expect("a page");
    check_html(&html);
    assert!(html.len() < 3_000_000, "{}", html.len());
    let unpacked = block(&html, "data").len() + block(&html, "text").len();
    assert!(unpacked < 10_000_000, "{unpacked}");
}

/// A backward that a schedule has as one action is one row, of the time of its function.
#[test]
fn a_whole_backward_is_one_row() {
    let device = shardc::machine::device("h100-sxm").expect("a machine");
    let file = std::env::temp_dir().join(format!("shardc-page-trace-{}.json", std::process::id()));
    for (at, kinds) in [(0, "FB"), (2, "FIW")] {
        let s = &plans()[at];
        let event = |stage: usize, kind: char| {
            let (name, dur) =
                (format!("{stage}{kind}0"), if kind == 'F' { 1000.0 } else { 3000.0 });
            let args = json!({ "step": "1" });
            json!({ "name": name, "ph": "X", "pid": 0, "ts": 0.0, "dur": dur, "args": args })
        };
        let stages = 0..s.plan.schedule.owner.len();
        let mut events: Vec<Json> =
            stages.flat_map(|i| kinds.chars().map(move |k| event(i, k))).collect();
        events.push(json!({
            "name": "optimizer_step", "ph": "X", "pid": 0, "ts": 5000.0, "dur": 250.0, "args": { "step": "1" },
        }));
        std::fs::write(&file, json!({ "traceEvents": events }).to_string()).expect("a file");
        let asked = Asked { device: Some(&device), trace: Some(&file), ..Asked::default() };
        let d = data(s, &asked).expect("data");
        let rows: Vec<&Json> =
            list(&d["measured"]["rows"]).iter().filter(|r| r["stage"] == 0).collect();
        let found: String = rows.iter().filter_map(|r| r["kind"].as_str()).collect();
        assert_eq!(found.replace("optimizer_step", ""), kinds);
        assert_eq!(d["measured"]["ranks"][0]["finish"], json!([5.0, 5.25]));
        if at == 0 {
            assert_eq!(rows[1]["measured_ms"], 3.0);
            let all = list(&d["time"]["functions"]).iter();
            let backward =
                all.filter(|f| f["name"].as_str().is_some_and(|n| n.starts_with("backward")));
            let seconds: f64 = backward.filter_map(|f| f["seconds"].as_f64()).sum();
            let planned = rows[1]["planned_ms"].as_f64().expect("a price");
            assert!((planned / 1e3 / seconds - 1.0).abs() < 1e-9, "{planned} {seconds}");
        }
    }
    std::fs::remove_file(&file).expect("the file");
}

/// With a device, the drawing is the step that was priced: it ends when the step does, and all calls take what they
/// are priced at.
#[test]
fn the_drawing_is_the_priced_step() {
    let device = shardc::machine::device("h100-sxm").expect("a machine");
    for s in plans() {
        let p = shardc_cost::plan::price(&s.plan, &device, &s.options.speeds).expect("a price");
        let d = data(&s, &Asked { device: Some(&device), ..Asked::default() }).expect("data");
        let (t, step) = (&d["timeline"], p.total * 1e3);
        let near = |x: f64, y: f64| (x - y).abs() <= 1e-4 * step;
        let number = |x: &Json| x.as_f64().expect("a number");
        assert!(t["begin"] == 0.0 && near(number(&t["end"]), step), "{} {step}", t["end"]);
        let mut busy = 0.0;
        for (rank, c) in s.plan.classes.iter().enumerate() {
            let calls = c.step.iter().zip(&p.moments[rank]);
            let calls = calls.filter(|x| matches!(x.0, shardc_ir::plan::Instr::Call(_)));
            let priced: f64 = calls.map(|x| (x.1.1 - x.1.0) * 1e3).sum();
            let row = &t["ranks"][rank];
            let long = |x: &Json| number(&x[1]) - number(&x[0]);
            let ends = list(&row["actions"]["end"]).iter().map(number).sum::<f64>();
            let starts = list(&row["actions"]["start"]).iter().map(number).sum::<f64>();
            let drawn = ends - starts + long(&row["enter"]) + long(&row["finish"]);
            assert!(near(drawn, priced), "pipeline rank {rank}: {drawn} {priced}");
            busy += priced;
        }
        let idle = 1.0 - busy / (step * s.plan.classes.len() as f64);
        assert!((number(&t["bubble"]) - idle).abs() < 1e-3, "{} {idle}", t["bubble"]);
        assert_eq!(d["time"]["memory"], device.memory);
    }
}

/// A page is called as its model is, and its layout.
#[test]
fn a_page_has_the_name_of_its_model() {
    let s = &plans()[1];
    let d = data(s, &Asked::default()).expect("data");
    assert_eq!(
        (&d["title"], &d["facts"]["name"]),
        (&json!("llama_deep, pp=4 tp=2"), &json!("llama_deep"))
    );
}
