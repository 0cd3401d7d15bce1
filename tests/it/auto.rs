//! Layouts that are chosen by price: numbers of every family, proofs, and what is chosen where it is known.

use crate::fixture::*;
use shardc::flags::Flags;
use shardc::search::Prices;
use shardc_ir::func::FuncKind;
use shardc_ir::hardware::Hardware;
use shardc_ir::plan::Plan;
use shardc_passes::options::Options;
use shardc_prove::Verdict;
use shardc_testing::taken;
use std::collections::BTreeMap;
use std::path::Path;

/// Prices by which small models are split: nothing costs a start, and links are fast or slow.
fn split(link: f64) -> Hardware {
    Hardware {
        link,
        latency: 0.0,
        start: 0.0,
        line: 0.0,
        flops: 1e9,
        memory: 1e9,
        ..Hardware::default()
    }
}

fn auto(mesh: &[(&str, usize)], hardware: Hardware, microbatch: usize) -> Options {
    Options { auto: true, hardware, ..options(mesh, false, microbatch) }
}

/// Every family on meshes of 2, 4 and 8 ranks, of one to three axes, whatever these are called: the
/// numbers are those of transformers, and the plan is proved. Cheap links split what can be, dear ones
/// only what needs nothing to be sent.
#[test]
fn every_family_has_its_numbers() {
    type Row = (&'static [(&'static str, usize)], f64, usize);
    let meshes: &[Row] = &[
        (&[("tp", 2)], 1e12, 8),
        (&[("tp", 4)], 1e12, 4),
        (&[("tp", 4)], 1e7, 8),
        (&[("tp", 8)], 1e12, 8),
        (&[("dp_replicate", 2), ("tp", 2)], 1e12, 2),
        (&[("dp_replicate", 4)], 1e12, 1),
        (&[("cp", 2), ("tp", 2)], 1e12, 4),
        (&[("pp", 2), ("tp", 2)], 1e12, 4),
        (&[("dp_replicate", 2), ("cp", 2), ("tp", 2)], 1e12, 4),
    ];
    for (i, name) in ALL.iter().enumerate() {
        for (k, &(mesh, link, microbatch)) in meshes.iter().enumerate() {
            if !taken(i + k, 9) {
                continue;
            }
            let o = auto(mesh, split(link), microbatch);
            let (model, compiled) = train_and_compare(name, &o);
            let r = texts(&model, &o, &compiled).prove();
            assert_eq!(
                r.verdict(),
                Verdict::Proved,
                "{name} {mesh:?}\n{:?}\n{:?}",
                r.refuted,
                r.gaps
            );
            let is_cut = compiled.plan.module.funcs.iter().any(|f| {
                f.nodes.iter().any(|n| n.outs.iter().any(|&o| !f.ty(o).sharded().is_empty()))
            });
            assert!(is_cut, "{name} {mesh:?}: nothing is split");
        }
    }
}

/// Three axes allow what they allow as two, where the choice is exact: chosen two at a time they end no higher.
#[test]
fn three_axes_cost_no_more_than_two() {
    for name in ["llama_gqa", "gpt2", "mixtral"] {
        let mut roundings = 0;
        let mut price = |mesh: &[(&str, usize)]| {
            let o = auto(mesh, split(1e8), 8);
            let compiled = compile(&Fixture::open(name).model(&o), &o);
            // Each op, and what moves between two, is rounded to a picosecond.
            roundings =
                compiled.propagated.sharded.funcs.iter().map(|f| f.nodes.len() as u64).sum();
            compiled.propagated.price.expect("a price")
        };
        let three = price(&[("a", 2), ("b", 2), ("c", 2)]);
        let two = [price(&[("a", 4), ("b", 2)]), price(&[("a", 2), ("b", 4)])];
        assert!(three.bound.is_none() && two.iter().all(|p| p.bound.is_some()), "{name}");
        let [x, y] = two.map(|p| p.time);
        let most = x.min(y) + roundings;
        assert!(three.time <= most, "{name}: {} of three, {x} and {y} of two", three.time);
    }
}

/// Speeds of the table of a paper's kind: a rank of 400 TFLOP/s and 2 TB/s on links of 400 GB/s.
fn fast() -> Hardware {
    Hardware { flops: 400e12, memory: 2e12, link: 400e9, ..Hardware::default() }
}

/// Llama 3.1 8B in bf16 on 8 ranks of one axis.
fn large(flags: Flags) -> Plan {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/configs/llama-3.1-8b.json");
    let text = std::fs::read_to_string(file).expect("a config");
    let config: serde_json::Value = serde_json::from_str(&text).expect("a config");
    let flags = flags.with("mesh", "tp=8").with("dtype", "bf16");
    let o = Options { hardware: fast(), ..flags.options().expect("legal flags") };
    shardc::compile_config(&config, &o).unwrap_or_else(|e| panic!("{e}")).stored.plan
}

/// Bytes that a rank sends in layer 7, by kind, in functions of a kind; and calls.
fn sent(plan: &Plan, kind: FuncKind) -> BTreeMap<&'static str, (f64, usize)> {
    let mut out: BTreeMap<&'static str, (f64, usize)> = BTreeMap::new();
    for f in plan.module.funcs.iter().filter(|f| f.kind == kind) {
        for n in f.nodes.iter().filter(|n| f.scope_info(n.scope).layer == Some(7)) {
            let Some(c) = n.op.collective() else { continue };
            let pairs = n.ins.iter().zip(&n.outs);
            let bytes = |(&a, &b)| c.ring_bytes(&plan.module.mesh, f.ty(a), f.ty(b));
            let e = out.entry(c.kind()).or_default();
            *e = (e.0 + pairs.map(bytes).sum::<f64>(), e.1 + 1);
        }
    }
    out
}

/// A token at a time, weights of 8 ranks: heads and the inside of the MLP are split, as in Megatron, which
/// takes two sums per layer.
#[test]
fn decoding_is_split_as_in_megatron() {
    let plan = large(
        Flags::default()
            .with("mode", "infer")
            .with("global-batch", 1)
            .with("seq", 1)
            .with("memory", "8GiB")
            .with("shard", "auto"),
    );
    let all = sent(&plan, FuncKind::Forward);
    assert_eq!(all.keys().copied().collect::<Vec<_>>(), ["all_reduce"]);
    assert_eq!(all["all_reduce"], (2.0 * 2.0 * 7.0 / 8.0 * 4096.0 * 2.0, 2));
}

/// One sequence of an odd length: neither rows nor tokens can be split. What is chosen costs less than Megatron's two
/// sums forward and two backward, by the same prices, since norms are split along their columns.
#[test]
fn odd_sequences_cost_no_more_than_in_megatron() {
    let of = |shard: Option<&str>| {
        let flags = Flags::default().with("global-batch", 8).with("seq", 2047);
        let plan = large(flags.maybe("shard", shard));
        Prices::Generic(fast()).price(&plan, &[]).expect("a schedule").step
    };
    let (own, megatron) = (of(Some("auto")), of(None));
    assert!(own < megatron, "{own} {megatron}");
}

/// Sixteen long sequences, and no more memory than FSDP needs if nothing is made again: rows are split, every weight is gathered where it is
/// used and its gradient scattered, as FSDP does, and nothing else is sent.
#[test]
fn many_rows_and_little_memory_make_fsdp() {
    let plan = large(
        Flags::default()
            .with("global-batch", 16)
            .with("microbatch", 16)
            .with("seq", 4096)
            .with("memory", "59GiB")
            .with("recompute", "none")
            .with("shard", "auto"),
    );
    // q, k, v, o, gate, up, down, and two norms.
    let forward = sent(&plan, FuncKind::Forward);
    assert_eq!(forward.keys().copied().collect::<Vec<_>>(), ["all_gather"]);
    let weights = 4096.0 * (2.0 * 4096.0 + 2.0 * 1024.0 + 3.0 * 14336.0 + 2.0);
    assert_eq!(forward["all_gather"], (7.0 / 8.0 * 2.0 * weights, 9));
    let backward = sent(&plan, FuncKind::Backward);
    assert_eq!(backward["reduce_scatter"].1, 9);
    assert!(backward.keys().all(|k| ["all_gather", "reduce_scatter"].contains(k)), "{backward:?}");
}

/// Neither rows nor tokens can be cut over two axes: sums are taken to layouts that are replicated over one of them.
#[test]
fn odd_sequences_on_two_axes_are_proved() {
    for name in ["llama_gqa", "qwen3"] {
        let o = auto(&[("cp", 2), ("tp", 2)], split(1e8), 1);
        let o = Options { seq: 7, hardware: Hardware { memory: 1e8, ..o.hardware.clone() }, ..o };
        let model = Fixture::open(name).model(&o);
        let compiled = compile(&model, &o);
        let r = texts(&model, &o, &compiled).prove();
        assert_eq!(r.verdict(), Verdict::Proved, "{name}\n{:?}\n{:?}", r.refuted, r.gaps);
    }
}

/// The toy model by price over one axis, with a layout asked for of a value, perhaps.
fn toy(name: &str, asked: Option<(&str, &str)>) -> shardc::Output {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases/toy.ir");
    let mut text = std::fs::read_to_string(text).expect("toy.ir");
    if let Some((value, layout)) = asked {
        let line = text.lines().find(|l| l.trim().starts_with(&format!("{value} =")));
        let line = line.expect("a line of the toy model").to_string();
        text = text.replacen(&line, &format!("{line} @({layout})"), 1);
    }
    let lab = crate::lab::Lab::new(name);
    let file = lab.write("toy.ir", format!("mesh [tp=2]\n{text}"));
    let o = Options {
        global_batch: 8,
        microbatch: 8,
        seq: 4,
        auto: true,
        hardware: split(1e8),
        ..options(&[], false, 8)
    };
    shardc::compile(&file, &o, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"))
}

/// What is chosen has the price of the whole; the next best layout of a value has the price that the whole has if
/// this layout is asked for.
#[test]
fn the_next_best_costs_what_is_said() {
    let done = toy("next-best", None).propagated;
    let (price, choices) = (done.price.expect("a price"), done.choices.expect("choices"));
    let f = &done.sharded.funcs[0];
    let mut tried = 0;
    for name in ["%h", "%logits", "%shifted", "%a", "%exp"] {
        let v = f.nodes.iter().flat_map(|n| &n.outs).find(|&&v| f.name(v).to_string() == name);
        let all = choices.layout(*v.expect("a value")).expect("an exact choice");
        let (other, next) = all.other.expect("another layout");
        assert_eq!(all.chosen.1, price.time, "{name}");
        assert!(next >= price.time, "{name}");
        let shared = f.nodes.iter().filter(|n| n.ins.contains(v.expect("a value"))).count() > 1;
        if !shared || !other.replicated.is_empty() {
            continue; // what its one user needs may differ from it, and no text asks for that
        }
        let cut = |d: &shardc_ir::types::Dim| if d.atoms.is_empty() { "-" } else { "tp" };
        let layout: Vec<&str> = other.dims.iter().map(cut).collect();
        let forced = toy(&format!("next-best{name}"), Some((name, &layout.join(","))));
        assert_eq!(forced.propagated.price.expect("a price").time, next, "{name} as {layout:?}");
        tried += 1;
    }
    assert!(tried > 0);
    let enter = choices.storage(f.args[1].value).expect("how a parameter is stored");
    assert_eq!(enter.chosen.1, price.time);
}

/// `explain` and `check` say what layouts cost, also those of a plan that was read back.
#[test]
fn prices_are_said() {
    let lab = crate::lab::Lab::new("prices");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases/toy.ir");
    let text = std::fs::read_to_string(file).expect("toy.ir");
    lab.write("toy.ir", format!("mesh [tp=2]\n{text}"));
    let asked = text.replacen("param \"net1.weight\"", "param \"net1.weight\" @(tp,-)", 1);
    lab.write("asked.ir", format!("mesh [tp=2]\n{asked}"));
    let said = |args: &[&str]| {
        let out = lab.ok(args);
        let [out, err] = [out.stdout, out.stderr].map(|b| String::from_utf8(b).expect("text"));
        out + &err
    };
    let unasked = "the model asks for no layout";
    assert!(said(&["compile", "toy.ir", "-o", "out"]).contains(unasked));
    assert!(!said(&["compile", "toy.ir", "--shard", "auto"]).contains(unasked));
    // Axes of data parallelism ask for that, and for nothing else.
    lab.write("plain.ir", &text);
    let data = said(&["compile", "plain.ir", "--mesh", "dp=2"]);
    assert!(!data.contains(unasked) && !data.contains("all_gather"), "{data}");
    let by_price = said(&["compile", "plain.ir", "--mesh", "dp=2", "--shard", "auto"]);
    assert!(by_price.contains("all_gather"), "{by_price}");
    let by_hand = said(&["compile", "asked.ir", "-o", "asked"]);
    assert!(!by_hand.contains(unasked) && !by_hand.contains("chosen by price"), "{by_hand}");
    let whole = said(&["explain", "out", "price"]);
    assert!(
        whole.contains("a microbatch takes") && whole.contains("no layouts take less"),
        "{whole}"
    );
    assert!(said(&["explain", "asked", "price"]).contains("none was chosen by price"));
    // Over more than two axes no bound is known, and nobody says one.
    lab.write("three.ir", format!("mesh [a=2,b=2,c=2]\n{text}"));
    let unknown = "two axes at a time; no lower bound is known";
    assert!(said(&["compile", "three.ir", "--shard", "auto", "-o", "three"]).contains(unknown));
    assert!(said(&["explain", "three", "price"]).contains(unknown));
    let checked = said(&["check", "three.ir", "--shard", "auto", "--format", "json"]);
    assert!(checked.contains("\"bound_ps\":null"), "{checked}");
    for what in ["%h", "tensor:net1.weight"] {
        let value = said(&["explain", "out", what]);
        assert!(value.contains("with it a microbatch takes"), "{value}");
        assert!(value.contains("the next best"), "{value}");
        assert!(!said(&["explain", "asked", what]).contains("the next best"));
    }
    let json: serde_json::Value =
        serde_json::from_str(&said(&["explain", "out", "%h", "--format", "json"])).expect("JSON");
    assert_eq!(json["price"].as_array().map(Vec::len), Some(2), "{json}");
    let checked = lab.ok(&["check", "toy.ir", "--format", "json"]).stdout;
    let checked: serde_json::Value = serde_json::from_slice(&checked).expect("JSON");
    assert!(checked["price"]["ps"].as_u64() >= checked["price"]["bound_ps"].as_u64(), "{checked}");
    assert!(checked["price"]["ps"].as_u64() > Some(0), "{checked}");
    assert!(said(&["check", "toy.ir"]).contains("a microbatch takes"));
}

/// Two layers on floats, with rows of `b`, inputs, what is between, and outputs of these sizes. Values named with a
/// layout are asked to have it.
fn layers([b, h, f, o]: [usize; 4], asked: &[&str]) -> String {
    let text = format!(
        "func @model(
  %up: f32[{f},{h}] param \"up.weight\" [normal=0.1],
  %bias: f32[{f}] param \"up.bias\" [zeros],
  %down: f32[{o},{f}] param \"down.weight\" [normal=0.1],
  %x: f32[{b},{h}] input \"x\",
  %y: f32[{b},{o}] input \"y\",
) -> (f32[] sum \"loss\") {{
 up:
  %up_out = dot[bk,fk->bf] %x, %up : f32[{b},{f}]
  %h = add[bf,f->bf] %up_out, %bias : f32[{b},{f}]
 act:
  %act = silu %h : f32[{b},{f}]
 down:
  %out = dot[bk,fk->bf] %act, %down : f32[{b},{o}]
 loss:
  %d = sub %out, %y : f32[{b},{o}]
  %squares = dot[bf,bf->] %d, %d : f32[]
  %loss = scale[0.00390625] %squares : f32[]
  return %loss
}}
"
    );
    let line = |l: &str| {
        let name = l.trim().split([' ', ':']).next().unwrap_or_default();
        match l.strip_suffix(',') {
            _ if !asked.contains(&name) => l.to_string(),
            Some(l) => format!("{l} @(y,x),"),
            None => format!("{l} @(y,x)"),
        }
    };
    text.lines().map(|l| line(l) + "\n").collect()
}

/// On a square of ranks nobody has to say that products are those of a grid: what is chosen by price takes no longer
/// than `--tp-mode 2d`, also if inputs and outputs must lie in the grid's layout.
#[test]
fn products_on_a_square_cost_no_more_than_in_2d() {
    let lab = crate::lab::Lab::new("squares");
    let step = |name: &str, text: String, flags: Flags| {
        let file = lab.write(name, text);
        let o = flags.options_for(&file).unwrap_or_else(|e| panic!("{e}"));
        let o = Options { hardware: fast(), ..o };
        let done = shardc::compile(&file, &o, &mut |_, _| {});
        let plan = done.unwrap_or_else(|e| panic!("{e}")).stored.plan;
        Prices::Generic(fast()).price(&plan, &[]).expect("a schedule").step
    };
    for sizes in [
        [8192, 4096, 16384, 4096],
        [512, 4096, 16384, 4096],
        [65536, 1024, 4096, 1024],
        [2048, 2048, 2048, 2048],
    ] {
        for q in [2, 4] {
            let rows = Flags::default().with("global-batch", sizes[0]);
            let grid = |steps: &str| {
                rows.clone()
                    .with("mesh", format!("tp={}", q * q))
                    .with("tp-mode", "2d")
                    .with("tp-steps", steps)
                    .with("shard", "up=colwise")
                    .with("shard", "down=rowwise")
            };
            let by_hand = ["gathered", "summa"].map(|s| step("2d.ir", layers(sizes, &[]), grid(s)));
            let least = by_hand[0].min(by_hand[1]);
            for asked in [&[][..], &["%x", "%y", "%out"]] {
                let mesh = format!("mesh [y={q}, x={q}]\n");
                let flags = rows.clone().with("shard", "auto");
                let own = step("own.ir", mesh + &layers(sizes, asked), flags);
                assert!(own <= least, "{sizes:?} on {q} x {q}, {asked:?}: {own} of {by_hand:?}");
            }
        }
    }
}

/// Six heads on four ranks: of two parts of the axis one splits the heads, and both split the MLP. It takes less than
/// on two ranks, proofs and numbers hold, and four heads are split by all of the axis, which is not cut then.
#[test]
fn heads_are_split_by_a_part_of_an_axis() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama_mha/config.json");
    let text = std::fs::read_to_string(file).expect("a config");
    let of = |heads: usize, mesh: &str| {
        let mut config: serde_json::Value = serde_json::from_str(&text).expect("a config");
        let sizes = [("num_attention_heads", heads), ("num_key_value_heads", heads)];
        for (name, n) in [("hidden_size", heads * 8), ("head_dim", 8)].into_iter().chain(sizes) {
            config[name] = n.into();
        }
        let flags = Flags::default()
            .with("mesh", mesh)
            .with("global-batch", 1)
            .with("seq", 7)
            .with("shard", "auto");
        let o = Options { hardware: split(1e12), ..flags.options().expect("legal flags") };
        let mut done = shardc::compile_config(&config, &o).unwrap_or_else(|e| panic!("{e}"));
        done.prove(shardc::proof::Prove::Yes).unwrap_or_else(|e| panic!("{e}"));
        for d in shardc::numbers::compare(&done.stored).unwrap_or_else(|e| panic!("{e}")) {
            assert!(d.error < 1e-9, "{heads} on {mesh}: {d:?}");
        }
        let m = &done.stored.plan.module;
        let nodes = m.funcs.iter().flat_map(|f| f.nodes.iter().map(move |n| (f, n)));
        let attention = nodes.filter(|(_, n)| n.op.mnemonic() == "attention");
        let pieces = attention.map(|(f, n)| f.ty(n.outs[0]).pieces(&m.mesh, 2)).max();
        let price = done.propagated.price.expect("a price");
        (price.time, pieces.expect("attention"), m.mesh.all().len(), price.bound.is_some())
    };
    let (four, two) = (of(6, "tp=4"), of(6, "tp=2"));
    assert_eq!([four.1, two.1], [2, 2], "pieces of heads");
    assert!(four.0 < two.0, "{four:?} {two:?}");
    assert_eq!([four.2, two.2, of(4, "tp=4").2], [2, 1, 1], "parts of the axis");
    assert!(four.3 && of(4, "tp=4").1 == 4);
}

/// Whatever a text asks for, the rows of all inputs are those of the same ranks.
#[test]
fn inputs_of_a_text_are_cut_alike() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases/toy.ir");
    let text = std::fs::read_to_string(file).expect("toy.ir");
    let whole = "%w1: f32[32,10] param \"net1.weight\"";
    assert!(text.contains(whole));
    let lab = crate::lab::Lab::new("auto-text");
    for (asked, mesh) in [("tp,-", "tp=2"), ("tp,?", "dp_replicate=2, tp=2")] {
        let with = text.replacen(whole, &format!("{whole} @({asked})"), 1);
        lab.write("toy.ir", format!("mesh [{mesh}]\n{with}"));
        let args = ["compile", "toy.ir", "--shard", "auto", "--prove", "yes", "-o", "out"];
        let said = String::from_utf8(lab.ok(&args).stderr).expect("text");
        assert!(said.contains("chosen by price"), "{said}");
        let program = std::fs::read_to_string(lab.path("out/programs/all.ir")).expect("a program");
        assert!(program.contains("f32[32@tp,10] param \"net1.weight\""), "{program}");
        lab.ok(&["verify", "out"]);
    }
}
