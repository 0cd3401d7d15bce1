//! Any order of the axes trains to the same numbers; what the flags say of order and nodes.

use crate::early_sums::late;
use crate::fixture::*;
use crate::lab::{FIXTURES, Lab};
use shardc::flags::Flags;
use shardc_ir::func::Value;
use shardc_ir::group::{Launch, launches};
use shardc_ir::overlap::{awaited, works};
use shardc_ir::plan::{FramePlace, Plan};
use shardc_passes::options::{CpMode, Fuse, Options, Order, Transport};
use shardc_passes::pipeline::Compiled;
use shardc_testing::taken;
use std::ops::Range;

type Axes = &'static [(&'static str, usize)];

#[test]
fn every_order_of_the_axes_gives_the_same_numbers() {
    let meshes: [(Axes, bool, u8); 6] = [
        (&[("tp", 2), ("pp", 2)], true, 0),
        (&[("dp_replicate", 2), ("pp", 2), ("tp", 2)], false, 0),
        (&[("tp", 2), ("dp_shard", 2), ("pp", 2)], true, 3),
        (&[("tp", 2), ("cp", 2)], true, 0),
        (&[("cp", 2), ("pp", 2), ("dp_shard", 2)], false, 2),
        (&[("tp", 2), ("cp", 2), ("pp", 2)], true, 0),
    ];
    for (f, name) in ["llama_gqa", "gpt2", "llama_deep"].into_iter().enumerate() {
        for (i, (mesh, sp, zero)) in meshes.into_iter().enumerate() {
            let o = Options { zero, ..options(mesh, sp, 2) };
            let schedule = Order::Named("zb-h1".into());
            let later = Options { cp_mode: CpMode::Ulysses, schedule, ..o.clone() };
            // Both change something where there are cp and pp.
            for (k, o) in [o, later].iter().enumerate() {
                let of = if i < 3 { 6 } else { 3 };
                if taken(f + i + k * of / 2, of) {
                    train_and_compare(name, o);
                }
            }
        }
    }
}

/// Plans for devices put work behind collectives: the numbers stay, and every all_reduce of gradients
/// between layers has a product to hide behind.
#[test]
fn work_behind_collectives_changes_no_number() {
    let meshes: [(Axes, bool, u8, &str); 5] = [
        (&[("tp", 2)], false, 0, "1f1b"),
        (&[("tp", 2), ("dp_shard", 2)], true, 3, "1f1b"),
        (&[("pp", 2), ("tp", 2)], true, 0, "zb-v"),
        (&[("cp", 2), ("dp_shard", 2)], false, 2, "1f1b"),
        (&[("pp", 2), ("dp_replicate", 2)], false, 1, "interleaved"),
    ];
    for (i, name) in ["llama_deep", "gpt2", "qwen3"].into_iter().enumerate() {
        let some = meshes.into_iter().enumerate().filter(|(k, _)| taken(i + k, 2));
        for (mesh, sp, zero, schedule) in some.map(|m| m.1) {
            let schedule = Order::Named(schedule.into());
            let fuse = if name == "gpt2" { Fuse::No } else { Fuse::Yes };
            let plain = Options { zero, schedule, fuse, ..options(mesh, sp, 2) };
            let o = Options { transport: Transport::Nccl, ..plain.clone() };
            let (model, compiled) = train_and_compare(name, &o);
            // No value is another: only the order of launches is, and where sums of gradients stand.
            let [late, other] = [late(&model, &o), compile(&model, &plain)];
            let lines = |c: &Compiled| {
                let all = c.plan.module.funcs.iter().flat_map(|f| &f.nodes);
                let mut lines: Vec<String> =
                    all.map(|n| format!("{:?}", (&n.op, &n.ins))).collect();
                lines.sort();
                lines
            };
            assert_eq!(lines(&late), lines(&other), "{name} {mesh:?}");
            overlaps(&compiled.plan, mesh);
            apart(&compiled.plan);
        }
    }
}

/// Nothing that runs while a collective is under way writes what it uses, or uses what it writes.
fn apart(plan: &Plan) {
    for class in &plan.classes {
        for c in class.calls() {
            let (f, memory) = (&plan.module.funcs[c.func], &class.memory);
            let own = launches(f);
            let at = |p: &FramePlace| {
                let first = c.frames[p.frame as usize] + p.offset;
                first..first + p.bytes
            };
            let places = |all: &[Value]| -> Vec<Range<usize>> {
                all.iter().map(|v| at(&memory.places[c.func][v])).collect()
            };
            let written = |x: &Launch| {
                let mut w = places(&x.outs);
                w.extend(memory.workspaces[c.func][x.nodes.clone()].iter().map(at));
                w
            };
            let meet = |a: &[Range<usize>], b: &[Range<usize>]| {
                a.iter().any(|x| b.iter().any(|y| x.start < y.end && y.start < x.end))
            };
            for (i, until) in awaited(f, &own, memory, c).into_iter().enumerate() {
                let (reads, writes) = (places(&own[i].ins), written(&own[i]));
                for x in own[(i + 1).min(until)..until].iter().filter(|x| works(f, x)) {
                    let (r, w) = (places(&x.ins), written(x));
                    let clash = meet(&w, &reads) || meet(&w, &writes) || meet(&r, &writes);
                    assert!(!clash, "@{}: launch {i} and {:?}", f.name, x.nodes);
                }
            }
        }
    }
}

/// What is written over an argument stays behind what reads this.
#[test]
fn work_stays_before_what_is_written_over_its_operand() {
    let text = "mesh [tp=2]
func @step(%x: f32[4,8] input \"x\", %g: f32[8,8] sum \"g\") -> (%g2: f32[8,8] sum \"g\", %y: f32[4,8] output \"y\") {
  %y = dot[mk,kn->mn] %x, %g : f32[4,8]
  %z = exp %g : f32[8,8]
  %part = scale[2.0] %z : f32[8,8]
  %t = to_partial[tp] %part : f32[8,8]+tp
  %g2 = all_reduce[tp] %t : f32[8,8]
  return %g2, %y
}
";
    let mut m = shardc_ir::text::parse(text).unwrap_or_else(|e| panic!("{e}"));
    let f = &mut m.funcs[0];
    let kinds = |f: &shardc_ir::func::Func| -> Vec<&'static str> {
        f.nodes.iter().map(|n| n.op.mnemonic()).collect()
    };
    let before = kinds(f);
    shardc_passes::overlap::overlap(f);
    assert_eq!(kinds(f), before, "the product reads what the all_reduce writes over");
}

/// Every all_reduce over tp that carries gradients of activations is under way while a product runs.
fn overlaps(plan: &Plan, mesh: Axes) {
    let mut seen = 0;
    for class in &plan.classes {
        for c in class.calls().filter(|c| c.microbatch == Some(0)) {
            let f = &plan.module.funcs[c.func];
            let own = launches(f);
            let until = awaited(f, &own, &class.memory, c);
            for (i, x) in own.iter().enumerate() {
                let n = &f.nodes[x.nodes.start];
                let mirrors = f.name.starts_with("backward") && n.op.mnemonic() == "all_reduce";
                if !mirrors || f.ty(n.outs[0]).rank() != 3 {
                    continue;
                }
                let product = |x: &Launch| f.nodes[x.nodes.start].op.mnemonic() == "dot";
                assert!(own[i + 1..until[i]].iter().any(product), "{}: {i}", f.name);
                seen += 1;
            }
        }
    }
    assert!(seen > 0 || mesh != [("tp", 2)], "no all_reduce of gradients");
}

fn flags(mesh: &str, order: &str) -> Result<Vec<String>, shardc_ir::diag::Diag> {
    let f = Flags::default().with("mesh", mesh).with("order", order);
    Ok(f.options()?.mesh.into_iter().map(|a| a.0).collect())
}

/// Megatron-LM lists axes from the one that varies fastest (`--use-tp-pp-dp-mapping` and others).
#[test]
fn orders_are_read_as_megatron_writes_them() {
    let mesh = "pp=2,dp_replicate=2,dp_shard=2,cp=2,tp=2";
    let outer_first = |order: &str| flags(mesh, order).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(outer_first("tp-cp-ep-dp-pp"), ["pp", "dp_replicate", "dp_shard", "cp", "tp"]);
    assert_eq!(outer_first("tp-cp-ep-pp-dp"), ["dp_replicate", "dp_shard", "pp", "cp", "tp"]);
    assert_eq!(outer_first("cp-tp-dp-pp"), ["pp", "dp_replicate", "dp_shard", "tp", "cp"]);
    for (order, said) in
        [("tp-dp-pp", "cp has 2 ranks"), ("tp-cp-dp-pp-xp", "`xp`"), ("tp-cp-dp-pp-tp", "twice")]
    {
        let d = flags(mesh, order).expect_err(order);
        assert!(d.code == "flag" && d.message.contains(said), "{d}");
    }
    // An axis of one rank need not be named.
    assert!(flags("dp=2,tp=2", "tp-dp").is_ok());
}

/// One axis is `auto`, and takes what others leave of `--gpus`; everything else is refused.
#[test]
fn one_axis_takes_the_ranks_that_are_left() {
    let of = |gpus: Option<usize>, mesh: Option<&str>, zero: u8| {
        let zero = Some(zero);
        let f = Flags::default().maybe("gpus", gpus).maybe("mesh", mesh).maybe("zero", zero);
        f.options().map(|o| (o.mesh, o.ep))
    };
    for (gpus, mesh, zero, by_hand) in [
        (16, "tp=2,dp=auto", 0, "tp=2,dp=8"),
        (16, " tp = auto , dp=4", 3, "tp=4,dp=4"),
        (8, "dp=auto", 1, "dp=8"),
        (4, "tp=4,dp=auto", 0, "tp=4,dp=1"),
        (24, "pp=3,cp=auto,tp=2", 0, "pp=3,cp=4,tp=2"),
        (16, "dp=auto,tp=2,ep=4,etp=1", 0, "dp=8,tp=2,ep=4,etp=1"),
    ] {
        let same = of(None, Some(by_hand), zero);
        assert_eq!(of(Some(gpus), Some(mesh), zero), same, "--gpus {gpus} --mesh {mesh}");
        assert!(same.is_ok(), "{by_hand}");
    }
    let cases = [
        (Some(16), None, "flag", "without --mesh"),
        (Some(16), Some(""), "flag", "without --mesh"),
        (Some(4), Some("tp=2,dp=2"), "flag", "no axis of --mesh is auto"),
        (Some(16), Some("tp=auto,dp=auto"), "mesh", "tp, dp are auto"),
        (Some(12), Some("tp=8,dp=auto"), "mesh", "12 ranks are not a multiple of the 8"),
        (Some(4), Some("tp=8,dp=auto"), "mesh", "4 ranks are not a multiple of the 8"),
        (Some(4), Some("tp=0,dp=auto"), "mesh", "0"),
        (Some(4), Some("dp=auto,tp=18446744073709551615"), "mesh", "not a multiple"),
        (Some(4), Some("dp=4,ep=auto"), "mesh", "ep is not an axis"),
        (Some(4), Some("dp=auto,tp=x"), "mesh", "`x` is not a size"),
        (None, Some("tp=2,dp=auto"), "mesh", "the number of ranks is not given"),
    ];
    for (gpus, mesh, code, said) in cases {
        let d = of(gpus, mesh, 0).expect_err(said);
        assert!(d.code == code && d.message.contains(said), "{gpus:?} {mesh:?}: {d}");
        assert!(d.render().contains("= help: "), "{d}");
    }
    // As a file has it; what is compiled is what the same mesh by hand compiles to.
    let lab = Lab::new("gpus");
    let file = format!("model = \"{FIXTURES}/llama_mha\"\nseq = 8\nmesh = \"tp=2,dp=auto\"\n");
    lab.write("shardc.toml", format!("{file}gpus = 4\n"));
    lab.ok(&["compile", "shardc.toml", "-o", "auto"]);
    lab.write("shardc.toml", file);
    let said = lab.ok(&["check", "shardc.toml", "--gpus", "4"]);
    assert!(String::from_utf8_lossy(&said.stdout).contains("4 ranks"));
    lab.refuses(&["check", "shardc.toml", "--gpus", "3"], 2, "mesh");
    lab.ok(&["compile", "shardc.toml", "--mesh", "tp=2,dp=2", "-o", "hand"]);
    let text =
        |dir: &str, name: &str| std::fs::read_to_string(lab.path(dir).join(name)).expect("a file");
    assert!(text("auto", "programs/all.ir") == text("hand", "programs/all.ir"));
    // Which flags were given differs, and by that hashes of files.
    let options = |dir: &str| -> Vec<String> {
        let all = text(dir, "options.toml");
        all.lines().filter(|l| !l.starts_with("given")).map(String::from).collect()
    };
    assert_eq!(options("auto"), options("hand"));
    let head = |dir: &str| {
        let mut head: serde_json::Value =
            serde_json::from_str(&text(dir, "plan.json")).expect("JSON");
        let files = head["files"].as_object_mut().expect("hashes of files");
        assert!(files.remove("options.toml").is_some());
        assert!(head.as_object_mut().expect("an object").remove("hash").is_some());
        head
    };
    assert_eq!(head("auto"), head("hand"));
}

#[test]
fn groups_on_several_nodes_are_named() {
    let warned = |mesh: &str, order: &str, node: usize| -> Vec<String> {
        let f = Flags::default()
            .with("mesh", mesh)
            .with("order", order)
            .with("node", node)
            .with("seq", SEQ);
        let o = f.options().unwrap_or_else(|e| panic!("{e}"));
        let done = shardc::compile(&Fixture::open("llama_mha").dir, &o, &mut |_, _| {});
        let all = done.unwrap_or_else(|e| panic!("{e}")).warnings;
        all.into_iter().filter(|d| d.code == "cross-node").map(|d| d.render()).collect()
    };
    assert!(warned("dp=2,tp=4", "tp-dp", 4).is_empty());
    let outside = warned("dp=2,tp=4", "dp-tp", 4);
    assert!(outside.len() == 1 && outside[0].contains("over tp per step"), "{outside:?}");
    let both = warned("cp=2,tp=4", "tp-cp", 2);
    assert_eq!(both.len(), 2, "{both:?}");
    assert!(both[0].contains("tp=2 or less"), "{both:?}");
}

/// Experts over more ranks than a node has, and buffers for the worst case, are said.
#[test]
fn experts_across_nodes() {
    let flags = |mesh: &str, bound: Option<f64>| {
        Flags::default()
            .with("mesh", mesh)
            .with("node", 4)
            .with("seq", 16)
            .maybe("moe-bound", bound)
    };
    let warned = |mesh: &str, bound: Option<f64>| -> Vec<String> {
        let o = flags(mesh, bound).options().unwrap();
        let dir = Fixture::open("qwen3_moe").dir;
        let made = shardc::compile(&dir, &o, &mut |_, _| {}).unwrap();
        made.warnings.iter().map(|d| d.render()).collect()
    };
    let all = warned("dp=8,ep=8,etp=1", None);
    let said = |code: &str| all.iter().find(|w| w.contains(code)).expect("a warning");
    let far = said("cross-node");
    assert!(far.contains("groups over ep") && far.contains("of 4 ranks"), "{far}");
    assert!(!far.contains("sends 0 B"), "{far}");
    // 3 choices of 8 groups of 1: at most 1 in a group, where 3/8 is even.
    let large = said("moe-buffers");
    assert!(large.contains("hold 2.7 times"), "{large}");
    assert_eq!(warned("dp=8,ep=4,etp=1", Some(1.5)), Vec::<String>::new());
}

/// What `check` proposes for as many ranks is legal, and compiles.
#[test]
fn proposed_meshes_are_legal() {
    let model = Fixture::open("llama_mha").dir;
    let check = |mesh: &str| {
        let out = std::process::Command::new(env!("CARGO_BIN_EXE_shardc"))
            .arg("check")
            .arg(&model)
            .args(["--mesh", mesh, "--seq", "16", "--global-batch", "8", "--microbatch", "1"])
            .args(["--format", "json"])
            .output()
            .expect("shardc starts");
        let found: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON");
        (out.status.code(), found)
    };
    for mesh in ["tp=8", "pp=2,tp=8", "dp=2,tp=8", "tp=16"] {
        let (code, found) = check(mesh);
        assert_eq!((code, &found["ok"]), (Some(1), &serde_json::json!(false)), "{mesh}: {found}");
        let ranks = |m: &str| -> usize {
            m.split(',')
                .map(|a| a.rsplit('=').next().expect("a size").parse::<usize>().expect("n"))
                .product()
        };
        let all = found["meshes"].as_array().expect("a list");
        assert!(!all.is_empty() && all.len() <= 3, "{mesh}: {found}");
        for m in all.iter().map(|m| m.as_str().expect("a mesh")) {
            assert_eq!(ranks(m), ranks(mesh), "{mesh}: {m}");
            assert_eq!(check(m).0, Some(0), "{mesh}: {m}");
        }
    }
    assert!(check("tp=2").1.get("meshes").is_none());
}
