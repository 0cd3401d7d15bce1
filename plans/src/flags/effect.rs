//! Flags that were given and change nothing, because of other flags or of what the model is.
//!
//! What the mesh alone decides, the passes say; here is what is known of flags, so that none is
//! silently ignored.

use super::Flags;
use super::spec::{Idle, Seen, idle};
use shardc_frontends::Facts;
use shardc_ir::diag::Diag;
use shardc_ir::func::Func;
use shardc_passes::options::Options;

const UNTRAINED: Idle = idle(|s| !s.trains(), "nothing is trained with --mode infer");

impl Flags {
    /// A warning for every flag that was given and changes nothing in this model.
    pub fn without_effect(&self, o: &Options, model: &Func, facts: Option<&Facts>) -> Vec<Diag> {
        let seen = Seen { flags: self, o, model, facts };
        let mut all = vec![];
        for (spec, value) in self.given() {
            let untrained = spec.trains.then_some(&UNTRAINED);
            let is = |i: &&Idle| value.has(i.value) && (i.when)(&seen);
            for i in spec.idle.iter().chain(untrained).filter(is) {
                let flag = format!("--{} {}", spec.flag, i.value);
                let what = format!("{} has no effect: {}", flag.trim_end(), i.why);
                all.push(Diag::new("no-effect", what).help("leave it out"));
            }
        }
        all
    }
}
