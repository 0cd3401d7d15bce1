//! Kernels of mixtures of experts on operands that random samples do not give: idle experts, all
//! tokens to one, buffers with rows of no copy, numbers that name nothing.

use shardc_ir::builder::Builder;
use shardc_ir::diag::{Exit, Result};
use shardc_ir::func::{Func, Name, Port};
use shardc_ir::mesh::Mesh;
use shardc_ir::rng::Stream;
use shardc_ir::samples::Sample;
use shardc_ir::tensor::{Tensor, each_index};

fn function(s: &Sample) -> (Mesh, Func) {
    let mesh = Mesh::new(&[("tp", 1)]).unwrap();
    let mut f = Func::new("f");
    let args: Vec<_> = s.ins.iter().map(|t| f.arg(t.clone(), Name::parse("x"), None)).collect();
    let outs = Builder::new(&mesh, &mut f).push_n(&["y", "z"], s.op.clone(), &args);
    f.results = outs.iter().map(|&value| Port { value, role: None }).collect();
    (mesh, f)
}

/// What the kernel of an op makes of these operands; what it does not write is NaN.
fn run(text: &'static str, ins: &[&Tensor]) -> Result<Vec<Tensor>> {
    let s = Sample::parse(text).unwrap();
    let (mesh, f) = function(&s);
    let args: Vec<Vec<Tensor>> = ins.iter().map(|&t| vec![t.clone()]).collect();
    Ok(crate::lab::run(&mesh, &f, &args, false)?
        .into_iter()
        .map(|mut ranks| ranks.remove(0))
        .collect())
}

/// Compares all of the results with the op's meaning.
fn compare(what: &str, text: &'static str, ins: &[&Tensor]) {
    let (mesh, f) = function(&Sample::parse(text).unwrap());
    let args: Vec<Vec<Tensor>> = ins.iter().map(|&t| vec![t.clone()]).collect();
    crate::lab::compare(&format!("{text}, {what}"), &mesh, &f, &args);
}

fn draw(shape: &[usize], name: &str) -> Tensor {
    let s = Stream::new(3, name, 0);
    let mut i = 0;
    Tensor::from_fn(shape, |_| {
        i += 1;
        // Numbers that a bf16 can hold too.
        (s.uniform(i) * 128.0 - 64.0).round() / 64.0
    })
}

/// Every element of `got` is near that of `want`, or, where `want` has none, was not written.
fn near(what: &str, got: &Tensor, want: impl Fn(&[usize]) -> Option<f64>) {
    let off = if what.contains("bf16") { 2f64.powi(-8) } else { 2e-5 };
    each_index(&got.shape, |i| match (got.at(i), want(i)) {
        (g, Some(w)) => assert!((g - w).abs() <= off * w.abs().max(1.0), "{what} {i:?}: {g}, {w}"),
        (g, None) => assert!(g.is_nan(), "{what} {i:?}: {g} was written"),
    });
}

/// `[group, expert, shard]` for 2 groups of 3 experts and 2 shards, in buffers of 9 rows.
const COUNTS: &[(&str, [i32; 12])] = &[
    ("idle experts", [0, 0, 4, 9, 0, 0, 2, 0, 0, 1, 3, 0]),
    ("all to one", [9, 9, 0, 0, 0, 0, 0, 0, 0, 0, 9, 9]),
    ("full", [3, 1, 3, 1, 3, 7, 1, 2, 4, 3, 4, 4]),
    ("nothing", [0; 12]),
    ("more than rows", [7, 9, 7, 1, 7, 1, 10, 0, 0, 10, 1, 1]),
    ("no counts", [-5, i32::MIN, i32::MAX, 3, i32::MAX, 0x7fc0_0bad, -1, 2, -1, -1, 3, -7]),
];

/// Rows of the buffer of a group and a shard that have an expert.
fn used(counts: &Tensor, g: usize, z: usize, rows: usize) -> usize {
    (0..counts.shape[1]).map(|e| counts.at(&[g, e, z]) as usize).sum::<usize>().min(rows)
}

/// All three grouped products of rows `[2,2,rows,i]`, with NaN wherever nothing may be read.
fn grouped(what: &str, counts: &Tensor, texts: [&'static str; 3], [rows, i, o]: [usize; 3]) {
    let has_expert = |at: &[usize]| at[2] < used(counts, at[0], at[1], rows);
    // The experts that have rows.
    let busy = |at: usize| {
        let (g, e) = (at / 3, at % 3);
        let before = |z: usize| (0..e).map(|e| counts.at(&[g, e, z]) as usize).sum::<usize>();
        (0..2).any(|z| before(z) < rows && counts.at(&[g, e, z]) > 0.0)
    };
    let poisoned = |t: &Tensor, keep: &dyn Fn(&[usize]) -> bool| {
        Tensor::from_fn(&t.shape, |at| if keep(at) { t.at(at) } else { f64::NAN })
    };
    let x = draw(&[2, 2, rows, i], "x");
    let y = draw(&[2, 2, rows, o], "y");
    let w = draw(&[6, o, i], "w");
    let (x_used, y_used) = (poisoned(&x, &has_expert), poisoned(&y, &has_expert));
    let w_used = poisoned(&w, &|at| busy(at[0]));
    let want = |text, ins: [&Tensor; 3]| Sample::parse(text).unwrap().eval(&ins).remove(0);
    for (text, read, all, n) in [
        (texts[0], [&x_used, counts, &w_used], [&x, counts, &w], i),
        (texts[1], [&y_used, counts, &w_used], [&y, counts, &w], o),
    ] {
        let (got, want) = (run(text, &read).unwrap().remove(0), want(text, all));
        let scale = 1.0 / (n as f64).sqrt();
        let got = got.map(|x| x * scale);
        near(what, &got, |at| has_expert(at).then(|| want.at(at) * scale));
    }
    let got = run(texts[2], &[&y_used, counts, &x_used]).unwrap().remove(0);
    let want = want(texts[2], [&y, counts, &x]);
    near(what, &got, |at| Some(want.at(at)));
    each_index(&got.shape, |at| assert!(busy(at[0]) || got.at(at) == 0.0, "{what}: {at:?}"));
}

#[test]
fn rows_of_no_expert_are_neither_read_nor_written() {
    for (what, counts) in COUNTS {
        let counts = Tensor::new(&[2, 3, 2], counts.iter().map(|&n| f64::from(n)).collect());
        let texts = [
            "grouped_dot f32[2,2,9,5], i32[2,3,2], f32[6,7,5]",
            "grouped_dot_t f32[2,2,9,7], i32[2,3,2], f32[6,7,5]",
            "grouped_outer f32[2,2,9,7], i32[2,3,2], f32[2,2,9,5]",
        ];
        grouped(what, &counts, texts, [9, 5, 7]);
        let texts = [
            "grouped_dot f32[2,2,201,66], i32[2,3,2], f32[6,131,66]",
            "grouped_dot_t f32[2,2,201,131], i32[2,3,2], f32[6,131,66]",
            "grouped_outer f32[2,2,201,131], i32[2,3,2], f32[2,2,201,66]",
        ];
        grouped(&format!("{what}, large"), &counts.map(|n| n * 21.0), texts, [201, 66, 131]);
        let texts = [
            "grouped_dot bf16[2,2,9,5], i32[2,3,2], bf16[6,7,5]",
            "grouped_dot_t bf16[2,2,9,7], i32[2,3,2], bf16[6,7,5]",
            "grouped_outer bf16[2,2,9,7], i32[2,3,2], bf16[2,2,9,5]",
        ];
        grouped(&format!("{what}, bf16"), &counts, texts, [9, 5, 7]);
        let texts = [
            "grouped_dot bf16[2,2,401,66], i32[2,3,2], bf16[6,131,66]",
            "grouped_dot_t bf16[2,2,401,131], i32[2,3,2], bf16[6,131,66]",
            "grouped_outer bf16[2,2,401,131], i32[2,3,2], bf16[2,2,401,66]",
        ];
        grouped(&format!("{what}, bf16, large"), &counts.map(|n| n * 43.0), texts, [401, 66, 131]);
    }
}

#[test]
fn slots_that_name_no_row_go_nowhere() {
    // 2 groups of 4 rows: slots 0 to 7.
    let none = [-1, -9, 8, i32::MAX, i32::MIN, 0x7fc0_0bad].map(f64::from);
    let slots =
        vec![3.0, 7.0, none[0], 4.0, none[1], none[2], 0.0, none[3], none[4], none[5], 6.0, 5.0];
    let slot = Tensor::new(&[2, 3, 2], slots);
    let (x, gates) = (draw(&[2, 3, 37], "x"), draw(&[2, 3, 2], "gates"));
    let copy = |g: usize, z: usize, c: usize| {
        (0..6).map(|i| [z, i / 2, i % 2]).find(|at| slot.at(at) == (4 * g + c) as f64)
    };
    let halves = "dispatch[g=2,c=4] bf16[2,3,37], i32[2,3,2], f32[2,3,2]";
    let text = "dispatch[g=2,c=4] f32[2,3,37], i32[2,3,2], f32[2,3,2]";
    let [_, rows] = [halves, text].map(|text| {
        let rows = run(text, &[&x, &slot, &gates]).unwrap().remove(0);
        near(text, &rows, |at| {
            let from = copy(at[0], at[1], at[2])?;
            Some(x.at(&[from[0], from[1], at[3]]) * gates.at(&from))
        });
        rows
    });
    // Rows that no copy has are still NaN here.
    assert!(rows.data.iter().any(|x| x.is_nan()));
    let clean = rows.map(|x| if x.is_nan() { 0.0 } else { x });
    for (text, third) in [
        ("unpermute f32[2,2,4,37], i32[2,3,2], f32[2,3,2]", &gates),
        ("combine_gates_grad f32[2,2,4,37], i32[2,3,2], f32[2,3,37]", &x),
    ] {
        let got = run(text, &[&rows, &slot, third]).unwrap().remove(0);
        let want = Sample::parse(text).unwrap().eval(&[&clean, &slot, third]).remove(0);
        near(text, &got, |at| Some(want.at(at)));
        compare("all rows 0 or used", text, &[&clean, &slot, third]);
    }
}

#[test]
fn the_largest_come_in_order_and_equal_ones_by_place() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let rows = vec![
        1.0, 3.0, 3.0, -inf, 3.0, 0.5, //
        inf, -inf, 2.0, inf, -1.0, 2.0, //
        0.0, 0.0, 0.0, 0.0, 0.0, 0.0, //
        -4.0, nan, -2.0, -3.0, nan, -1.0,
    ];
    let x = Tensor::new(&[4, 6], rows);
    for text in [
        "top_k[te->tk; k=1] f32[4,6]",
        "top_k[te->tk; k=4] f32[4,6]",
        "top_k[te->tk; k=6] f32[4,6]",
    ] {
        compare("ties, infinities, NaN", text, &[&x]);
    }
    let got = run("top_k[te->tk; k=3] f32[4,6]", &[&x]).unwrap().remove(0);
    assert_eq!(got.data, [1.0, 2.0, 4.0, 0.0, 3.0, 2.0, 0.0, 1.0, 2.0, 1.0, 4.0, 5.0]);
}

#[test]
fn copies_get_places_by_expert_then_by_token() {
    let one = Tensor::full(&[2, 5, 2], 4.0);
    let mixed =
        Tensor::from_fn(&[2, 5, 2], |i| ((7 * i[0] + 3 * i[1] + 5 * i[2]) % 8) as f64 - 1.0);
    for (what, index) in [("all to one", one), ("some to none", mixed)] {
        for text in [
            "route[g=2,e=3; rows=10; capacity=none] i32[2,5,2]",
            "route[g=2,e=3; rows=10; capacity=4] i32[2,5,2]",
            "route[g=2,e=3; rows=3; capacity=1] i32[2,5,2]",
            "route[g=6,e=1; rows=10; capacity=0] i32[2,5,2]",
            "route[g=1,e=6; rows=10; capacity=none] i32[2,5,2]",
        ] {
            compare(what, text, &[&index]);
        }
    }
}

#[test]
fn a_buffer_with_too_few_rows_is_an_error_that_says_what_would_be_enough() {
    // Shard 1 sends 9 of 16 copies to group 1: 1 to expert 3, 6 to expert 4, 2 to expert 5.
    let chosen = [0, 4, 4, 0, 4, 1, 1, 4, 4, 2, 5, 4, 2, 3, 0, 5].map(f64::from);
    let index = Tensor::from_fn(&[2, 8, 2], |i| match i[0] {
        0 => ((i[1] + 3 * i[2]) % 6) as f64,
        _ => chosen[2 * i[1] + i[2]],
    });
    let text = "route[g=2,e=3; rows=8; capacity=none] i32[2,8,2]";
    let e = run(text, &[&index]).unwrap_err();
    assert_eq!((e.code, e.exit), ("moe-bound", Exit::RankFailed));
    let text = e.render();
    for part in [
        "9 rows are needed for group 1 of experts in shard 1 of the tokens, the bound gives 8",
        "expert 4 has 6, expert 5 has 2, expert 3 has 1, of experts 3 to 5",
        "8 rows hold an even load: 16 copies for 2 groups",
        "--moe-bound 1.2",
        "--moe-bound 2, which holds any load",
    ] {
        assert!(text.contains(part), "no `{part}` in\n{text}");
    }
    // What it names is enough: 1.2 · 16 / 2 rows.
    compare("named bound", "route[g=2,e=3; rows=10; capacity=none] i32[2,8,2]", &[&index]);
    compare("just enough", "route[g=2,e=3; rows=9; capacity=none] i32[2,8,2]", &[&index]);
}

/// Tokens go to their experts and come back: the same as the products of every token with the
/// weights that it chose.
#[test]
fn the_way_there_and_back_gives_every_tokens_own_products() {
    let (x, w, scores) =
        (draw(&[1, 37, 11], "x"), draw(&[6, 11, 11], "w"), draw(&[1, 37, 6], "scores"));
    let gates = draw(&[1, 37, 2], "gates");
    let ones = Tensor::full(&[1, 37, 2], 1.0);
    let one = |text, ins: &[&Tensor]| run(text, ins).unwrap().remove(0);
    let chosen = one("top_k[zte->ztk; k=2] f32[1,37,6]", &[&scores]);
    for (route, kept) in [
        ("route[g=2,e=3; rows=74; capacity=none] i32[1,37,2]", 37),
        ("route[g=2,e=3; rows=74; capacity=7] i32[1,37,2]", 7),
    ] {
        let routed = run(route, &[&chosen]).unwrap();
        let (slot, counts) = (&routed[0], &routed[1]);
        let text = "dispatch[g=2,c=74] f32[1,37,11], i32[1,37,2], f32[1,37,2]";
        let rows = one(text, &[&x, slot, &ones]);
        let text = "grouped_dot f32[2,1,74,11], i32[2,3,1], f32[6,11,11]";
        let made = one(text, &[&rows, counts, &w]);
        let text = "unpermute f32[2,1,74,11], i32[1,37,2], f32[1,37,2]";
        let got = one(text, &[&made, slot, &gates]);
        let mut taken = [0; 6];
        let mut want = Tensor::full(&got.shape, 0.0);
        each_index(&[37, 2], |i| {
            let e = chosen.at(&[0, i[0], i[1]]) as usize;
            taken[e] += 1;
            if taken[e] > kept {
                return;
            }
            for o in 0..11 {
                let y: f64 = (0..11).map(|h| x.at(&[0, i[0], h]) * w.at(&[e, o, h])).sum();
                *want.at_mut(&[0, i[0], o]) += gates.at(&[0, i[0], i[1]]) * y;
            }
        });
        assert!(taken.iter().any(|&n| n > 7), "{taken:?}");
        near(route, &got, |at| Some(want.at(at)));
    }
}

/// Of sizes that threads share: the same bits with one thread as with several, and the op's meaning.
#[test]
fn threads_share_what_is_large() {
    let number = |i: &[usize], n: usize| i.iter().fold(7, |s, &i| (s * 31 + i * 17) % 1009) % n;
    let chosen = Tensor::from_fn(&[2, 17_000, 2], |i| number(i, 8) as f64 - 1.0);
    for text in [
        "route[g=2,e=3; rows=34000; capacity=none] i32[2,17000,2]",
        "route[g=2,e=3; rows=34000; capacity=3000] i32[2,17000,2]",
    ] {
        compare("large", text, &[&chosen]);
    }
    compare("large", "top_k[te->tk; k=2] f32[5000,8]", &[&draw(&[5000, 8], "scores")]);
    // A row for each of the first copies, and none for some.
    let slot = Tensor::from_fn(&[2, 90, 2], |i| (2 * i[1] + i[2]) as f64 - 9.0);
    let (x, gates) = (draw(&[2, 90, 330], "x"), draw(&[2, 90, 2], "gates"));
    let rows = draw(&[2, 2, 86, 330], "rows");
    let text = "dispatch[g=2,c=86] f32[2,90,330], i32[2,90,2], f32[2,90,2]";
    let sent = run(text, &[&x, &slot, &gates]).unwrap().remove(0);
    near(text, &sent, |at| {
        let copy = 86 * at[0] + at[2] + 9;
        let from = (copy < 180).then_some([at[1], copy / 2, copy % 2])?;
        Some(x.at(&[from[0], from[1], at[3]]) * gates.at(&from))
    });
    compare(
        "large",
        "unpermute f32[2,2,86,330], i32[2,90,2], f32[2,90,2]",
        &[&rows, &slot, &gates],
    );
    compare(
        "large",
        "combine_gates_grad f32[2,2,86,330], i32[2,90,2], f32[2,90,330]",
        &[&rows, &slot, &x],
    );
}
