//! The parameters of gated DeltaNet.

use super::*;
use crate::family::Recurrent;
use crate::graph::recurrent::DeltaNet;

impl Declare<'_, '_, '_> {
    /// The parameters of the module `within` a block, but the product behind its heads.
    pub(super) fn recurrent(&mut self, r: &Recurrent, block: &str) -> Result<DeltaNet> {
        let sizes = self.arch.recurrent.expect("a family with gated DeltaNet");
        let hidden = self.arch.facts.hidden;
        let within = format!("{block}.{}", r.module);
        let (keys, values, n) = (sizes.keys(), sizes.values(), sizes.value_heads());
        let linear = |d: &mut Self, module, out| {
            let l = family::Linear::torch(module, Bias::Never);
            d.linear(&within, &l, [hidden, out], Split::Column, None)
        };
        let qkvz = linear(self, "in_proj_qkvz", 2 * (keys + values))?;
        let ba = linear(self, "in_proj_ba", 2 * n)?;
        let (conv_scope, name) = self.enter(&format!("{within}.conv1d"));
        let normal = Init::Normal(self.arch.std);
        let mut slice = |part, start, len| {
            let of = (part, TensorSlice::of(0, start, len), 2 * keys + values);
            let shape = vec![len, 1, sizes.taps];
            self.weight("conv", format!("{name}.weight"), shape, Some(of), normal, Some(0))
        };
        let conv = [slice("q", 0, keys), slice("k", keys, keys), slice("v", 2 * keys, values)];
        let (_, name) = self.enter(&within);
        let mut each = |part: &str, init| {
            self.weight(part, format!("{name}.{part}"), vec![n], None, init, Some(0))
        };
        let (decay, decay_bias) =
            (each("A_log", Init::LogOfUniform(16.0)), each("dt_bias", Init::Ones));
        let own = family::Norm { around_one: false, ..family::Norm::RMS };
        let norm = self.norm_of(own, &format!("{within}.norm"), &[sizes.value_width]);
        Ok(DeltaNet { qkvz, ba, conv_scope, conv, decay, decay_bias, norm })
    }
}
