//! Which numbers of ranks, chunks and microbatches a schedule takes.

use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::schedule::{MAX_MICROBATCHES, MAX_PAIRS, MAX_STAGES};

use super::Named;

/// A rule that does not hold, and the nearest numbers with which it would.
struct Broken {
    rule: String,
    nearest: Vec<(&'static str, usize)>,
}

/// True if a schedule runs on p ranks with v chunks each and m microbatches.
pub fn runs(named: Named, p: usize, v: usize, m: usize) -> bool {
    broken(named, p, v, m).is_none()
}

/// Refuses what a schedule cannot do on p ranks with v chunks each and m microbatches.
pub fn legal(named: Named, p: usize, v: usize, m: usize) -> Result<()> {
    let Some(Broken { rule, nearest }) = broken(named, p, v, m) else { return Ok(()) };
    let name = named.name();
    let word = |what: &str, n: usize| match what {
        "p" => format!("pp={n}"),
        "v" => format!("--chunks {n}"),
        _ => count(n, "microbatch", "microbatches"),
    };
    let nearest: Vec<String> = nearest.iter().map(|&(what, n)| word(what, n)).collect();
    let chunks = count(v, "chunk", "chunks");
    let numbers = format!("pp={p}, {chunks} per rank, {}", word("m", m));
    let d = Diag::new("schedule-rule", format!("`{name}` does not run with {numbers}"))
        .rule(format!("{rule} (p ranks, v chunks per rank, m microbatches)"))
        .help(format!("nearest legal: {}", nearest.join(" or ")));
    let others = [Named::Interleaved, Named::OneFOneB, Named::LoopedBfs];
    match others.into_iter().find(|&n| runs(n, p, v, m)) {
        Some(n) => Err(d.help(format!("or keep the numbers and use `{}`", n.name()))),
        None => Err(d),
    }
}

fn broken(named: Named, p: usize, v: usize, m: usize) -> Option<Broken> {
    let rule = |rule: &str, nearest: &[(&'static str, usize)]| {
        Some(Broken { rule: rule.to_string(), nearest: nearest.to_vec() })
    };
    if p == 0 {
        return rule("p >= 1", &[("p", 1)]);
    }
    if v == 0 {
        return rule("v >= 1", &[("v", named.default_chunks())]);
    }
    if m == 0 {
        let least = match named {
            Named::DualPipeV => p.saturating_mul(2),
            Named::Interleaved => p,
            _ => 1,
        };
        return rule("m >= 1", &[("m", least)]);
    }
    if let Some(rule) = too_many(p, v, m) {
        return Some(rule);
    }
    match named {
        Named::Naive | Named::Gpipe | Named::OneFOneB | Named::ZbH1 | Named::ZbH2 if v != 1 => {
            rule("v == 1", &[("v", 1)])
        }
        Named::Naive if m != 1 => rule("m == 1", &[("m", 1)]),
        Named::Naive | Named::Gpipe | Named::OneFOneB | Named::ZbH1 | Named::ZbH2 => None,
        Named::LoopedBfs if p == 1 && v > 1 => rule("v == 1 where p == 1", &[("v", 1), ("p", 2)]),
        Named::LoopedBfs => None,
        Named::Interleaved if p == 1 => rule("p >= 2", &[("p", 2)]),
        Named::Interleaved if v < 2 => rule("v >= 2", &[("v", 2)]),
        Named::Interleaved if m % p != 0 => {
            let (below, above) = (m / p * p, m.div_ceil(p) * p);
            match below {
                0 => rule("m % p == 0", &[("m", above)]),
                _ => rule("m % p == 0", &[("m", below), ("m", above)]),
            }
        }
        Named::Interleaved => None,
        Named::DualPipeV if p == 1 => rule("p % 2 == 0", &[("p", 2)]),
        Named::DualPipeV if p % 2 != 0 => rule("p % 2 == 0", &[("p", p - 1), ("p", p + 1)]),
        Named::ZbV | Named::VHalf | Named::VMin if p == 1 => rule("p >= 2", &[("p", 2)]),
        Named::ZbV | Named::VHalf | Named::VMin | Named::DualPipeV if v != 2 => {
            rule("v == 2", &[("v", 2)])
        }
        Named::DualPipeV if m < 2 * p => rule("m >= 2 * p", &[("m", 2 * p)]),
        Named::ZbV | Named::VHalf | Named::VMin | Named::DualPipeV => None,
    }
}

/// Refuses more stages, microbatches or pairs of them than lists of work are made for.
fn too_many(p: usize, v: usize, m: usize) -> Option<Broken> {
    let stages = p.saturating_mul(v);
    let rule = if stages > MAX_STAGES {
        format!("p * v <= {MAX_STAGES}")
    } else if m > MAX_MICROBATCHES {
        format!("m <= {MAX_MICROBATCHES}")
    } else if stages.saturating_mul(m) > MAX_PAIRS {
        format!("p * v * m <= {MAX_PAIRS}")
    } else {
        return None;
    };
    // So many stages fit with these microbatches.
    let most = MAX_STAGES.min(MAX_PAIRS / m.min(MAX_MICROBATCHES));
    let nearest = if stages <= MAX_STAGES {
        ("m", MAX_MICROBATCHES.min(MAX_PAIRS / stages))
    } else if most / v >= 2 {
        ("p", most / v)
    } else {
        ("v", (most / p).max(1))
    };
    Some(Broken { rule, nearest: vec![nearest] })
}
