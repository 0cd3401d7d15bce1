//! Memory of other software against published peaks: the rows of `normalised_shared.csv` that have one.

use shardc_cost::device::Device;
use shardc_cost::held::Software;
use shardc_cost::layer::Question;
use shardc_cost::step::{Closed, Pieces};
use shardc_cost::table::{self, Run};

fn held(run: &Run, software: Software) -> f64 {
    let Run { sizes, layout, job, stack, device, .. } = run;
    let question = Question { sizes, layout, job, stack, device };
    let closed = Closed { question, balanced: false };
    let pieces = Pieces::of(&question).expect("a price");
    question.held(software, &closed.loads(&pieces))
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Medians of the absolute errors; rows of `zb-2p` that ran with other microbatches than their row says are left out.
#[test]
fn published_peaks_are_near() {
    let rows = table::read(include_str!("../data/normalised_shared.csv")).expect("a table");
    let devices = Device::known();
    for (source, software, most, count) in [
        ("torchtitan24", Software::Torchtitan, 0.15, 18),
        ("zerobubble23", Software::Megatron, 0.10, 75),
    ] {
        let other =
            |r: &table::Row| r.text("file").contains("table6") && r.text("schedule") == "zb-2p";
        let own = rows.iter().filter(|r| r.text("source") == source && !other(r));
        let errors: Vec<f64> = own
            .map(|r| {
                let peak: f64 = r.text("mem_gib").parse().expect("a peak");
                let is = held(&r.run(&devices).expect("a run"), software) / f64::from(1 << 30);
                println!(
                    "{:16} {:12} {is:6.1} {peak:6.1} {:+.2}",
                    r.text("id"),
                    r.text("schedule"),
                    is / peak - 1.0
                );
                is / peak - 1.0
            })
            .collect();
        let off = median(errors.iter().map(|e| e.abs()).collect());
        println!(
            "{source}: {} runs, median {off:.3}, too little in {}",
            errors.len(),
            errors.iter().filter(|e| **e < 0.0).count()
        );
        assert_eq!(errors.len(), count);
        assert!(off <= most, "{source}: {off}");
    }
}
