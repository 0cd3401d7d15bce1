//! Texts that shift, cut and pad a dim which ranks split: each rank sends what crosses from piece to piece, the
//! numbers are those of one rank, and plans are proved.

use clap::Parser;
use shardc::Output;
use shardc::flags::Flags;
use shardc::numbers::{TOLERANCE, compare};
use shardc::proof::Prove;
use shardc_ir::func::{Func, FuncKind};
use shardc_ir::ops::{LayoutChange, Op};
use shardc_ir::plan::Plan;
use shardc_passes::memory::replay::replay;
use std::path::PathBuf;

#[derive(Parser)]
#[command(no_binary_name = true)]
struct Line {
    #[command(flatten)]
    flags: Flags,
}

/// From hidden states `%x` and token numbers `%ids` of `s` tokens to hidden states `%y` of `n` tokens, whose labels
/// are `%next`.
struct Middle {
    name: &'static str,
    s: usize,
    n: usize,
    lines: &'static str,
}

/// The next token is the label; a window of three tokens; a shift past whole pieces, forward and back; a piece of
/// the middle, smaller than what it is cut from; a rotation; all but some tokens of the middle made 0; what a shift
/// there and back leaves; shifts both ways; shifts of one that is needed itself.
const MIDDLES: [Middle; 10] = [
    Middle {
        name: "next",
        s: 12,
        n: 11,
        lines: "%y = narrow[p=11; start=0; dim=1] %x : f32[4,11,8]
  %next = narrow[p=11; start=1] %ids : i32[4,11]",
    },
    Middle {
        name: "window",
        s: 12,
        n: 12,
        lines: "%wide = pad[d=14; start=2; dim=1] %x : f32[4,14,8]
  %x0 = narrow[p=12; start=0; dim=1] %wide : f32[4,12,8]
  %x1 = narrow[p=12; start=1; dim=1] %wide : f32[4,12,8]
  %x2 = narrow[p=12; start=2; dim=1] %wide : f32[4,12,8]
  %y0 = mul[bsh,h->bsh] %x0, %a0 : f32[4,12,8]
  %y1 = mul[bsh,h->bsh] %x1, %a1 : f32[4,12,8]
  %y = add %y0, %y1, %x2 : f32[4,12,8]
  %next = narrow[p=12; start=0] %ids : i32[4,12]",
    },
    Middle {
        name: "later",
        s: 13,
        n: 13,
        lines: "%cut = narrow[p=6; start=0; dim=1] %x : f32[4,6,8]
  %y = pad[d=13; start=7; dim=1] %cut : f32[4,13,8]
  %next = narrow[p=13; start=0] %ids : i32[4,13]",
    },
    Middle {
        name: "sooner",
        s: 13,
        n: 8,
        lines: "%big = exp %x : f32[4,13,8]
  %y = narrow[p=8; start=5; dim=1] %big : f32[4,8,8]
  %next = narrow[p=8; start=5] %ids : i32[4,8]",
    },
    Middle {
        name: "padded",
        s: 8,
        n: 19,
        lines: "%y = pad[d=19; start=4; dim=1] %x : f32[4,19,8]",
    },
    Middle {
        name: "rotated",
        s: 12,
        n: 12,
        lines: "%front = narrow[p=5; start=0; dim=1] %x : f32[4,5,8]
  %back = narrow[p=7; start=5; dim=1] %x : f32[4,7,8]
  %y = concat[d=12; dim=1] %back, %front : f32[4,12,8]
  %next = narrow[p=12; start=0] %ids : i32[4,12]",
    },
    Middle {
        name: "masked",
        s: 12,
        n: 12,
        lines: "%cut = narrow[p=5; start=4; dim=1] %x : f32[4,5,8]
  %y = pad[d=12; start=4; dim=1] %cut : f32[4,12,8]
  %next = narrow[p=12; start=0] %ids : i32[4,12]",
    },
    Middle {
        name: "back",
        s: 12,
        n: 12,
        lines: "%there = pad[d=12; start=3; dim=1] %x : f32[4,12,8]
  %y = pad[d=12; start=-3; dim=1] %there : f32[4,12,8]
  %next = narrow[p=12; start=0] %ids : i32[4,12]",
    },
    Middle {
        name: "both",
        s: 12,
        n: 12,
        lines: "%wide = pad[d=17; start=2; dim=1] %x : f32[4,17,8]
  %x0 = narrow[p=12; start=0; dim=1] %wide : f32[4,12,8]
  %x1 = narrow[p=12; start=1; dim=1] %wide : f32[4,12,8]
  %x2 = narrow[p=12; start=2; dim=1] %wide : f32[4,12,8]
  %x4 = narrow[p=12; start=4; dim=1] %wide : f32[4,12,8]
  %x5 = narrow[p=12; start=5; dim=1] %wide : f32[4,12,8]
  %y1 = mul[bsh,h->bsh] %x1, %a1 : f32[4,12,8]
  %y5 = mul[bsh,h->bsh] %x5, %a0 : f32[4,12,8]
  %y = add %x0, %y1, %x2, %x4, %y5 : f32[4,12,8]
  %next = narrow[p=12; start=0] %ids : i32[4,12]",
    },
    Middle {
        name: "needed",
        s: 12,
        n: 12,
        lines: "%x1 = pad[d=12; start=1; dim=1] %x : f32[4,12,8]
  %x2 = pad[d=12; start=1; dim=1] %x1 : f32[4,12,8]
  %e1 = exp %x1 : f32[4,12,8]
  %y = mul %x2, %e1 : f32[4,12,8]
  %next = narrow[p=12; start=0] %ids : i32[4,12]",
    },
];

fn text(m: &Middle) -> String {
    let Middle { s, n, lines, .. } = m;
    let labels = match lines.contains("%next") {
        true => String::new(),
        false => format!("\n  %next: i32[4,{n}] input \"labels\","),
    };
    format!(
        "func @model(
  %emb: f32[32,8] param \"emb\" [normal=0.5],
  %a0: f32[8] param \"conv.0\" [normal=0.5],
  %a1: f32[8] param \"conv.1\" [normal=0.5],
  %head: f32[32,8] param \"head\" [normal=0.5],
  %ids: i32[4,{s}] input \"input_ids\",{labels}
) -> (f32[] sum \"loss\") {{
  %x = take[vh,bs->bsh] %emb, %ids : f32[4,{s},8]
  {lines}
  %c = mul[bsh,h->bsh] %y, %a0 : f32[4,{n},8]
  %d = add[bsh,h->bsh] %c, %a1 : f32[4,{n},8]
  %act = silu %d : f32[4,{n},8]
  %logits = dot[bsh,vh->bsv] %act, %head : f32[4,{n},32]
  %e = exp %logits : f32[4,{n},32]
  %z = reduce_sum[bsv->bs] %e : f32[4,{n}]
  %lse = log %z : f32[4,{n}]
  %own = take[bsv,bs->bs] %logits, %next : f32[4,{n}]
  %nll = sub %lse, %own : f32[4,{n}]
  %loss = reduce_sum[bs->] %nll : f32[]
  return %loss
}}
"
    )
}

/// The file of a text.
fn written(m: &Middle) -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("halos");
    std::fs::create_dir_all(&dir).expect("a folder");
    let file = dir.join(format!("{}.ir", m.name));
    // Another test may read it.
    if std::fs::read_to_string(&file).ok() != Some(text(m)) {
        std::fs::write(&file, text(m)).expect("a file");
    }
    file
}

/// Compiles a text.
fn compiled(m: &Middle, flags: &str) -> Output {
    let file = written(m);
    let what = format!("{} {flags}", m.name);
    let line = Line::try_parse_from(flags.split_whitespace()).unwrap_or_else(|e| panic!("{e}"));
    let o = line.flags.options_for(&file).unwrap_or_else(|e| panic!("{what}: {e}"));
    let done = shardc::compile(&file, &o, &mut |_, _| {});
    done.unwrap_or_else(|e| panic!("{what}: {e}"))
}

/// Compiles, compares with one rank, and proves.
fn plan(m: &Middle, flags: &str) -> Plan {
    let what = format!("{} {flags}", m.name);
    let mut done = compiled(m, flags);
    replay(&done.stored.plan).unwrap_or_else(|e| panic!("{what}: {e}"));
    for d in compare(&done.stored).unwrap_or_else(|e| panic!("{what}: {e}")) {
        assert!(d.error <= TOLERANCE, "{what}: {}: {:.1e}, {:?}", d.name, d.error, d.worst);
    }
    done.prove(Prove::Yes).unwrap_or_else(|e| panic!("{what}: {e}"));
    done.stored.plan
}

/// Exchanges with a start, and gathers, of tensors of more than `n` elements, in forward and backward.
fn moved(p: &Plan) -> (usize, usize) {
    let of = |f: &&Func| matches!(f.kind, FuncKind::Forward | FuncKind::Backward);
    let nodes = || p.module.funcs.iter().filter(of).flat_map(|f| f.nodes.iter());
    let shifts = nodes().filter(|n| matches!(&n.op, Op::Exchange(k) if k.start.0.is_some()));
    (shifts.count(), nodes().filter(|n| n.op.gathers()).count())
}

const SPLIT: &str = "--shard input_ids=-,cp";

#[test]
fn what_crosses_pieces_is_exchanged() {
    for m in &MIDDLES {
        for mesh in ["cp=2", "cp=3", "cp=4", "dp=2,cp=2", "cp=2,dp=2"] {
            let batch = if mesh.contains("dp") { "--shard input_ids=dp,cp" } else { SPLIT };
            let p = plan(m, &format!("--mesh {mesh} {batch}"));
            // `concat` needs the dim whole, so there all of it is gathered once, before it is cut.
            let whole = m.name == "rotated";
            let (shifts, gathers) = moved(&p);
            assert_eq!((shifts == 0, gathers > 0), (whole, whole), "{} {mesh}", m.name);
        }
    }
}

/// Ranges of all of a dim are nothing, whoever reads them, and whatever is of the value that they are of.
#[test]
fn ranges_of_all_of_a_dim_are_dropped() {
    let read = "%w = pad[d=14; start=2; dim=1] %x : f32[4,14,8]
  %same = narrow[p=14; start=0; dim=1] %w : f32[4,14,8]
  %ex = exp %same : f32[4,14,8]
  %cut = narrow[p=12; start=0; dim=1] %w : f32[4,12,8]
  %sum = reduce_sum[bsh->bh] %ex : f32[4,8]
  %y = add[bsh,bh->bsh] %cut, %sum : f32[4,12,8]
  %next = narrow[p=12; start=0] %ids : i32[4,12]";
    let narrowed = "%cut = narrow[p=5; start=4; dim=1] %x : f32[4,5,8]
  %same = narrow[p=5; start=0; dim=1] %cut : f32[4,5,8]
  %y = pad[d=12; start=4; dim=1] %same : f32[4,12,8]
  %next = narrow[p=12; start=0] %ids : i32[4,12]";
    let widened = "%cut = narrow[p=5; start=4; dim=1] %x : f32[4,5,8]
  %same = pad[d=5; start=0; dim=1] %cut : f32[4,5,8]
  %y = pad[d=12; start=4; dim=1] %same : f32[4,12,8]
  %next = narrow[p=12; start=0] %ids : i32[4,12]";
    let all = [("read", read), ("narrowed", narrowed), ("widened", widened)];
    for (name, lines) in all {
        for flags in ["", "--mesh cp=2 --shard input_ids=-,cp"] {
            plan(&Middle { name, s: 12, n: 12, lines }, flags);
        }
    }
}

/// Shifts of one value are a chain also where none is joined: together they send what the longest does.
#[test]
fn shifts_of_one_value_send_what_the_longest_does() {
    let lines = "%x1 = pad[d=12; start=1; dim=1] %x : f32[4,12,8]
  %x2 = pad[d=12; start=2; dim=1] %x : f32[4,12,8]
  %x3 = pad[d=12; start=3; dim=1] %x : f32[4,12,8]
  %y = add %x1, %x2, %x3, %x : f32[4,12,8]
  %next = narrow[p=12; start=0] %ids : i32[4,12]";
    let p =
        plan(&Middle { name: "direct", s: 12, n: 12, lines }, "--mesh cp=2 --shard input_ids=-,cp");
    let (starts, bytes) = sent(&p, FuncKind::Forward);
    assert_eq!((starts.len(), bytes), (3, (3 * 4 * 8 * 4) as f64), "{starts:?}");
}

/// Beside everything else that a plan may do.
#[test]
fn with_other_options() {
    for m in &MIDDLES {
        for flags in [
            "--mesh cp=2,tp=2 --shard input_ids=-,cp --shard head=tp,-",
            "--mesh tp=3 --shard input_ids=-,tp",
            "--mesh dp=2,cp=2 --shard input_ids=dp,cp --zero 1",
            "--mesh dp=2,cp=2 --shard input_ids=dp,cp --zero 2 --global-batch 8",
            "--mesh dp=2,cp=2 --shard input_ids=dp,cp --zero 3",
            "--mesh cp=4 --shard auto",
            "--mesh a=2,b=2 --shard input_ids=-,a*b",
            "--mesh a=2,b=3 --shard input_ids=-,b*a",
        ] {
            plan(m, flags);
        }
        // Numbers of 16 bits are compared in f64, where nothing is rounded.
        plan(m, "--mesh cp=2 --shard input_ids=-,cp --dtype bf16");
    }
}

/// From hidden states `%x` of 12 tokens to `%y`, with a parameter `%p` of this type.
fn with_parameter((ty, lines): (&str, &str)) -> String {
    format!(
        "func @model(
  %emb: f32[32,8] param \"emb\" [normal=0.5],
  %p: {ty} param \"p\" [normal=0.5],
  %head: f32[32,8] param \"head\" [normal=0.5],
  %ids: i32[4,12] input \"input_ids\",
  %next: i32[4,12] input \"targets\",
) -> (f32[] sum \"loss\") {{
  %x = take[vh,bs->bsh] %emb, %ids : f32[4,12,8]
  {lines}
  %logits = dot[bsh,vh->bsv] %y, %head : f32[4,12,32]
  %e = exp %logits : f32[4,12,32]
  %z = reduce_sum[bsv->bs] %e : f32[4,12]
  %lse = log %z : f32[4,12]
  %own = take[bsv,bs->bs] %logits, %next : f32[4,12]
  %nll = sub %lse, %own : f32[4,12]
  %loss = reduce_sum[bs->] %nll : f32[]
  return %loss
}}
"
    )
}

/// What goes by places, with the op that does: a row per place, a product over places, a number per place, a sum of
/// two neighbours, the last token of each two.
const PLACES: [(&str, &str, &str); 5] = [
    ("f32[12,8]", "%y = add[bsh,sh->bsh] %x, %p : f32[4,12,8]", "add"),
    ("f32[12,12]", "%y = dot[bsh,ts->bth] %x, %p : f32[4,12,8]", "dot"),
    ("f32[12]", "%y = mul[bsh,s->bsh] %x, %p : f32[4,12,8]", "mul"),
    (
        "f32[8]",
        "%q = reshape[b(ns)h->bnsh; n=6] %x : f32[4,6,2,8]
  %r = reduce_sum[bnsh->bnh] %q : f32[4,6,8]
  %t = expand[bnh->bnsh; s=2] %r : f32[4,6,2,8]
  %u = reshape[bnsh->b(ns)h] %t : f32[4,12,8]
  %y = mul[bsh,h->bsh] %u, %p : f32[4,12,8]",
        "exp",
    ),
    (
        "f32[2,8]",
        "%q = reshape[b(ns)h->bnsh; n=6] %x : f32[4,6,2,8]
  %r = mul[bnsh,sh->bnsh] %q, %p : f32[4,6,2,8]
  %y = reshape[bnsh->b(ns)h] %r : f32[4,12,8]",
        "mul",
    ),
];

/// What does not: rows and tokens as one dim, what is the same for all places, sums over all tokens.
const NO_PLACES: [(&str, &str); 3] = [
    (
        "f32[8]",
        "%q = reshape[bsh->(bs)h] %x : f32[48,8]
  %r = mul[th,h->th] %q, %p : f32[48,8]
  %y = reshape[(bs)h->bsh; b=4] %r : f32[4,12,8]",
    ),
    (
        "f32[8]",
        "%q = expand[h->sh; s=12] %p : f32[12,8]
  %y = add[bsh,sh->bsh] %x, %q : f32[4,12,8]",
    ),
    (
        "f32[8]",
        "%q = reduce_sum[bsh->bh] %x : f32[4,8]
  %r = mul[bh,h->bh] %q, %p : f32[4,8]
  %y = add[bsh,bh->bsh] %x, %r : f32[4,12,8]",
    ),
];

/// With zigzag a rank has two chunks of a sequence. What goes by places of tokens would take other tokens than the
/// program names.
#[test]
fn what_goes_by_places_of_tokens_that_are_dealt_is_refused() {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("places");
    std::fs::create_dir_all(&dir).expect("a folder");
    let compile = |text: String, split: &str| {
        let file = dir.join("model.ir");
        std::fs::write(&file, text).expect("a file");
        let line = format!("--mesh cp=2 --shard input_ids=-,cp --cp-split {split}");
        let line = Line::try_parse_from(line.split_whitespace()).unwrap_or_else(|e| panic!("{e}"));
        let o = line.flags.options_for(&file).unwrap_or_else(|e| panic!("{e}"));
        shardc::compile(&file, &o, &mut |_, _| {})
    };
    let places = PLACES.map(|(ty, lines, op)| (with_parameter((ty, lines)), op));
    for (text, op) in places.into_iter().chain([(text(&MIDDLES[1]), "pad")]) {
        let e = compile(text.clone(), "zigzag").err().unwrap_or_else(|| panic!("{text}"));
        assert_eq!(e.code, "not-built", "{e}");
        assert!(e.message.contains(&format!("places of tokens count in `{op}`,")), "{e}");
        assert!(compile(text.clone(), "contiguous").is_ok(), "{text}");
    }
    for one in NO_PLACES {
        let made = compile(with_parameter(one), "zigzag");
        assert!(made.is_ok(), "{}: {:?}", one.1, made.err().map(|e| e.to_string()));
    }
}

/// A start that is wrong by one is refuted, in forward and in backward, and has other numbers.
#[test]
fn a_wrong_start_is_found() {
    let flags = format!("--mesh cp=2 {SPLIT}");
    let places: Vec<[usize; 2]> = {
        let p = compiled(&MIDDLES[1], &flags).stored.plan;
        let of = |i: usize| {
            let nodes = p.module.funcs[i].nodes.iter().enumerate();
            let found =
                nodes.filter(|(_, n)| matches!(&n.op, Op::Exchange(k) if k.start.0.is_some()));
            found.map(move |(j, _)| [i, j]).collect::<Vec<_>>()
        };
        (0..p.module.funcs.len()).flat_map(of).collect()
    };
    assert!(places.len() >= 4, "{places:?}");
    for [i, j] in places {
        let mut done = compiled(&MIDDLES[1], &flags);
        let Op::Exchange(k) = &mut done.stored.plan.module.funcs[i].nodes[j].op else {
            panic!("compiled the same")
        };
        k.start.0 = k.start.0.map(|s| s + 1);
        let e = done.prove(Prove::Yes).expect_err("it is wrong");
        assert_eq!(e.code, "refuted", "{i} {j}: {e}");
        let all = compare(&done.stored).unwrap_or_else(|e| panic!("{i} {j}: {e}"));
        assert!(all.iter().any(|d| d.error > TOLERANCE), "{i} {j}: the same numbers");
    }
}

/// Exchanges with a start: their starts and the bytes that a rank sends, by function.
fn sent(p: &Plan, kind: FuncKind) -> (Vec<i64>, f64) {
    let f = p.module.funcs.iter().find(|f| f.kind == kind).expect("one of this kind");
    let shifted = f.nodes.iter().filter_map(|n| {
        let Op::Exchange(k) = &n.op else { return None };
        let bytes = k.ring_bytes(&p.module.mesh, f.ty(n.ins[0]), f.ty(n.outs[0]));
        Some((k.start.0?, bytes))
    });
    let all: Vec<(i64, f64)> = shifted.collect();
    (all.iter().map(|x| x.0).collect(), all.iter().map(|x| x.1).sum())
}

/// A causal convolution of four tokens, as a text has it: all but the last three tokens of a piece are with the rank
/// that needs them. So no program sends less than three tokens in forward, nor their cotangents in backward.
#[test]
fn a_convolution_sends_its_halo_and_nothing_else() {
    let (s, taps) = (256, 4);
    let cuts = (0..taps - 1).map(|k| {
        format!(
            "%x{k} = narrow[p={s}; start={k}; dim=1] %wide : f32[4,{s},8]\n  \
                 %y{k} = mul[bsh,h->bsh] %x{k}, %a{} : f32[4,{s},8]",
            k % 2
        )
    });
    let lines = format!(
        "%wide = pad[d={}; start=3; dim=1] %x : f32[4,{},8]\n  {}\n  \
         %y = add %y0, %y1, %y2, %x : f32[4,{s},8]\n  %next = narrow[p={s}; start=0] %ids : i32[4,{s}]",
        s + taps - 1,
        s + taps - 1,
        cuts.collect::<Vec<_>>().join("\n  "),
    );
    let m = Middle { name: "long", s, n: s, lines: lines.leak() };
    let token = 4.0 * 8.0 * 4.0;
    for cp in [2, 4, 8, 16] {
        let p = plan(&m, &format!("--mesh cp={cp} {SPLIT}"));
        let least = (taps - 1) as f64 * token;
        for (kind, by) in [(FuncKind::Forward, -1), (FuncKind::Backward, 1)] {
            assert_eq!(sent(&p, kind), (vec![by; 3], least), "cp={cp} {kind:?}");
        }
    }
}

/// What is cut away in the middle is not what a shift would bring: both exchanges stay.
#[test]
fn what_leaves_a_hole_stays_two_exchanges() {
    let starts = |name: &str| {
        let m = MIDDLES.iter().find(|m| m.name == name).expect("one of them");
        sent(&plan(m, &format!("--mesh cp=4 {SPLIT}")), FuncKind::Forward).0
    };
    assert_eq!(starts("masked"), [4, -4]);
    assert_eq!(starts("back"), [-3, 3]);
    assert_eq!(starts("later"), [-7]);
    assert_eq!(starts("both"), [-1, -1, 2, 1]);
    assert_eq!(starts("needed"), [-1, -1]);
}

/// Also in a text that asks for layouts itself; a value that it asks for stays.
#[test]
fn texts_with_layouts_of_their_own_are_joined_too() {
    let lab = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("halos");
    std::fs::create_dir_all(&lab).expect("a folder");
    let starts = |wide: &str| {
        let m = MIDDLES.iter().find(|m| m.name == "window").expect("one of them");
        let text = text(m)
            .replace("input \"input_ids\"", "input \"input_ids\" @(-,cp)")
            .replace(": f32[4,14,8]", &format!(": f32[4,14,8]{wide}"));
        let file = lab.join("own.ir");
        std::fs::write(&file, format!("mesh [cp=2]\n{text}")).expect("a file");
        let line = Line::try_parse_from(["--global-batch", "4"]).unwrap_or_else(|e| panic!("{e}"));
        let o = line.flags.options_for(&file).unwrap_or_else(|e| panic!("{e}"));
        let mut done = shardc::compile(&file, &o, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
        done.prove(Prove::Yes).unwrap_or_else(|e| panic!("{e}"));
        sent(&done.stored.plan, FuncKind::Forward).0
    };
    assert_eq!(starts(""), [-1, -1]);
    assert_eq!(starts(" @(-,cp,-)"), [-2, 0, 1, 2]);
}
