//! Layouts priced together are those priced one by one.

use super::*;
use crate::planner::space::candidates;
use shardc_ir::types::DType;
use std::path::Path;

/// A model on so many ranks, with a batch.
struct Case {
    form: ClosedForm,
    device: Device,
    all: Vec<Candidate>,
}

fn case(model: &str, gpus: usize, batch: usize, ifs: Ifs) -> Case {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(model);
    let f = shardc_plans::input::facts(&path).expect("the config").expect("a family");
    let base = Options { dtype: DType::BF16, seq: 32, global_batch: batch, ..Options::default() };
    let device = Device::named("h100-sxm").expect("known").with("domain", 4.0).expect("a count");
    let input = shardc_plans::input::read_model(&path, &base).expect("the config");
    let sizes = shardc_plans::machine::sizes(&f, &input.config);
    let all = candidates(&f, &sizes, &base, (gpus, 4));
    Case {
        form: ClosedForm::of(&f, &input, &base, ifs, &device).expect("nothing is frozen"),
        device,
        all,
    }
}

impl Case {
    fn closed<'a>(&'a self, c: &'a Candidate) -> Closed<'a> {
        Closed { question: self.form.question(&self.device, c), balanced: true }
    }

    /// A layout's seconds by the formula, and what its schedule waits longer, with nothing from another one.
    fn plain(&self, c: &Candidate) -> (f64, f64) {
        let closed = self.closed(c);
        let pieces = Pieces::of(&closed.question).expect("it has bf16");
        let loads = closed.loads(&pieces);
        let ranks = closed.ranks(&pieces, &StageLoads::of(&loads));
        let moved = self.form.ifs.moved(|| self.form.memory().host(c, ranks.params()));
        let seconds = closed.price().expect("it has bf16").total + moved;
        if c.layout.pp == 1 {
            return (seconds, 0.0);
        }
        let (named, p, v, m) = memory::order(c);
        let schedule = make(named, p, v, m).expect("it is legal");
        let (mut times, mut own) = ([vec![], vec![], vec![]], vec![0.0; p]);
        for (rank, load) in closed.stages(&pieces) {
            let [f, i, w] = pieces.seconds(&load);
            own[rank] += [f, i, w].iter().sum::<f64>();
            times[0].push(f);
            times[1].push(i);
            times[2].push(w);
        }
        let [forward, input, weight] = times;
        let span = replay(&schedule, &Times { forward, input, weight }).expect("it runs");
        let longest = own.iter().copied().fold(0.0, f64::max);
        let formula = closed.price().expect("it has bf16").parts.bubble;
        (seconds, (span.makespan() - m as f64 * longest - formula).max(0.0))
    }
}

#[test]
fn layouts_priced_together_are_those_priced_one_by_one() {
    let mut offload = Ifs::default();
    assert!(offload.take("offload=25").expect("a word"));
    for (model, gpus, batch, ifs) in [
        ("benches/configs/llama-3.1-8b.json", 8, 32, Ifs::default()),
        ("benches/configs/llama-3.1-8b.json", 4, 16, offload),
        ("tests/fixtures/llama_deep/config.json", 6, 24, Ifs::default()),
        ("tests/fixtures/qwen3_moe/config.json", 8, 16, Ifs::default()),
        ("tests/fixtures/deepseek_v3/config.json", 4, 8, Ifs::default()),
    ] {
        let case = case(model, gpus, batch, ifs);
        let memory = case.form.memory();
        let mut least: Vec<f64> = case.all.iter().map(|c| memory.least(c)).collect();
        least.sort_by(f64::total_cmp);
        // Half of them have no chance.
        let limit = least[least.len() / 2].ceil() as usize;
        let mut guesses =
            Guesses::of(&case.form, &case.device, &case.all, &|_| limit).expect("prices");
        let may_fit: Vec<usize> =
            (0..case.all.len()).filter(|i| memory.least(&case.all[*i]) <= limit as f64).collect();
        assert_eq!(guesses.len(), may_fit.len(), "{model}");
        let plain: Vec<(f64, f64)> = case.all.iter().map(|c| case.plain(c)).collect();
        // The same to the last bit, and in the same order.
        let formula: Vec<f64> = plain.iter().map(|p| p.0).collect();
        assert_eq!(guesses.seconds, formula, "{model}");
        let mut order = may_fit.clone();
        order.sort_by(|i, j| formula[*i].total_cmp(&formula[*j]));
        let own: Vec<usize> = guesses.order.iter().map(|i| *i as usize).collect();
        assert_eq!(own, order, "{model}");
        let found: Vec<Guess> = std::iter::from_fn(|| guesses.next()).collect();
        assert!(found.is_sorted_by(|a, b| a.seconds <= b.seconds), "{model}");
        let key = |c: &Candidate, s: f64| (format!("{c:?}"), s.to_bits());
        let mut found: Vec<_> = found.iter().map(|g| key(&g.candidate, g.seconds)).collect();
        let of = |i: &usize| key(&case.all[*i], plain[*i].0 + plain[*i].1);
        let mut expected: Vec<_> = may_fit.iter().map(of).collect();
        found.sort();
        expected.sort();
        assert!(found == expected, "{model}");
        let waiting = plain.iter().filter(|p| p.1 > 0.0).count();
        println!("{model}: {} layouts, {waiting} wait longer", case.all.len());
        assert!(case.all.len() > 100, "{model}");
    }
}
