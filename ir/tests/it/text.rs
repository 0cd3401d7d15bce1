//! Text of modules: what is printed reads back as the same module, folded or not, and what cannot
//! be read is refused with a place.

mod random;

use shardc_ir::func::{
    AnnotatedDim, Annotation, Func, LayoutStep, Module, Name, Node, ParamLayout, Part, Port, Role,
    RoleKind, StateDecl, StateInit, StateName, StateOwner,
};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::{
    AllGather, AllReduce, AllToAll, Broadcast, Exchange, FanOut, Op, PadToPartial, Permute, Reduce,
    ReduceScatter, Slice,
};
use shardc_ir::phase::Phase;
use shardc_ir::samples;
use shardc_ir::text::{
    self, Repeat, expand, parse, parse_source, parse_source_on, print, print_source, print_with,
};
use shardc_ir::types::{AtomList, DType, Type};
use shardc_ir::weights::{Init, TensorSlice, Weight};

/// The corpus, also the seeds of the fuzzer.
const CORPUS: &[(&str, &str)] = &[
    ("alternating", include_str!("../corpus/alternating.ir")),
    ("attention", include_str!("../corpus/attention.ir")),
    ("layers", include_str!("../corpus/layers.ir")),
    ("mlp", include_str!("../corpus/mlp.ir")),
    ("mlp_ranked", include_str!("../corpus/mlp_ranked.ir")),
    ("optimizer", include_str!("../corpus/optimizer.ir")),
    ("sharded", include_str!("../corpus/sharded.ir")),
    ("subaxes", include_str!("../corpus/subaxes.ir")),
];

fn read(text: &str) -> Module {
    parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Fails unless the modules are the same but for the numbers of values and scopes.
fn assert_same(a: &Module, b: &Module) {
    assert_eq!(a.mesh.axes, b.mesh.axes);
    assert_eq!(a.funcs.len(), b.funcs.len());
    for (f, g) in a.funcs.iter().zip(&b.funcs) {
        assert_eq!(f.name, g.name);
        let ports = |f: &Func, ports: &[Port]| -> Vec<_> {
            ports.iter().map(|p| (f.values[p.value].clone(), p.role.clone())).collect()
        };
        assert_eq!(ports(f, &f.args), ports(g, &g.args));
        assert_eq!(ports(f, &f.results), ports(g, &g.results));
        let nodes = |f: &Func| -> Vec<_> {
            let info =
                |v: &shardc_ir::func::Value| (f.values[v].clone(), f.annotations.get(v).cloned());
            let all = |vs: &[_]| vs.iter().map(info).collect::<Vec<_>>();
            let one = |n: &Node| {
                let scope = f.scope_info(n.scope).path.clone();
                (n.op.clone(), n.kept, all(&n.ins), all(&n.outs), scope, n.note.clone())
            };
            f.nodes.iter().map(one).collect()
        };
        assert_eq!(nodes(f), nodes(g));
        let asked = |f: &Func| -> Vec<_> {
            f.args.iter().map(|p| f.annotations.get(&p.value).cloned()).collect()
        };
        assert_eq!(asked(f), asked(g));
    }
}

#[test]
fn corpus_prints_as_it_is_written() {
    for (name, text) in CORPUS {
        // What is not a note of an op is not kept.
        let text: String = text.split_inclusive('\n').filter(|l| !l.starts_with("//")).collect();
        let m = read(&text);
        assert_eq!(print(&m), text, "{name}");
        let unrolled = print_with(&m, Repeat::Unroll);
        assert!(!unrolled.contains("repeat"), "{name}");
        assert_eq!(expand(&text).unwrap().text, unrolled, "{name}");
        assert_same(&read(&unrolled), &m);
    }
}

#[test]
fn an_unrolled_program() {
    let m = read(include_str!("../corpus/alternating.ir"));
    let unrolled = print_with(&m, Repeat::Unroll);
    insta::assert_snapshot!(unrolled.lines().take(15).collect::<Vec<_>>().join("\n"));
}

#[test]
fn headers_short_and_long() {
    let mesh = "mesh []\n\n";
    for text in [
        "func @none() -> () {\n  return\n}\n",
        "func @one(%a: f32[]) -> f32[] {\n  return %a\n}\n",
        "func @named(\n\
            \x20 %a: f32[] sum \"loss\",\n\
            ) -> (f32[] sum \"loss\", f32[] output \"a b\\u{7}é\") {\n\
            \x20 return %a, %a\n\
            }\n",
    ] {
        let text = format!("{mesh}{text}");
        assert_eq!(print(&read(&text)), text);
    }
}

#[test]
fn layout_of_the_text_is_free() {
    let text = "// a program\n\
        mesh [ tp = 2 , ]\r\n\
        func @f( // first\n\
        \x20%x : f32[ 4 , 8 @ tp ],\n\
        )->f32[4,8@tp]{ // head\n\
        \x20a.b: // scope\n\
        %y=gelu %x:f32[4,8@tp]//why\n\
        \n\
        \x20return   %y }";
    let m = read(text);
    insta::assert_snapshot!(print(&m));
}

/// A number has one form.
#[test]
fn sizes_have_no_sign() {
    let of = |start: &str| {
        let node = format!("%y = narrow[p=2; start={start}] %x : f32[2]");
        shardc_ir::text::parse(&format!(
            "mesh []\n\nfunc @f(%x: f32[4]) -> f32[2] {{\n  {node}\n  return %y\n}}\n"
        ))
    };
    of("1").expect("a size");
    for bad in ["+1", "-1", "1.0", "0x1", "one", ""] {
        assert!(of(bad).is_err(), "{bad}");
    }
}

#[test]
fn names_keep_their_numbers() {
    // A `.1` above the name itself, as passes leave them that move ops.
    let text = "mesh []\n\
        \n\
        func @f(%x.1: f32[2], %x: f32[2]) -> f32[2] {\n\
        \x20 %d_l3.y.7 = add %x, %x.1 : f32[2]\n\
        \x20 return %d_l3.y.7\n\
        }\n";
    let mut m = read(text);
    assert_eq!(print(&m), text);
    let f = &mut m.funcs[0];
    let fresh = f.value(Type::f32(&[2]), Name::parse("x"));
    assert_eq!(f.name(fresh).to_string(), "%x.2");
}

#[test]
fn unused_cuts_vanish_and_the_text_stays() {
    let mut m = read(include_str!("../corpus/mlp.ir").replace("tp=2", "tp=4").as_str());
    let text = print(&m);
    let mut f = m.funcs.remove(0);
    m.mesh.cut(0, 2).unwrap();
    // The same types over the finer atoms.
    for v in &mut f.values {
        for d in v.ty.dims.iter_mut().filter(|d| !d.atoms.is_empty()) {
            d.atoms = AtomList::collect([Atom(0), Atom(1)]).unwrap();
        }
        if !v.ty.sum.is_empty() {
            v.ty.sum = m.mesh.all();
        }
    }
    m.funcs.push(f);
    assert_eq!(print(&m), text);
    assert_eq!(read(&text).mesh.atoms.len(), 1);
}

/// Layers 0..n of a chain; `f` writes the lines of one, after its name and the one before.
fn chain(n: usize, f: impl Fn(usize, &str) -> String) -> String {
    let mut text = "mesh [tp=2]\n\nfunc @f(%h: f32[4]) -> f32[4] {\n".to_string();
    let mut last = "%h".to_string();
    for i in 0..n {
        text += &format!(" m.{i}:\n{}", f(i, &last));
        last = format!("%l{i}.y");
    }
    text + &format!("  return {last}\n}}\n")
}

#[test]
fn each_different_layer_is_printed_once() {
    let plain = |i: usize, x: &str| {
        format!("  %l{i}.a = gelu {x} : f32[4]\n  %l{i}.y = scale[0.5] %l{i}.a : f32[4]\n")
    };
    let lines = |text: &str| print(&read(text)).lines().count();
    // Mesh, head and tail are 5 lines, a layer 3, a repeat 2.
    assert_eq!(lines(&chain(32, plain)), 5 + 2 + 3);
    // One layer in the middle is different.
    let odd = |i: usize, x: &str| match i {
        9 => format!("  %l{i}.y = silu {x} : f32[4]\n"),
        _ => plain(i, x),
    };
    assert_eq!(lines(&chain(32, odd)), 5 + (2 + 3) + 2 + (2 + 3));
    // Sizes that happen to be layer numbers do not matter: f32[4] in layer 4.
    let last = |i: usize, x: &str| match i {
        31 => plain(i, x).replace(".a = gelu", ".b = gelu").replace(".a :", ".b :"),
        _ => plain(i, x),
    };
    let folded = print(&read(&chain(32, last)));
    assert!(folded.contains("%l{i}.a at 31 is %l31.b"), "{folded}");
    // Every layer different: nothing to fold.
    let text = chain(8, |i, x| format!("  %l{i}.y = scale[{}.5] {x} : f32[4]\n", i * i));
    assert_eq!(print(&read(&text)), text);
}

#[test]
fn folding_gives_up_on_braces() {
    let text = chain(9, |i, x| format!("  %l{i}.y = gelu {x} : f32[4]  // set {{a, b}}\n"));
    assert_eq!(print(&read(&text)), text);
}

/// The code and text of the error.
fn fails(text: &str) -> (&'static str, String) {
    match parse(text) {
        Ok(m) => panic!("read:\n{}", print(&m)),
        Err(d) => {
            assert!(!d.help.is_empty(), "no way out: {d}");
            (d.code, d.to_string())
        }
    }
}

#[test]
fn errors_say_where_and_what() {
    let f = |body: &str| {
        format!("mesh [tp=2]\nfunc @f(%x: f32[4,8], %w: f32[8,4@tp]) -> f32[4,8] {{\n{body}\n}}\n")
    };
    let cases: &[(&str, String)] = &[
        ("undefined-value", f("  %y = gelu %xs : f32[4,8]\n  return %y")),
        ("undefined-value", f("  return %y")),
        ("redefined", f("  %x = gelu %x : f32[4,8]\n  return %x")),
        ("redefined", "func @f() -> () {\nreturn\n}\nfunc @f() -> () {\nreturn\n}".into()),
        ("unknown-op", f("  %y = gelux %x : f32[4,8]\n  return %y")),
        ("unknown-op", f("  %y = all_reducd[tp] %x : f32[4,8]\n  return %y")),
        ("unknown-axis", f("  %y = fan_out[tq] %x : f32[4,8]\n  return %y")),
        ("unknown-axis", f("  %y = gelu %x : f32[4,8@pt]\n  return %y")),
        ("mixed", f("  %y = gelu %x : f32[4,8@tp*tp]\n  return %y")),
        ("mixed", f("  %y = gelu %x : f32[4,8] @(-,tp*tp)\n  return %y")),
        ("attribute", f("  %y = dot[mk,kn->] %x : f32[4,8]\n  return %y")),
        ("attribute", f("  %y = scale[fast] %x : f32[4,8]\n  return %y")),
        ("attribute", f("  %y = scale[0.5; keep] %x : f32[4,8]\n  return %y")),
        ("attribute", f("  %y = gelu[1.0] %x : f32[4,8]\n  return %y")),
        ("attribute", f("  %y = transpose[ab->ba,ba] %x : f32[8,4]\n  return %y")),
        ("arity", f("  %y = gelu %x : f32[4,8], f32[4]\n  return %y")),
        ("arity", f("  %y, %z = gelu %x : f32[4,8]\n  return %y")),
        ("arity", f("  return %x, %w")),
        ("arity", f("  %y = gelu %x : f32[4,8] @(?)\n  return %y")),
        ("result-type", f("  return %w")),
        ("size", f("  %y = gelu %x : f32[99999999999999999999]\n  return %y")),
        ("size", f("  %y = gelu %x : f32[1099511627776,1024]\n  return %y")),
        ("size", f("  %y = gelu %x : f32[0,1099511627776,1099511627776]\n  return %y")),
        ("size", f("  %y = gelu %x : f32[1,1,1,1,1,1,1,1,1]\n  return %y")),
        ("mesh", "mesh [tp=0]".into()),
        ("mesh", "mesh [tp=2, tp=2]".into()),
        ("mesh", format!("mesh [{}]", "a=2,".repeat(99))),
        ("sub-axis", "mesh [tp=8]\nfunc @f(%x: f32[8@tp:(1)3]) -> () {\nreturn\n}".into()),
        ("syntax", "module".into()),
        ("syntax", "mesh [tp=2".into()),
        ("syntax", f("  %y = gelu %x\n  return %y")),
        ("syntax", f("  %y = gelu %x : f64[4,8]\n  return %y")),
        // Found by the fuzzer: the error was placed inside a character.
        ("attribute", f("  %y = dot\u{2028}[mk,kn->mn] %x, %w : f32[4,4]\n  return %y")),
        ("syntax", f("  %y = dot[mk,kn->mn %x, %w : f32[4,4]\n  return %y")),
        ("syntax", f("  %y = gelu %x : f32[4,8] ~tp ~tp\n  return %y")),
        ("syntax", f("  %y = gelu %x : f32[4,8] return %y")),
        ("syntax", "func @f(%x: f32[] wheight \"a\") -> () {\nreturn\n}".into()),
        ("syntax", "func @f(%x: f32[] param \"a) -> () {\nreturn\n}".into()),
        ("syntax", "func @f() -> () {".into()),
        ("repeat", "repeat i in 0..4 {\n}".into()),
        ("repeat", "repeat i in 0..=4 {\n".into()),
        ("repeat", "repeat i in 0..=4 {\nrepeat i in 0..=4 {\n}\n}".into()),
        ("repeat", "repeat i in 0..=4 {\n%l{i-1}.x\n}".into()),
        ("repeat", "repeat i in 0..=4 {\n%l{j}.x\n}".into()),
        ("repeat", "repeat i in 0..=4, %l{i-1}.x is %h {\n}".into()),
        ("repeat", "repeat i in 0..=4 by 0 {\n}".into()),
        ("repeat", "repeat i in 0..=99999999999 {\n}".into()),
        ("too-large", "repeat i in 0..=100000 {\nx\n}".into()),
        ("too-large", format!("repeat i in 0..=99999 {{\n{}}}", "x\n".repeat(41))),
        ("too-large", format!("repeat i in 0..=99999 {{\n{}\n}}", "x".repeat(1 << 20))),
    ];
    for (code, text) in cases {
        let (got, message) = fails(text);
        assert_eq!(got, *code, "{message}");
        assert!(message.contains("line ") || text.len() < 20, "{message}");
    }
}

#[test]
fn a_replacement_that_grows_is_bounded() {
    // 64 KiB of name for each of 2^14 places of it, 100 times.
    let long = "a".repeat(1 << 16);
    let text = format!("repeat i in 0..=0, %b at 0 is %{long} {{\n{}\n}}", "%b ".repeat(1 << 14));
    assert_eq!(fails(&text).0, "repeat");
}

#[test]
fn errors_as_people_see_them() {
    let text = "mesh [dp=2, tp=4]\n\
        \n\
        func @mlp(%x: f32[4,8], %w1: f32[8,16@tp]) -> f32[4,16@tp] {\n\
        \x20 %h = dot[mk,kn->mn] %x, %w2 : f32[4,16@tp]\n\
        \x20 return %h\n\
        }\n";
    insta::assert_snapshot!("undefined", fails(text).1);
    let text = text.replace("%w2 :", "%w1 :").replace("->mn]", "-mn]");
    insta::assert_snapshot!("attribute", fails(&text).1);
    let text = text.replace("-mn]", "->mn]").replace("= dot", "= dott");
    insta::assert_snapshot!("op", fails(&text).1.replace(&shardc_ir::ops::NAMES.join(", "), "…"));
    let text = text.replace("dott", "dot").replace("16@tp]\n", "16@tpp]\n");
    insta::assert_snapshot!("axis", fails(&text).1);
    let text = "mesh []\n\
        func @f(%h: f32[4]) -> f32[4] {\n\
        \x20 repeat i in 0..=2 {\n\
        \x20   %l{i}.y = gelu %l{i+1}.y : f32[4]\n\
        \x20 }\n\
        \x20 return %l2.y\n\
        }\n";
    insta::assert_snapshot!("in_a_repeat", fails(text).1);
}

#[test]
fn types_of_the_mesh_are_written_merged() {
    let mut mesh = Mesh::new(&[("tp", 8)]).unwrap();
    mesh.cut(0, 2).unwrap();
    mesh.cut(0, 4).unwrap();
    let t = |s: &str| text::type_text(&mesh, &text::parse_type(&mesh, s).unwrap());
    assert_eq!(t("f32[8@tp:(1)2*tp:(2)2]"), "f32[8@tp:(1)4]");
    assert_eq!(t("f32[8@tp:(4)2*tp:(1)4]"), "f32[8@tp:(4)2*tp:(1)4]");
    assert_eq!(t("f32[8]+tp:(2)4*tp:(1)2"), "f32[8]+tp");
}

#[test]
fn attributes_that_gradients_make_read_back() {
    // A reshape that needs no sizes, and a rule over the leading dims of an element-wise op.
    let text = "mesh []\n\n\
        func @f(%x: f32[4,8]) -> () {\n\
        \x20 %y = reshape[ab->(ab)] %x : f32[32]\n\
        \x20 %z = div[01,01->01] %x, %x : f32[4,8]\n\
        \x20 return\n\
        }\n";
    let m = read(text);
    assert_eq!(print(&m), text);
    assert!(shardc_ir::verify::verify(&m, shardc_ir::phase::Phase::Source).is_ok());
}

/// A model's text says all that a frontend knows, and says it again as it was said.
#[test]
fn models_keep_what_a_frontend_knows() {
    let text = include_str!("../corpus/model.ir");
    let s = parse_source(text).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(print_source(&s), text);
    assert_eq!(s.vocab, 64);
    let named = |n: &str| s.module.funcs[0].name(s.sequence[0].0).to_string() == n;
    assert!(named("%h") && s.sequence.len() == 2 && s.sequence.iter().all(|x| x.1 == 1));
    let find = |n: &str| s.weights.iter().find(|w| w.param == n).expect(n);
    assert_eq!((find("embed.weight").tp_dim, find("l.1.norm.weight").init), (Some(0), Init::Ones));
    let q = Weight {
        tensor: "l.2.qkv.weight".into(),
        tensor_shape: vec![16, 48],
        part: Some(TensorSlice::of(1, 0, 16)),
        init: Init::Normal(0.005),
        tp_dim: Some(1),
        ..Weight::plain("l.2.qkv.weight.q", &[16, 16])
    };
    assert_eq!(find("l.2.qkv.weight.q"), &q);
    let up = Weight {
        tensor: "l.0.{}.up.weight".into(),
        tensor_shape: vec![8, 16],
        experts: Some(4),
        init: Init::Zeros,
        tp_dim: Some(1),
        ..Weight::plain("l.0.up.weight", &[4, 8, 16])
    };
    assert_eq!(find("l.0.up.weight"), &up);
    // Every second element of one tensor that has all experts.
    let stack = "tensor=\"l.{i}.*.up.weight\"]";
    assert!(text.contains(stack));
    let whole = text.replace(stack, "tensor=\"l.{i}.up\"; part=1:1:16:2]");
    let s = parse_source(&whole).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(print_source(&s), whole);
    let half = Some(TensorSlice { dim: 1, start: 1, len: 8, step: 2 });
    let w = s.weights.iter().find(|w| w.tensor == "l.0.up").expect("a weight");
    assert_eq!((w.experts, w.part, &w.tensor_shape[..]), (Some(4), half, &[4, 16, 16][..]));
    // What a text says nothing of.
    let plain = parse_source(&text.replace(" [normal=0.02; tp_dim=0]", "")).expect("a model");
    assert_eq!(plain.weights[0], Weight::plain("embed.weight", &[64, 16]));
    // Programs of ranks say nothing of the kind.
    assert_eq!(parse(text).map(|_| ()).expect_err("a model").code, "syntax");
    let residual = "func @f(%x: f32[2,8]) -> f32[2,8] {\n  %y = gelu %x : f32[2,8] residual=1\n  return %y\n}\n";
    assert_eq!(parse(residual).map(|_| ()).expect_err("a model").code, "attribute");
}

#[test]
fn what_models_cannot_say_is_refused() {
    let text = include_str!("../corpus/model.ir");
    let cases = [
        ("[ones]", "[ones", "`;`"),
        ("[ones]", "[]", "needed here"),
        ("[ones]", "[twos]", "`ones`, `zeros`"),
        ("[ones]", "[ones; zeros]", "repeats"),
        ("[ones]", "[ones; normal=1]", "repeats"),
        ("[ones]", "[normal=-1]", "not a deviation"),
        ("[ones]", "[normal=1e999]", "not a deviation"),
        ("[ones]", "[normal=]", "not a deviation"),
        ("tp_dim=0", "tp_dim=2", "tp_dim=2 of a value of 2 dims"),
        ("tp_dim=0", "tp_dim=0; tp_dim=1", "repeats"),
        ("tp_dim=0", "tp_dim=99999999999999999999", "larger"),
        ("part=1:0:48", "part=2:0:48", "dim 2 of a value of 2 dims"),
        ("part=1:0:48", "part=1:33:48", "16 elements from 33 on are not among 48"),
        ("part=1:0:48", "part=1:0", "`:`"),
        ("part=1:0:48", "part=1:2:48:4", "16 elements from 2 on are not among 48"),
        ("part=1:0:48", "part=1:2:48:0", "16 elements from 2 on are not among 48"),
        ("experts=4", "part=1:0:8; experts=4", "not part"),
        ("experts=4", "experts=5", "experts=5 is not the size of its dim 0"),
        ("l.{i}.*.up.weight", "l.*.*.up.weight", "one `*`"),
        ("residual=1  //", "residual=3  //", "residual=3"),
        ("residual=1  //", "residual=  //", "a number"),
        ("input \"input_ids\"", "input \"input_ids\" [ones]", "only a parameter"),
    ];
    for (from, to, said) in cases {
        assert!(text.contains(from), "{from}");
        let e = parse_source(&text.replace(from, to)).map(|_| ()).expect_err(to);
        assert!(e.message.contains(said) && e.place.is_some(), "{to}: {e}");
        assert!(matches!(e.code, "syntax" | "attribute" | "size"), "{to}: {e}");
    }
}

/// A text without a mesh asks for shardings on the one that it is given, and `dp` is the data-parallel axes there;
/// what asks for none stays as it is.
#[test]
fn a_text_without_a_mesh_takes_the_given_one() {
    let mesh = Mesh::new(&[("dp_replicate", 2), ("tp", 4)]).expect("a mesh");
    let text = |asked: &str| {
        format!(
            "func @f(%x: f32[8,8]{asked}) -> (%y: f32[8,8]) {{\n  %y = gelu %x : f32[8,8]\n}}\n"
        )
    };
    let asked = parse_source_on(&text(" @(dp,tp:(2)2)"), &mesh).unwrap_or_else(|e| panic!("{e}"));
    let shown = print_source(&asked);
    assert!(shown.starts_with("mesh [dp_replicate=2, tp=4]\n"), "{shown}");
    assert!(shown.contains(" @(dp_replicate,tp:(2)2)"), "{shown}");
    let plain = parse_source_on(&text(""), &mesh).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(print_source(&plain), print_source(&parse_source(&text("")).expect("a model")));
    // Its own mesh comes first.
    let own = format!("mesh [dp=2]\n{}", text(" @(dp,-)"));
    let own = print_source(&parse_source_on(&own, &mesh).unwrap_or_else(|e| panic!("{e}")));
    assert!(own.contains("mesh [dp=2]") && own.contains(" @(dp,-)"), "{own}");
}

#[test]
fn what_is_wrong_is_named() {
    let f = |line: &str| {
        let head = "func @f(%x: f32[4,8], %w: f32[8,4]) -> f32[4,4] {\n  %y = ";
        fails(&format!("mesh []\n{head}{line} : f32[4,4]\n  return %y\n}}\n")).1
    };
    let said = [
        ("dot[mk,kn->mn] %x", "the rule has 2 operands, 1 is given"),
        ("matmul %x, %w", "write `dot[mk,kn->mn] %x, %w`"),
        ("sigmoid %x", "write `logistic %x`"),
        ("narow[d=3] %x", "did you mean `narrow`?"),
        ("clamp[low] %x", "`low` is not a number"),
    ];
    for (line, part) in said {
        let message = f(line);
        assert!(message.contains(part) && !message.contains("the ops are"), "{message}");
    }
    let text = "mesh []\nfunc @f(%x: f32[4,8], %w: f32[8,4]) -> f32[4,4] {\n  \
        %y = dot[mk,kn->mz] %x, %w : f32[4,4]\n  return %y\n}\n";
    let wrong = shardc_ir::verify::verify(&read(text), shardc_ir::phase::Phase::Source);
    let d = wrong.expect_err("a wrong rule").swap_remove(0);
    assert!(d.message.contains("`n` and `z` are each in one tensor alone"), "{d}");
    let d = shardc_ir::text::in_file(d, text, "a.ir");
    assert!(d.place.as_deref().is_some_and(|p| p.starts_with("a.ir:3:3, @f")), "{d}");
    let text = "mesh [tp=2]\nfunc @f(\n  %x: f32[4,8] @(tp,tp)\n) -> () {\n  return\n}\n";
    let twice = shardc_ir::verify::verify(&read(text), shardc_ir::phase::Phase::Source);
    let d = shardc_ir::text::in_file(twice.expect_err("tp twice").swap_remove(0), text, "a.ir");
    assert_eq!((d.code, d.place.as_deref()), ("mixed", Some("a.ir:3:3, @f")), "{d}");
    assert!(d.message.contains("an axis splits two dims of one tensor"), "{d}");
}

/// What is behind the last attribute of an input is the end of them.
#[test]
fn nothing_follows_how_an_input_is_read() {
    let said = |own: &str| {
        let text = format!(
            "func @f(%x: i32[2,4] input[tokens, batch, seq=1, {own}] \"x\") -> i32[2,4] {{\n  return %x\n}}\n"
        );
        parse_source_on(&text, &Mesh::default()).expect_err("refused").message
    };
    assert_eq!(said("own, own"), "`]` is needed here, not `,`");
    assert!(said("own batch").starts_with("`]` is needed here, not "));
}
