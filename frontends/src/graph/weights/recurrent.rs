//! The parameters of recurrences.

use super::*;
use crate::family::{Mixer, Recurrent};
use crate::graph::mamba2::Mamba2Params;
use crate::graph::recurrent::{self, DeltaNet};

/// The norm behind a scan, whatever the family's others are.
const GATED: family::Norm = family::Norm { around_one: false, ..family::Norm::RMS };

impl Declare<'_, '_, '_> {
    /// The parameters of the module `within` a block, but the product behind its heads.
    pub(super) fn recurrent(
        &mut self,
        r: &Recurrent,
        block: &str,
    ) -> Result<recurrent::RecurrentParams> {
        let within = format!("{block}.{}", r.module);
        Ok(match &r.mixer {
            Mixer::DeltaNet => recurrent::RecurrentParams::DeltaNet(self.delta_net(&within)?),
            Mixer::Mamba2(m) => recurrent::RecurrentParams::Mamba2(self.mamba2(m, &within)?),
        })
    }

    fn delta_net(&mut self, within: &str) -> Result<DeltaNet> {
        let sizes = self.arch.recurrent.expect("a family with gated DeltaNet");
        let hidden = self.arch.facts.hidden;
        let (keys, values, n) = (sizes.keys(), sizes.values(), sizes.value_heads());
        let linear = |d: &mut Self, module, out| {
            let l = family::Linear::torch(module, Bias::Never);
            d.linear(within, &l, [hidden, out], Split::Column, None)
        };
        let qkvz = linear(self, "in_proj_qkvz", 2 * (keys + values))?;
        let ba = linear(self, "in_proj_ba", 2 * n)?;
        let parts = [("q", keys, Some(0)), ("k", keys, Some(0)), ("v", values, Some(0))];
        let (conv_scope, conv) = self.convolution(within, parts, false);
        let (_, name) = self.enter(within);
        let decay = self.of_heads(&name, "A_log", Init::LogOfUniform(16.0));
        let decay_bias = self.of_heads(&name, "dt_bias", Init::Ones);
        let norm = self.norm_of(GATED, &format!("{within}.norm"), &[sizes.value_width]);
        Ok(DeltaNet { qkvz, ba, conv_scope, conv: conv.map(|c| c.0), decay, decay_bias, norm })
    }

    fn mamba2(&mut self, m: &family::Mamba2, within: &str) -> Result<Mamba2Params> {
        let sizes = self.arch.recurrent.expect("a family with Mamba-2");
        let hidden = self.arch.facts.hidden;
        let (keys, values, n) = (sizes.keys(), sizes.values(), sizes.value_heads());
        // What all heads share, every rank has.
        let (of_groups, keys_dim) = match sizes.key_heads {
            1 => (Split::Whole, None),
            _ => (Split::Column, Some(0)),
        };
        let mut start = 0;
        let mut slice = |d: &mut Self, part, out, split| {
            let l = family::Linear::torch("in_proj", m.bias).slice(part);
            let fused = FusedSlice { start, total: 2 * (values + keys) + n };
            start += out;
            d.linear(within, &l, [hidden, out], split, Some(fused))
        };
        let z = slice(self, "z", values, Split::Column)?;
        let x = slice(self, "x", values, Split::Column)?;
        let written = slice(self, "B", keys, of_groups)?;
        let read = slice(self, "C", keys, of_groups)?;
        let steps = slice(self, "dt", n, Split::Column)?;
        let parts = [("x", values, Some(0)), ("B", keys, keys_dim), ("C", keys, keys_dim)];
        let biased = self.biased(m.conv_bias)?;
        let (conv_scope, conv) = self.convolution(within, parts, biased);
        let (_, name) = self.enter(within);
        let decay = self.of_heads(&name, "A_log", Init::LogOfUniform(16.0));
        let step_bias = self.of_heads(&name, "dt_bias", Init::Ones);
        let beside = self.of_heads(&name, "D", Init::Ones);
        let norm = self.norm_of(GATED, &format!("{within}.norm"), &[values]);
        // Its channels are those of heads.
        self.weights.last_mut().expect("the norm's").tp_dim = Some(0);
        let mixed = [x, written, read];
        Ok(Mamba2Params { z, mixed, steps, conv_scope, conv, decay, step_bias, beside, norm })
    }

    /// A number of each head of values.
    fn of_heads(&mut self, within: &str, part: &str, init: Init) -> Value {
        let n = self.arch.recurrent.map_or(0, |s| s.value_heads());
        self.weight(part, format!("{within}.{part}"), vec![n], None, init, Some(0))
    }

    /// The scope of the convolution of some channels, one part behind the other, and weights [c, 1, w] and bias [c] of each;
    /// by which dim tp splits it.
    fn convolution(
        &mut self,
        within: &str,
        parts: [(&str, usize, Option<usize>); 3],
        biased: bool,
    ) -> (String, [(Value, Option<Value>); 3]) {
        let taps = self.arch.recurrent.map_or(0, |s| s.taps);
        let (scope, name) = self.enter(&format!("{within}.conv1d"));
        let total = parts.iter().map(|p| p.1).sum();
        let normal = Init::Normal(self.arch.std);
        let mut start = 0;
        let made = parts.map(|(part, len, split)| {
            let of = (part, TensorSlice::of(0, start, len), total);
            start += len;
            let shape = vec![len, 1, taps];
            let weight =
                self.weight("conv", format!("{name}.weight"), shape, Some(of), normal, split);
            let bias = biased.then(|| {
                let tensor = format!("{name}.bias");
                self.weight("conv_bias", tensor, vec![len], Some(of), Init::Zeros, split)
            });
            (weight, bias)
        });
        (scope, made)
    }
}
