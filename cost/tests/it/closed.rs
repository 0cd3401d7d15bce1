//! What must hold of prices in closed form, whatever the constants are.

use shardc_cost::device::{Device, Precision};
use shardc_cost::layer::Question;
use shardc_cost::layout::{Context, Job, Kernels, Layout, Overlap, Recompute, Schedule, Stack};
use shardc_cost::model::{Experts, Latent, Sizes};
use shardc_cost::step::{Closed, StepCost};
use shardc_cost::table;
use shardc_ir::diag::Result;

/// The prices of the runs of a table.
fn prices(text: &str, machines: &[Device]) -> Result<String> {
    table::prices(&table::read(text)?, machines)
}

const LLAMA: Sizes = Sizes {
    layers: 80,
    hidden: 8192,
    heads: 64,
    kv_heads: 8,
    head_dim: 128,
    ffn: 28672,
    vocab: 128256,
    glu: true,
    experts: None,
    latent: None,
    scans: None,
};

const V3: Sizes = Sizes {
    layers: 61,
    hidden: 7168,
    heads: 128,
    kv_heads: 128,
    head_dim: 128,
    ffn: 18432,
    vocab: 129280,
    glu: true,
    experts: Some(Experts {
        experts: 256,
        top_k: 8,
        ffn: 2048,
        shared: 2048,
        dense_layers: 3,
        domains: None,
    }),
    latent: Some(Latent::V3),
    scans: None,
};

const LAYOUT: Layout = Layout {
    tp: 8,
    cp: 1,
    context: Context::Gathered,
    even: false,
    dp: 8,
    pp: 4,
    chunks: 1,
    ep: 1,
    etp: 1,
    shards: 8,
    zero: 1,
    sp: true,
    recompute: Recompute::None,
    schedule: Schedule::OneFOneB,
    microbatch: 1,
    microbatches: 16,
};

fn price(sizes: &Sizes, layout: &Layout, device: &Device, precision: Precision) -> StepCost {
    let overlap = Overlap { dp: true, pp: true, ..Overlap::default() };
    let attention = Kernels::Flash(2);
    let job = &Job { seq: 4096, seen: 0.5, precision, attention, overlap, compiled: true };
    let question = Question { sizes, layout, job, stack: Stack::named("shardc"), device };
    Closed { question, balanced: true }.price().expect("a price")
}

fn layouts() -> Vec<(Sizes, Layout)> {
    let dense = [
        LAYOUT,
        Layout { sp: false, zero: 0, recompute: Recompute::Full, ..LAYOUT },
        Layout { tp: 1, dp: 64, shards: 8, zero: 3, ..LAYOUT },
        Layout { tp: 4, cp: 2, zero: 2, schedule: Schedule::ZbH1, ..LAYOUT },
        Layout { chunks: 2, schedule: Schedule::Interleaved, ..LAYOUT },
        Layout { chunks: 2, schedule: Schedule::ZbV, recompute: Recompute::Selective, ..LAYOUT },
        Layout { pp: 1, dp: 32, shards: 32, zero: 3, ..LAYOUT },
    ];
    let experts = [
        Layout { tp: 1, pp: 16, dp: 128, shards: 128, ep: 64, ..LAYOUT },
        Layout { tp: 8, pp: 8, dp: 32, shards: 32, ep: 32, etp: 8, ..LAYOUT },
    ];
    let dense = dense.into_iter().map(|l| (LLAMA, l));
    dense.chain(experts.into_iter().map(|l| (V3, l))).collect()
}

#[test]
fn parts_add_up_and_use_less_than_the_peak() {
    for d in Device::known().into_iter().filter(|d| d.peak.contains_key(&Precision::Bf16)) {
        for (sizes, layout) in layouts() {
            let cost = price(&sizes, &layout, &d, Precision::Bf16);
            let sum: f64 = cost.parts.list().iter().map(|p| p.1).sum();
            assert_eq!(sum, cost.total, "{} {layout:?}", d.name);
            assert!(cost.parts.list().iter().all(|p| p.1 >= 0.0), "{:?}", cost.parts);
            assert!(cost.mfu > 0.0 && cost.mfu < 1.0, "{} {layout:?}: {}", d.name, cost.mfu);
        }
    }
}

#[test]
fn a_faster_machine_is_never_slower() {
    for d in ["h100-sxm", "a100-80", "gb200-nvl72", "v100-32"] {
        let d = Device::named(d).expect("known");
        let p =
            if d.peak.contains_key(&Precision::Bf16) { Precision::Bf16 } else { Precision::F16 };
        for (sizes, layout) in layouts() {
            let before = price(&sizes, &layout, &d, p).total;
            for (name, value) in [("nic", d.nic), ("link", d.link), ("hbm", d.hbm)] {
                let twice = d.clone().with(name, 2.0 * value / 1e9).expect("a speed");
                let after = price(&sizes, &layout, &twice, p).total;
                assert!(after <= before, "{} {name} {layout:?}: {before} {after}", d.name);
            }
        }
    }
}

/// The same layout where tp stays in a domain, and where domains are too small for it.
#[test]
fn tensor_parallelism_inside_a_domain_is_never_dearer_than_across() {
    let d = Device::named("h100-sxm").expect("known");
    let small = d.clone().with("domain", 2.0).expect("a count");
    for (sizes, layout) in layouts() {
        let of = |d| price(&sizes, &layout, d, Precision::Bf16).parts.tp;
        assert!(of(&d) <= of(&small), "{layout:?}");
        assert!(layout.tp == 1 || of(&d) < of(&small), "{layout:?}");
    }
}

#[test]
fn recomputing_costs_time_and_bubbles_shrink_with_microbatches() {
    let d = Device::named("h100-sxm").expect("known");
    let of = |l: Layout| price(&LLAMA, &l, &d, Precision::Bf16);
    let all = [Recompute::None, Recompute::Selective, Recompute::Full];
    let times = all.map(|recompute| of(Layout { recompute, ..LAYOUT }).total);
    assert!(times[0] < times[1] && times[1] < times[2], "{times:?}");
    let share = |m: usize| {
        let cost = of(Layout { microbatches: m, ..LAYOUT });
        cost.parts.bubble / cost.total
    };
    assert!(share(8) > share(16) && share(16) > share(64));
    let schedules = [Schedule::OneFOneB, Schedule::ZbH1, Schedule::ZbH2];
    let idle = schedules.map(|schedule| of(Layout { schedule, ..LAYOUT }).parts.bubble);
    assert!(idle[0] > idle[1] && idle[1] > idle[2], "{idle:?}");
}

#[test]
fn equal_questions_have_equal_answers() {
    let text = include_str!("../data/normalised_shared.csv");
    let machines = Device::known();
    let first = prices(text, &machines).expect("prices");
    assert_eq!(first, prices(text, &machines).expect("prices"));
    assert_eq!(first.lines().count(), 132);
    assert!(first.starts_with("id,step_s\ntorchtitan24#1,"));
}

#[test]
fn a_row_that_cannot_be_priced_is_named() {
    let text = include_str!("../data/normalised_shared.csv");
    let machines = Device::known();
    let two: Vec<&str> = text.lines().take(2).collect();
    let swaps = [
        ("h100-96-500w", "abacus", "hw is"),
        ("flash2", "slow", "attn is"),
        (",bf16,", ",fp8,", ""),
        (",4096,32,8,", ",x,32,8,", "hidden is"),
        (",4096,32,8,", ",0,32,8,", "hidden is"),
        (",16,8192,", ",16,99999999999999999999,", "seq is"),
        ("torchtitan,full", "unheard-of,full", ""),
        (",h100-96-500w,", ",a100-80,", ""),
    ];
    for (from, to, says) in swaps {
        let table = format!("{}\n{}\n", two[0], two[1].replacen(from, to, 1));
        assert_ne!(table.lines().nth(1), Some(two[1]), "{from}");
        match prices(&table, &machines) {
            Ok(_) => assert_eq!(says, "", "{to}"),
            Err(d) => {
                assert!(!says.is_empty() && d.message.contains(says), "{to}: {d}");
                assert!(d.place.is_some_and(|p| p.contains("torchtitan24#1")), "{to}");
            }
        }
    }
    let fp8 = format!(
        "{}\n{}\n",
        two[0],
        two[1].replace("bf16", "fp8").replace("h100-96-500w", "a100-80")
    );
    assert_eq!(prices(&fp8, &machines).expect_err("an A100 has no fp8").code, "device");
    assert_eq!(prices("a,b\n1\n", &machines).expect_err("too few cells").code, "rows");
    assert_eq!(prices("", &machines).expect("nothing"), "id,step_s\n");
}

/// Numbers at their bounds, and all words of every column: a price or a diagnostic, never a panic.
#[test]
fn any_number_has_a_price_or_a_diagnostic() {
    let text = include_str!("../data/normalised_shared.csv");
    let machines = Device::known();
    let (head, rest) = text.split_once('\n').expect("a head");
    let columns = head.split(',').count();
    let rows: Vec<Vec<&str>> = [0, 13, 20, 60]
        .map(|i| rest.lines().nth(i).expect("a row"))
        .map(|l| l.split(',').collect())
        .to_vec();
    let words =
        ["", "0", "1", "3", "1073741824", "1e9", "-1", "x", "\u{e4}", "full", "zb-v", "dsv3"];
    let mut priced = 0;
    for row in rows {
        for i in 0..columns {
            for word in words {
                let mut row = row.clone();
                row[i] = word;
                priced +=
                    usize::from(prices(&format!("{head}\n{}\n", row.join(",")), &machines).is_ok());
            }
        }
        let mut most = row.clone();
        let wide = ["layers", "hidden", "heads", "ffn", "vocab", "mbs", "m", "seq", "dp"];
        for (i, _) in head.split(',').enumerate().filter(|c| wide.contains(&c.1)) {
            most[i] = "1073741824";
        }
        let _ = prices(&format!("{head}\n{}\n", most.join(",")), &machines);
    }
    assert!(priced > 500, "{priced}");
}
