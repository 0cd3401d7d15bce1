//! What-ifs that no plan has: another format or place of the optimizer's state, weights in fp8. They are priced,
//! and nothing compiles them.

use shardc_cost::device::{Device, Precision};
use shardc_cost::layout::{Job, Stack};
use shardc_cost::parts::Parts;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::RoleKind;
use shardc_ir::names::nearest;
use shardc_ir::plan::{MemoryClass, Plan, RankClass};
use std::collections::BTreeMap;

/// Bytes per second of a host's link in one direction, if nobody says: most of what PCIe 4.0 x16 has (32e9).
const HOST: f64 = 25e9;

/// What the words are.
const WORDS: &str = "offload, offload=GB/s, optimizer=8bit, optimizer=bf16, weights=fp8";

/// What `--what-if` knows beside the numbers of a machine, for a word that is none of both.
pub fn unknown(name: &str, d: Diag) -> Diag {
    let all = Device::NUMBERS.into_iter().chain(["offload", "optimizer", "weights"]);
    let d = match nearest(name, all, 1)[..] {
        [near, ..] => d.help(format!("did you mean {near}?")),
        [] => d,
    };
    d.help(format!("or what no plan has, and is priced: {WORDS}"))
}

/// In what format AdamW's two moments are kept, of which plans have f32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Moments {
    F32,
    Bf16,
    Eight,
}

impl Moments {
    fn bytes(self) -> f64 {
        match self {
            Moments::F32 => 4.0,
            Moments::Bf16 => 2.0,
            Moments::Eight => 1.0,
        }
    }
}

/// What is asked beside what can be compiled.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ifs {
    /// The optimizer's state is on the host, behind a link of so many bytes per second in each direction.
    host: Option<f64>,
    moments: Moments,
    /// Weights are kept and multiplied in fp8.
    fp8: bool,
}

impl Default for Ifs {
    fn default() -> Ifs {
        Ifs { host: None, moments: Moments::F32, fp8: false }
    }
}

/// What of a rank's memory a what-if changes: all of it is there through the whole step.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct MemoryChange {
    /// Bytes less on the device.
    less: usize,
    /// Of the moments, bytes less.
    moments: usize,
    /// Bytes on the host.
    host: usize,
}

impl Ifs {
    /// Takes a word, if it is of these.
    ///
    /// # Errors
    /// `flag` if it has another value, or says again what was said.
    pub fn take(&mut self, given: &str) -> Result<bool> {
        let (name, value) = match given.split_once('=') {
            Some((n, v)) => (n.trim(), Some(v.trim())),
            None => (given.trim(), None),
        };
        let no = |what: &str| {
            let short: String = given.chars().take(40).collect();
            Diag::new("flag", format!("`{short}` {what}"))
                .at(format!("--what-if {short}"))
                .help(format!("what no plan has, and is priced: {WORDS}"))
        };
        let bad = "is not a value of --what-if";
        let again = match name {
            "offload" => self.host.is_some(),
            "optimizer" => self.moments != Moments::F32,
            "weights" => self.fp8,
            _of_the_machine => return Ok(false),
        };
        if again {
            return Err(no("says again what was said"));
        }
        match (name, value) {
            ("offload", None) => self.host = Some(HOST),
            ("offload", Some(text)) => {
                let speed = text.parse::<f64>().ok().map(|x| x * 1e9);
                let speed = speed.filter(|x| *x > 0.0 && x.is_finite());
                self.host = Some(speed.ok_or_else(|| no(bad))?);
            }
            ("optimizer", Some("8bit")) => self.moments = Moments::Eight,
            ("optimizer", Some("bf16")) => self.moments = Moments::Bf16,
            ("weights", Some("fp8")) => self.fp8 = true,
            _another => return Err(no(bad)),
        }
        Ok(true)
    }

    /// True if a plan cannot do what is asked.
    pub fn is_any(&self) -> bool {
        *self != Ifs::default()
    }

    /// The words, with numbers that nobody said.
    pub fn words(&self) -> Vec<String> {
        let host = self.host.map(|x| format!("offload={}", x / 1e9));
        let moments = match self.moments {
            Moments::F32 => None,
            Moments::Bf16 => Some("optimizer=bf16".to_string()),
            Moments::Eight => Some("optimizer=8bit".to_string()),
        };
        let fp8 = self.fp8.then(|| "weights=fp8".to_string());
        host.into_iter().chain(moments).chain(fp8).collect()
    }

    /// Refuses what has no meaning for weights of this type.
    ///
    /// # Errors
    /// `flag`.
    pub fn check(&self, p: Precision) -> Result<()> {
        if self.fp8 && p != Precision::Bf16 {
            return Err(Diag::new("flag", "weights=fp8 is in place of weights in bf16")
                .at("--what-if weights=fp8")
                .rule("fp8 has an f32 master copy beside it, as bf16 has")
                .help("use --dtype bf16"));
        }
        Ok(())
    }

    /// The job with these products.
    pub fn job(&self, job: &Job) -> Job {
        Job { precision: if self.fp8 { Precision::Fp8 } else { job.precision }, ..*job }
    }

    /// The stack with what its optimizer moves: both moments are read and written.
    pub fn stack(&self, stack: &Stack) -> Stack {
        let less = 2.0 * 2.0 * (Moments::F32.bytes() - self.moments.bytes());
        Stack { optimizer: stack.optimizer - less, ..stack.clone() }
    }

    /// Bytes of the optimizer's state for each parameter, on the device and on the host; `master`: with an f32
    /// copy of weights, `moments`: with both of AdamW's.
    pub fn state(&self, master: bool, moments: bool) -> (f64, f64) {
        let moments = if moments { 2.0 * self.moments.bytes() } else { 0.0 };
        let all = moments + if master { 4.0 } else { 0.0 };
        if self.host.is_some() { (0.0, all) } else { (all, 0.0) }
    }

    /// Bytes of a weight, of which plans have so many.
    pub fn weight(&self, wide: f64) -> f64 {
        if self.fp8 { Precision::Fp8.bytes() } else { wide }
    }

    /// Seconds in which state comes from the host and goes back, both at once and beside nothing else.
    pub fn moved(&self, host: impl FnOnce() -> f64) -> f64 {
        self.host.map_or(0.0, |speed| host() / speed)
    }

    /// Bytes that a rank needs of a plan, if that were so.
    pub fn peak(&self, plan: &Plan) -> usize {
        let of = |c: &RankClass| c.memory.peak_bytes.saturating_sub(self.change(plan, c).less);
        plan.classes.iter().map(of).max().unwrap_or(0)
    }

    /// Parts of a plan's price, if that were so; `closed` are those of its layout in closed form, as it is and as it
    /// would be.
    pub fn parts(&self, plan: &Plan, device: &Device, own: Parts, closed: [Parts; 2]) -> Parts {
        let all: Vec<MemoryChange> = plan.classes.iter().map(|c| self.change(plan, c)).collect();
        let most = |of: fn(&MemoryChange) -> usize| all.iter().map(of).max().unwrap_or(0) as f64;
        let mut out = own;
        if self.fp8 {
            // As much more or less as in closed form.
            let ratio = closed[1].with(closed[0], |x, y| if y > 0.0 { x / y } else { 1.0 });
            out = own.with(ratio, |x, by| x * by);
        }
        let unmoved = 2.0 * most(|c| c.moments) / device.memory_speed();
        out.optimizer = (own.optimizer - unmoved).max(0.0) + self.moved(|| most(|c| c.host));
        out
    }

    /// What changes for the ranks of a class.
    fn change(&self, plan: &Plan, c: &RankClass) -> MemoryChange {
        let of =
            |class: MemoryClass| c.memory.whole.iter().find(|w| w.0 == class).map_or(0, |w| w.1);
        let (mut moments, mut weights) = (BTreeMap::new(), BTreeMap::new());
        for &fi in &c.funcs {
            let f = &plan.module.funcs[fi];
            for port in f.args.iter().chain(&f.results) {
                let Some(role) = &port.role else { continue };
                let Some(place) = c.memory.places[fi].find(port.value) else { continue };
                // Frame 0 is there through the whole step.
                if place.frame != 0 {
                    continue;
                }
                match role.kind {
                    RoleKind::State(_) => moments.insert(place.offset, place.bytes),
                    RoleKind::Unsharded | RoleKind::Param if f.ty(port.value).dtype.is_half() => {
                        weights.insert(place.offset, place.bytes)
                    }
                    _another => None,
                };
            }
        }
        let less = |all: BTreeMap<usize, usize>, part: f64| -> usize {
            (all.values().sum::<usize>() as f64 * part) as usize
        };
        let moments = less(moments, 1.0 - self.moments.bytes() / Moments::F32.bytes());
        let weights = less(weights, if self.fp8 { 0.5 } else { 0.0 });
        let state = of(MemoryClass::Optimizer);
        let host = if self.host.is_some() { state - moments.min(state) } else { 0 };
        MemoryChange { less: moments + host + weights, moments, host }
    }
}
