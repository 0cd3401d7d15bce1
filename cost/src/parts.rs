//! Where the time of a step goes.

use serde::Serialize;
use std::ops::{Add, AddAssign, Mul};

macro_rules! parts {
    ($($(#[$about:meta])* $name:ident,)*) => {
        /// Seconds by what they are spent on. What is exchanged counts where nothing hides it.
        #[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
        pub struct Parts { $($(#[$about])* pub $name: f64,)* }

        impl Parts {
            /// Names and seconds, in a fixed order.
            pub fn list(&self) -> Vec<(&'static str, f64)> {
                vec![$((stringify!($name), self.$name)),*]
            }

            /// The sum, always in the same order.
            pub fn total(&self) -> f64 {
                0.0 $(+ self.$name)*
            }

            /// Each part made of those of two.
            pub fn with(self, o: Parts, of: impl Fn(f64, f64) -> f64) -> Parts {
                Parts { $($name: of(self.$name, o.$name)),* }
            }
        }

        impl Add for Parts {
            type Output = Parts;
            fn add(self, o: Parts) -> Parts {
                Parts { $($name: self.$name + o.$name),* }
            }
        }

        impl Mul<f64> for Parts {
            type Output = Parts;
            fn mul(self, by: f64) -> Parts {
                Parts { $($name: self.$name * by),* }
            }
        }
    };
}

parts! {
    /// Products of weights.
    products,
    /// Attention between its products.
    attention,
    /// Work over rows, as memory moves it.
    memory,
    /// Waiting for the host to start launches.
    host,
    /// What backward computes again, with its exchanges.
    recompute,
    /// Exchanges over tp, cp, and of experts.
    tp,
    cp,
    ep,
    /// Between stages.
    send,
    /// Waiting for other stages.
    bubble,
    /// Gathers of parameters and sums of gradients.
    dp,
    optimizer,
}

impl Parts {
    /// What a rank computes, without exchanges and waiting.
    pub fn work(&self) -> f64 {
        self.products + self.attention + self.memory + self.recompute
    }
}

impl AddAssign for Parts {
    fn add_assign(&mut self, o: Parts) {
        *self = *self + o;
    }
}

/// Forward, gradients of inputs, gradients of weights.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Times {
    pub forward: Parts,
    pub input: Parts,
    pub weight: Parts,
}

impl Times {
    /// All three.
    pub fn all(&self) -> Parts {
        self.forward + self.input + self.weight
    }
}

impl Add for Times {
    type Output = Times;
    fn add(self, o: Times) -> Times {
        Times {
            forward: self.forward + o.forward,
            input: self.input + o.input,
            weight: self.weight + o.weight,
        }
    }
}

impl Mul<f64> for Times {
    type Output = Times;
    fn mul(self, by: f64) -> Times {
        Times { forward: self.forward * by, input: self.input * by, weight: self.weight * by }
    }
}
