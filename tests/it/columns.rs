//! Models with inputs of their own: the table of inputs in the text, columns of the user's files, several
//! losses, on all kinds of meshes.

use crate::lab::*;
use serde_json::Value as Json;

/// Rows of the columns' files.
const ROWS: usize = 12;
/// Two layers on floats, whose loss is a mean of squares and a tenth of the first layer's size.
const MLP: &str = r#"
func @model(
  %w1: f32[8,6] param "net1.weight",
  %b1: f32[8] param "net1.bias",
  %w2: f32[4,8] param "net2.weight",
  %x: f32[8,6] input "x",
  %y: f32[8,4] input "y",
) -> (f32[] sum "mse", f32[] sum "size", f32[8,4] output "out") {
 net1:
  %h = dot[bk,fk->bf] %x, %w1 : f32[8,8]
  %hb = add[bf,f->bf] %h, %b1 : f32[8,8]
 act:
  %a = silu %hb : f32[8,8]
 net2:
  %o = dot[bk,fk->bf] %a, %w2 : f32[8,4]
 loss:
  %d = sub %o, %y : f32[8,4]
  %s = dot[bf,bf->] %d, %d : f32[]
  %mse = scale[0.03125] %s : f32[]
  %q = dot[fk,fk->] %w1, %w1 : f32[]
  %size = scale[0.1] %q : f32[]
  return %mse, %size, %o
}
"#;

/// Digits of rows: labels without tokens, and a table that whole numbers look into.
const DIGITS: &str = r#"
func @model(
  %e: f32[10,6] param "embed.weight",
  %w: f32[5,6] param "head.weight",
  %kind: i32[8] input "kind",
  %x: f32[8,6] input "x",
  %noise: f32[8,6] input[random, batch] "noise",
  %shift: f32[6] input[column] "shift",
  %size: f32[] input[column] "size",
  %digit: i32[8] input[labels, batch] "digit",
) -> (f32[] sum "loss", f32[8,5] output "scores") {
 embed:
  %t = take[vh,b->bh] %e, %kind : f32[8,6]
  %u = add %t, %x : f32[8,6]
  %n = scale[0.01] %noise : f32[8,6]
  %v = add %u, %n : f32[8,6]
  %y = add[bh,h->bh] %v, %shift : f32[8,6]
  %z = mul[,bh->bh] %size, %y : f32[8,6]
 head:
  %s = dot[bk,fk->bf] %z, %w : f32[8,5]
 loss:
  %exp = exp %s : f32[8,5]
  %sum = reduce_sum[bf->b] %exp : f32[8]
  %lse = log %sum : f32[8]
  %own = take[bf,b->b] %s, %digit : f32[8]
  %nll = sub %lse, %own : f32[8]
  %valid = at_least[0] %digit : f32[8]
  %loss = dot[b,b->] %nll, %valid : f32[]
  return %loss, %s
}
"#;

/// An .npy file of one dtype.
fn npy(descr: &str, shape: &[usize], bytes: &[u8]) -> Vec<u8> {
    let sizes: String = shape.iter().map(|n| format!("{n},")).collect();
    let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({sizes}), }}\n");
    let mut out = b"\x93NUMPY\x01\x00".to_vec();
    out.extend((dict.len() as u16).to_le_bytes());
    out.extend(dict.as_bytes());
    out.extend(bytes);
    out
}

fn floats(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| (((i * 37 + seed * 11) % 41) as f32 - 20.0) / 13.0).collect()
}

fn of_f32(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The bits of numbers that f16 has exactly, none of them below 2^-14 but 0.
fn of_f16(x: &[f32]) -> Vec<u8> {
    let one = |x: &f32| {
        let bits = x.to_bits();
        let (sign, rest) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
        let own = if rest == 0 { 0 } else { (rest >> 13) - (112 << 10) };
        ((sign | own) as u16).to_le_bytes()
    };
    x.iter().flat_map(one).collect()
}

/// Writes the columns of both models, as .npy files and together as one safetensors file.
fn columns(lab: &Lab) {
    let (x, y) = (floats(ROWS * 6, 1), floats(ROWS * 4, 2));
    let wide: Vec<u8> = x.iter().flat_map(|x| f64::from(*x).to_le_bytes()).collect();
    lab.write("x.npy", npy("<f8", &[ROWS, 6], &wide));
    lab.write("y.npy", npy("<f4", &[ROWS, 4], &of_f32(&y)));
    let kind: Vec<u8> = (0..ROWS).map(|i| (i % 10) as u8).collect();
    lab.write("kind.npy", npy("|u1", &[ROWS], &kind));
    let digit = |i: usize| if i % 4 == 3 { -100 } else { (i % 5) as i64 };
    let digit: Vec<u8> = (0..ROWS).flat_map(|i| digit(i).to_le_bytes()).collect();
    lab.write("digit.npy", npy("<i8", &[ROWS], &digit));
    lab.write("shift.npy", npy("<f4", &[6], &of_f32(&floats(6, 3))));
    lab.write("size.npy", npy("<f4", &[], &of_f32(&[0.75])));
    lab.write(
        "all.safetensors",
        safetensors(&[("x", "F32", &[ROWS, 6], of_f32(&x)), ("y", "F32", &[ROWS, 4], of_f32(&y))]),
    );
    // Sixteenths below 2048 / 16 are f16 exactly.
    let sixteenths =
        |n: usize| -> Vec<f32> { (0..n).map(|i| (i * 7 % 41) as f32 / 16.0 - 1.25).collect() };
    lab.write("x-as-f32.npy", npy("<f4", &[ROWS, 6], &of_f32(&sixteenths(ROWS * 6))));
    lab.write("x-as-f16.npy", npy("<f2", &[ROWS, 6], &of_f16(&sixteenths(ROWS * 6))));
    let halves = of_f16(&sixteenths(ROWS * 6));
    lab.write(
        "f16.safetensors",
        safetensors(&[("x", "F16", &[ROWS, 6], halves), ("y", "F32", &[ROWS, 4], of_f32(&y))]),
    );
    lab.write(
        "eight.safetensors",
        safetensors(&[
            ("x", "F32", &[8, 6], of_f32(&x[..48])),
            ("y", "F32", &[8, 4], of_f32(&y[..32])),
        ]),
    );
}

pub fn safetensors(all: &[(&str, &str, &[usize], Vec<u8>)]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), vec![]);
    for (name, dtype, shape, bytes) in all {
        let end = data.len() + bytes.len();
        let info = serde_json::json!({
            "dtype": dtype, "shape": shape, "data_offsets": [data.len(), end]
        });
        header.insert((*name).into(), info);
        data.extend(bytes);
    }
    let header = serde_json::to_string(&header).expect("JSON");
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

/// Lines of a run as JSON, and what it said.
fn run(lab: &Lab, plan: &str, more: &[&str]) -> (Vec<Json>, String) {
    let base = ["run", plan, "--steps", "3", "--threads", "1", "--format", "json"];
    let out = lab.ok(&[&base[..], more].concat());
    let lines = String::from_utf8(out.stdout).expect("text");
    let said = String::from_utf8(out.stderr).expect("text");
    (lines.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect(), said)
}

fn losses(lines: &[Json]) -> Vec<[f64; 2]> {
    let one = |l: &Json| ["loss", "grad_norm"].map(|k| l[k].as_f64().expect("a number"));
    lines.iter().map(one).collect()
}

fn near(what: &str, a: &[[f64; 2]], b: &[[f64; 2]]) {
    for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
        assert!((a - b).abs() <= 2e-6 * b.abs(), "{what}: {a}, on one rank {b}");
    }
    assert_eq!(a.len(), b.len(), "{what}");
}

/// Layouts beside one rank: flags of `compile`.
const LAYOUTS: &[&[&str]] = &[
    &["--global-batch", "8", "--microbatch", "8", "--mesh", "dp=1"],
    &["--mesh", "dp=2", "--microbatch", "4"],
    &["--mesh", "tp=2", "--shard", "NET1=colwise", "--shard", "NET2=rowwise"],
    &[
        "--mesh",
        "dp=2,tp=2",
        "--microbatch",
        "4",
        "--shard",
        "NET1=colwise",
        "--shard",
        "NET2=rowwise",
    ],
    &["--mesh", "tp=2", "--shard", "auto"],
    &["--mesh", "dp=4", "--zero", "3", "--microbatch", "2"],
    &["--mesh", "dp=2", "--zero", "2", "--microbatch", "4"],
    &["--mesh", "pp=2", "--microbatch", "8"],
];

/// Compiles a model of so many rows for every layout, and trains it on data there.
fn on_all(lab: &Lab, text: &str, names: [&str; 2], data: &[&str]) {
    let mut first = None;
    for (i, flags) in LAYOUTS.iter().enumerate() {
        let flags: Vec<String> =
            flags.iter().map(|f| f.replace("NET1", names[0]).replace("NET2", names[1])).collect();
        let flags: Vec<&str> = flags.iter().map(|f| &**f).collect();
        let plan = format!("plan{i}");
        lab.write("m.ir", text);
        let base = ["compile", "m.ir", "-o", &plan, "--prove", "yes"];
        lab.ok(&[&base[..], &flags].concat());
        lab.ok(&["verify", &plan, "--numbers"]);
        let (lines, _) = run(lab, &plan, data);
        let found = losses(&lines);
        near(&format!("{flags:?}"), &found, first.get_or_insert(found.clone()));
    }
}

#[test]
fn floats_train_on_all_layouts() {
    let lab = Lab::new("columns");
    columns(&lab);
    on_all(&lab, MLP, ["net1", "net2"], &["--data", "x=x.npy,y=y.npy"]);
    // The same numbers, whatever file they are in; and another column is another loss.
    let npy = run(&lab, "plan0", &["--data", "x=x.npy,y=y.npy"]).0;
    assert_eq!(losses(&npy), losses(&run(&lab, "plan0", &["--data", "all.safetensors"]).0));
    let fixed = run(&lab, "plan0", &["--batch", "eight.safetensors"]).0;
    assert_ne!(losses(&npy)[0], losses(&fixed)[0]);
    let of = |data: &str| losses(&run(&lab, "plan0", &["--data", data]).0);
    let wide = of("x=x-as-f32.npy,y=y.npy");
    assert_eq!(of("x=x-as-f16.npy,y=y.npy"), wide);
    assert_eq!(of("f16.safetensors"), wide);
    near(
        "a batch",
        &losses(&run(&lab, "plan3", &["--batch", "eight.safetensors"]).0),
        &losses(&fixed),
    );
    // Each loss is shown, and the loss is their sum.
    let parts = &npy[0]["losses"];
    let [mse, size] = ["mse", "size"].map(|n| parts[n].as_f64().expect("a loss"));
    assert!((mse + size - losses(&npy)[0][0]).abs() < 1e-6 && size > 0.0, "{parts}");
    // Without data: normal numbers, the same on every mesh, and it is said.
    let (random, said) = run(&lab, "plan0", &[]);
    assert!(said.contains("random numbers for x, y"), "{said}");
    near("random", &losses(&run(&lab, "plan3", &[]).0), &losses(&random));
}

/// What else a plan of a model without tokens is asked for.
#[test]
fn a_model_without_tokens_has_what_others_have() {
    let lab = Lab::new("columns-more");
    columns(&lab);
    lab.write("m.ir", MLP);
    let compile = |plan: &str, more: &[&str]| {
        let out = lab.ok(&[&["compile", "m.ir", "-o", plan, "--prove", "yes"][..], more].concat());
        String::from_utf8(out.stderr).expect("text")
    };
    let batch = ["--batch", "eight.safetensors"];
    let said = compile("one", &["--seq", "4"]);
    assert!(said.contains("--seq has no effect: the model takes no tokens"), "{said}");
    let want = losses(&run(&lab, "one", &batch).0);
    // The gradient of everything, and what it shows.
    lab.ok(&[&["run", "one", "--steps", "1", "--dump", "d.safetensors"][..], &batch].concat());
    compile("half", &["--dtype", "bf16", "--mesh", "dp=2", "--microbatch", "4"]);
    for (a, b) in losses(&run(&lab, "half", &batch).0).iter().flatten().zip(want.iter().flatten()) {
        assert!((a - b).abs() <= 2e-2 * b.abs(), "bf16: {a}, in f32 {b}");
    }
    compile("infer", &["--mode", "infer", "--mesh", "tp=2"]);
    lab.ok(&["verify", "infer", "--numbers"]);
    // Two batches of eight rows are one of sixteen.
    compile("twice", &["--global-batch", "16", "--mesh", "dp=2", "--microbatch", "4"]);
    lab.write(
        "m16.ir",
        MLP.replace("[8,6] input", "[16,6] input")
            .replace("[8,4] input", "[16,4] input")
            .replace(": f32[8,8]", ": f32[16,8]")
            .replace(": f32[8,4]", ": f32[16,4]")
            .replace("f32[8,4] output", "f32[16,4] output")
            .replace("0.03125", "0.015625"),
    );
    lab.ok(&["compile", "m16.ir", "-o", "once", "--global-batch", "16"]);
    let data = ["--data", "all.safetensors", "--eval-data", "x=x.npy,y=y.npy", "--eval-every", "3"];
    let [(a, _), (b, _)] = ["twice", "once"].map(|plan| run(&lab, plan, &data));
    let of = |lines: &[Json], key: &str| -> Vec<f64> {
        lines.iter().filter_map(|l| l[key].as_f64()).collect()
    };
    for (key, n) in [("loss", 3), ("grad_norm", 3), ("eval_loss", 2)] {
        let (a, b) = (of(&a, key), of(&b, key));
        assert_eq!((a.len(), b.len()), (n, n), "{key}");
        let near = a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 2e-6 * b.abs());
        assert!(near, "{key}: {a:?}, {b:?}");
    }
}

/// The first loss of a batch by hand.
#[test]
fn a_mean_of_squares_is_that_of_the_whole_batch() {
    let lab = Lab::new("columns-mean");
    columns(&lab);
    let zeros = |name: &str| (format!("{name}\""), format!("{name}\" [zeros]"));
    let text = ["net1.weight", "net1.bias"].map(zeros);
    let text = text.iter().fold(MLP.to_string(), |t, (from, to)| t.replace(from, to));
    lab.write("m.ir", text);
    let y = &floats(ROWS * 4, 2)[..32];
    let want = y.iter().map(|y| f64::from(*y).powi(2)).sum::<f64>() / 32.0;
    for (mesh, rows) in [("dp=1", "8"), ("dp=2", "4"), ("dp=4", "2")] {
        let plan = mesh.replace('=', "");
        lab.ok(&["compile", "m.ir", "-o", &plan, "--mesh", mesh, "--microbatch", rows]);
        let (lines, _) = run(&lab, &plan, &["--batch", "eight.safetensors"]);
        // The first layer is 0, so the output is, and so is its size.
        assert!((losses(&lines)[0][0] - want).abs() < 1e-6, "{mesh}: {lines:?}, {want}");
    }
}

#[test]
fn whole_numbers_and_labels_of_rows_train_on_all_layouts() {
    let lab = Lab::new("columns-digits");
    columns(&lab);
    let data = "x=x.npy,kind=kind.npy,digit=digit.npy,shift=shift.npy,size=size.npy";
    on_all(&lab, DIGITS, ["embed", "head"], &["--data", data]);
    let wrong = data.replace("kind=kind.npy", "kind=digit.npy");
    let said = lab.refuses(&["run", "plan0", "--data", &wrong], 2, "token-range");
    assert!(said.contains(&format!("it was read in step 1 from --data {wrong}")), "{said}");
    // Kinds are below 10 and classes below 5: each by its own table.
    let wrong = data.replace("digit=digit.npy", "digit=kind.npy");
    lab.refuses(&["run", "plan0", "--data", &wrong], 2, "label-range");
}

/// Whole numbers that index nothing may be any; without data they are small, so that nothing overflows. A
/// `random` input is so beside a file's columns, too.
#[test]
fn whole_numbers_that_index_nothing_may_be_negative() {
    let lab = Lab::new("columns-plain");
    columns(&lab);
    let text = MLP
        .replace("%y: f32[8,4] input \"y\",", "%t: i32[8,4] input[column, batch] \"t\",\n  %r: f32[8,4] input[random, batch] \"r\",")
        .replace("%d = sub %o, %y : f32[8,4]", "%y = cast[f32] %t : f32[8,4]\n  %e = add %y, %r : f32[8,4]\n  %d = sub %o, %e : f32[8,4]");
    lab.write("m.ir", text);
    let t: Vec<u8> = (0..32_i32).flat_map(|i| (i % 7 - 3).to_le_bytes()).collect();
    lab.write("t.npy", npy("<i4", &[8, 4], &t));
    lab.write("x8.npy", npy("<f4", &[8, 6], &of_f32(&floats(48, 1))));
    for (mesh, rows) in [("dp=1", "8"), ("dp=2", "4")] {
        let plan = mesh.replace('=', "");
        lab.ok(&["compile", "m.ir", "-o", &plan, "--mesh", mesh, "--microbatch", rows]);
        lab.ok(&["verify", &plan, "--numbers"]);
        let (lines, _) = run(&lab, &plan, &[]);
        assert!(losses(&lines)[0][0].is_finite(), "{lines:?}");
        let given = run(&lab, &plan, &["--batch", "x=x8.npy,t=t.npy"]).0;
        assert!(losses(&given)[0][0].is_finite(), "{given:?}");
    }
}

#[test]
fn columns_that_do_not_fit_are_refused() {
    let lab = Lab::new("columns-bad");
    columns(&lab);
    lab.write("m.ir", MLP);
    lab.ok(&["compile", "m.ir", "-o", "plan"]);
    let refuses = |data: &str, word: &str| {
        let said = lab.refuses(&["run", "plan", "--data", data], 2, "data");
        assert!(said.contains(word), "{data}: no `{word}` in {said}");
    };
    refuses("x=x.npy", "the column `y` is missing");
    // What no input takes is not left out silently, whatever its type.
    refuses("x=x.npy,y=y.npy,z=y.npy", "the model takes no column `z`");
    for dtype in ["BOOL", "U64"] {
        let size = if dtype == "BOOL" { 1 } else { 8 };
        let more: (&str, &str, &[usize], _) = ("more", dtype, &[ROWS], vec![0; ROWS * size]);
        let [x, y] = [floats(ROWS * 6, 1), floats(ROWS * 4, 2)].map(|x| of_f32(&x));
        let own = [("x", "F32", &[ROWS, 6][..], x), ("y", "F32", &[ROWS, 4], y), more];
        lab.write("more.safetensors", safetensors(&own));
        refuses("more.safetensors", "the model takes no column `more`");
    }
    lab.write("u64.safetensors", safetensors(&[("x", "U64", &[ROWS, 6], vec![0; ROWS * 48])]));
    refuses("u64.safetensors", "elements of type U64 are not read");
    refuses("x=y.npy,y=x.npy", "the model takes rows of [6]");
    refuses("x=x.npy,x=y.npy", "two files");
    lab.refuses(&["run", "plan", "--data", "x=none.npy,y=y.npy"], 2, "file");
    refuses("bytes:*.npy", "not a row of tokens");
    let y = of_f32(&floats((ROWS - 1) * 4, 2));
    lab.write("short.npy", npy("<f4", &[ROWS - 1, 4], &y));
    refuses("x=x.npy,y=short.npy", "11 rows, `x` 12");
    lab.write("lie.npy", npy("<f4", &[ROWS, 4], &y));
    refuses("x=x.npy,y=lie.npy", "the file has");
    lab.write("big.npy", npy("<f4", &[1 << 62, 1 << 62], &y));
    refuses("x=x.npy,y=big.npy", "the file has");
    lab.write("empty.npy", npy("<f4", &[0, 4], &[]));
    lab.write("none6.npy", npy("<f4", &[0, 6], &[]));
    refuses("x=none6.npy,y=empty.npy", "no rows");
    let said = lab.refuses(&["run", "plan", "--batch", "all.safetensors"], 2, "data");
    assert!(said.contains("the plan takes 8 rows, the data have 12"), "{said}");
    // Rows of the table that no step fills, or that speak of dims which are not there.
    for (from, to, code) in [
        ("input \"y\"", "input[labels, batch] \"y\"", "source"),
        ("input \"y\"", "input[tokens, batch] \"y\"", "source"),
        ("input \"y\"", "input[random, batch, seq=2] \"y\"", "role"),
        ("input \"y\"", "input[column, batch, seq=0] \"y\"", "role"),
        ("input \"y\"", "input[column, rows] \"y\"", "syntax"),
        ("input \"y\"", "input[pixels] \"y\"", "syntax"),
        ("input \"y\"", "input \"x\"", "source"),
    ] {
        lab.write("bad.ir", MLP.replace(from, to));
        lab.refuses(&["compile", "bad.ir", "-o", "bad"], 2, code);
    }
}

/// What a column indexes is known on every mesh, wherever its numbers go: a table, or experts. Without data, and with
/// the same seed, losses are equal; what is not there is refused.
#[test]
fn what_a_column_indexes_does_not_depend_on_the_mesh() {
    let lab = Lab::new("columns-tables");
    lab.write("table.ir", TABLE);
    lab.write("experts.ir", TABLE_OF_EXPERTS);
    let of = |n: i32| (0..32).flat_map(|i| (i % n).to_le_bytes()).collect::<Vec<u8>>();
    lab.write("many.npy", npy("<i4", &[8, 4], &of(15)));
    lab.write("few.npy", npy("<i4", &[8, 4], &of(4)));
    for model in ["table.ir", "experts.ir"] {
        let mut found = vec![];
        for (mesh, rows) in [("dp=1", "8"), ("dp=2", "4"), ("dp=4", "2")] {
            let plan = format!("{model}-{mesh}");
            lab.ok(&["compile", model, "-o", &plan, "--mesh", mesh, "--microbatch", rows]);
            found.push(losses(&run(&lab, &plan, &[]).0));
            let data = "input_ids=few.npy,targets=few.npy,which=";
            let run_with = |file: &str| {
                let data = format!("{data}{file}");
                ["run", &plan, "--batch", &data, "--steps", "1"].map(String::from)
            };
            let said =
                lab.refuses(&run_with("many.npy").each_ref().map(|s| &s[..]), 2, "token-range");
            assert!(said.contains("`which` is "), "{said}");
            lab.ok(&run_with("few.npy").each_ref().map(|s| &s[..]));
        }
        for other in &found[1..] {
            for (a, b) in found[0].iter().flatten().zip(other.iter().flatten()) {
                assert!((a - b).abs() < 1e-4, "{model}: {found:?}");
            }
        }
    }
}

/// A column that chooses rows of a table of 4, in a model of 16 tokens.
const TABLE: &str = r#"func @model(
  %e: f32[16,8] param "e.weight" [normal=0.5],
  %tab: f32[4,8] param "tab.weight" [normal=0.5],
  %ids: i32[8,4] input "input_ids",
  %targets: i32[8,4] input "targets",
  %which: i32[8,4] input[column, batch, seq=1] "which",
) -> (f32[] sum "loss") {
 m.0:
  %x0 = take[vh,bs->bsh] %e, %ids : f32[8,4,8]
  %w = reshape[bs->(bs)] %which : i32[32]
  %t = take[vh,a->ah] %tab, %w : f32[32,8]
  %t2 = reshape[(bs)h->bsh; b=8] %t : f32[8,4,8]
  %x = add %x0, %t2 : f32[8,4,8]
  %own = take[bsv,bs->bs] %x, %targets : f32[8,4]
  %sq = mul %own, %own : f32[8,4]
  %loss = reduce_sum[bs->] %sq : f32[]
  return %loss
}
"#;

/// One that chooses one of 4 experts.
const TABLE_OF_EXPERTS: &str = r#"func @model(
  %e: f32[16,8] param "e.weight" [normal=0.5],
  %w: f32[4,8,8] param "w.weight" [normal=0.5],
  %ids: i32[8,4] input "input_ids",
  %targets: i32[8,4] input "targets",
  %which: i32[8,4] input[column, batch, seq=1] "which",
) -> (f32[] sum "loss") {
 m.0:
  %x = take[vh,bs->bsh] %e, %ids : f32[8,4,8]
  %t = reshape[(ib)sh->i(bs)h; i=1] %x : f32[1,32,8]
  %ix = reshape[(ib)(sk)->i(bs)k; i=1, k=1] %which : i32[1,32,1]
  %slot, %cnt = route[g=1,e=4; rows=32; capacity=none] %ix : i32[1,32,1], i32[1,4,1]
  %kept = at_least[0.0] %slot : f32[1,32,1]
  %rows = dispatch[g=1,c=32] %t, %slot, %kept : f32[1,1,32,8]
  %u = grouped_dot %rows, %cnt, %w : f32[1,1,32,8]
  %y = unpermute %u, %slot, %kept : f32[1,32,8]
  %back = reshape[i(bs)h->(ib)sh; i=1,b=8] %y : f32[8,4,8]
  %own = take[bsv,bs->bs] %back, %targets : f32[8,4]
  %sq = mul %own, %own : f32[8,4]
  %loss = reduce_sum[bs->] %sq : f32[]
  return %loss
}
"#;
