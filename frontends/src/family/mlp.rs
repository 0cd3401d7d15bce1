//! The MLP of a family, and how its products are called and stored.

use super::llama;

/// The MLP of layers without experts.
#[derive(Clone, Copy, Debug)]
pub struct Mlp {
    /// Norm before it.
    pub norm: Option<&'static str>,
    /// Norm behind it, before the residual.
    pub norm_behind: Option<&'static str>,
    /// Module of the block that holds it.
    pub module: &'static str,
    /// Its width over the hidden size, where no key says it.
    pub ratio: Option<usize>,
    /// Multiplied with the activation of this projection, if there is one.
    pub gate: Option<Linear>,
    pub up: Linear,
    pub down: Linear,
    /// The known ones; the first is that of a config that names none. None: whatever a config says,
    /// it is SiLU.
    pub activations: &'static [Activation],
}

impl Mlp {
    /// Two products with a GELU between them, alike in their biases, behind a norm of Llama's name.
    pub const fn of([up, down]: [&'static str; 2], bias: Bias) -> Mlp {
        let activations = &[Activation::GeluTanh, Activation::Gelu];
        let [up, down] = [Linear::torch(up, bias), Linear::torch(down, bias)];
        Mlp { gate: None, up, down, activations, ..llama::FAMILY.mlp }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    Silu,
    /// x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))).
    GeluTanh,
    /// x/2 (1 + erf(x/√2)).
    Gelu,
    /// max(x, 0)² (So et al., 2021).
    SquaredRelu,
}

/// A product with a weight, and perhaps a bias.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// Module within attention or MLP.
    pub module: &'static str,
    pub layout: WeightOrder,
    pub bias: Bias,
    /// The weight is a slice of a fused tensor: its name, after the tensor's. The slices of one
    /// module lie one after the other, in the order q, k, v, or gate, up.
    pub part: Option<&'static str>,
}

/// Order of a weight's dims in the checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WeightOrder {
    /// `[out, in]`, as torch.nn.Linear.
    OutIn,
    /// `[in, out]`, as the Conv1D of GPT-2.
    InOut,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bias {
    Never,
    Always,
    /// If this key of the config is true.
    Key(&'static str),
    /// Unless this key of the config is false.
    Unless(&'static str),
}

impl Activation {
    /// The config's words for it.
    pub fn words(self) -> &'static [&'static str] {
        match self {
            Activation::Silu => &["silu", "swish"],
            Activation::GeluTanh => &["gelu_new", "gelu_pytorch_tanh", "gelu_fast"],
            Activation::Gelu => &["gelu"],
            Activation::SquaredRelu => &["relu2"],
        }
    }
}

impl Linear {
    /// A torch.nn.Linear.
    pub const fn torch(module: &'static str, bias: Bias) -> Linear {
        Linear { module, layout: WeightOrder::OutIn, bias, part: None }
    }

    /// A Conv1D with bias.
    pub const fn conv1d(module: &'static str) -> Linear {
        Linear { module, layout: WeightOrder::InOut, bias: Bias::Always, part: None }
    }

    /// A slice of it.
    pub const fn slice(self, part: &'static str) -> Linear {
        Linear { part: Some(part), ..self }
    }
}
