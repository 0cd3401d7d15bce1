//! Corrects the biases by which routers choose experts, in `@optimizer_step`: no loss balances the load then.
//!
//! `bias_i += rate · sign(mean load − load_i)`, where the load of an expert is how many copies of tokens
//! chose it in the whole step (Wang et al., 2024, *Auxiliary-Loss-Free Load Balancing*; DeepSeek-V3,
//! 2.1.2). No gradient, no decay and no state: the bias only chooses.

use crate::shard::reshard::Resharder;
use shardc_ir::attr::{Broadcast, RuleAttr};
use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, Name, ParamLayout, Port, Role, RoleKind, Value};
use shardc_ir::ops::*;
use shardc_ir::types::Type;

/// A bias to correct.
pub(super) struct Corrected<'a> {
    of: &'a ParamLayout,
    param: Value,
    load: Value,
}

impl<'a> Corrected<'a> {
    /// Those of a rank's parameters whose load its functions count, as arguments.
    pub fn arguments(
        f: &mut Func,
        params: &[&'a ParamLayout],
        loops: &[&Func],
    ) -> Vec<Corrected<'a>> {
        let counted = |p: &ParamLayout| {
            let role = Role { kind: RoleKind::TokensPerExpert, name: p.param.name.clone() };
            let find = |g: &&Func| {
                let a = g.args.iter().find(|a| a.role.as_ref() == Some(&role))?;
                Some(g.ty(a.value).clone())
            };
            Some((loops.iter().find_map(find)?, role))
        };
        let mut all = vec![];
        for &of in params.iter().filter(|p| p.trainable) {
            let Some((ty, role)) = counted(of) else { continue };
            let param = f.arg(of.stored.clone(), of.name.clone(), Some(of.param.clone()));
            let hint = of.name.hint + "_load";
            let load = f.arg(ty, Name { hint, ..of.name.clone() }, Some(role));
            all.push(Corrected { of, param, load });
        }
        all
    }

    /// Moves the bias by `rate`, or not where the step does not apply. Counts are whole numbers, so `experts · mean − experts · load` is one,
    /// and its sign is what remains between -1 and 1.
    pub fn update(&self, b: &mut Builder, rate: f64, applies: Option<Value>) {
        b.enter(&self.of.scope);
        let whole = Type::f32(&b.ty(self.load).sizes());
        let experts = whole.elements() as f64;
        let load = reshard(b, self.load, &whole);
        // [e], or as a row [1, e].
        let n = whole.rank();
        let dims = &"ie"[2 - n..];
        let (sum, times) = (format!("{dims}->"), format!("{dims},->{dims}"));
        let total = b.push("total", ReduceSum { rule: RuleAttr::new(&sum, &[n]) }, &[load]);
        let over = b.push("over", Scale { by: -experts }, &[load]);
        let rule = Broadcast::new(&times, &[n, 0]);
        let under = b.push("under", Add { rule }, &[over, total]);
        b.note("as many times experts as the load is below the mean");
        let sign = b.push("sign", Clamp { lo: -1.0, hi: 1.0 }, &[under]);
        let mut by = b.push("by", Scale { by: rate }, &[sign]);
        if let Some(applies) = applies {
            let rule = Broadcast::new(&times, &[n, 0]);
            by = b.push("by", Mul { rule }, &[by, applies]);
        }
        let by = reshard(b, by, &self.of.stored);
        let new = b.push("new", Add::same(), &[self.param, by]);
        let hint = self.of.name.hint + "_new";
        b.f.rename(new, Name { hint, ..self.of.name.clone() });
        b.f.results.push(Port { value: new, role: Some(self.of.param.clone()) });
    }
}

/// The value in another layout.
fn reshard(b: &mut Builder, v: Value, to: &Type) -> Value {
    let path = Resharder::default().path(b.mesh, b.ty(v), to);
    let steps = path.unwrap_or_else(|| panic!("no collectives lead {} to {to:?}", b.f.name(v)));
    steps.into_iter().fold(v, |v, s| b.push_as("load", s.op, &[v], &s.ty))
}
