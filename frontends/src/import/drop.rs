//! Dropout of an archive: that of activations as a draw and a product, that of probabilities inside attention.

use super::graph::{Arg, Node};
use super::inputs;
use super::lower::{Lower, Val, clean};
use super::reshape::sized;
use super::view::{View, letter};
use shardc_ir::attr::Sizes;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::Value;
use shardc_ir::ops::draw::StreamName;
use shardc_ir::ops::{AttentionDropout, Draw, Mul};
use shardc_ir::plan::Dropout;
use shardc_ir::rng::Distribution;

impl Lower<'_> {
    /// The rate that a node drops with where its archive has this one; 0 for none. One that is ignored is said.
    ///
    /// # Errors
    /// `import-op` for a rate that is none.
    pub(super) fn rate(&mut self, n: &Node, own: f64) -> Result<f64> {
        if own == 0.0 {
            return Ok(0.0);
        }
        if !(0.0..1.0).contains(&own) {
            return Err(self.refuse(n, &format!("its rate is {own}, and not below 1")));
        }
        match self.dropout {
            Dropout::Config => Ok(own),
            Dropout::Rate(p) => Ok(p),
            Dropout::Nothing => {
                if self.warnings.iter().all(|w| w.code != "dropout-ignored") {
                    let what =
                        format!("the archive drops {own} of its activations, which is ignored");
                    let help = "use --dropout config, or set its rate to 0 before exporting";
                    let said = Diag::new("dropout-ignored", what).at(n.scope.to_string());
                    self.warnings.push(said.help(help));
                }
                Ok(0.0)
            }
        }
    }

    /// The rate of a node `dropout`.
    pub(super) fn rate_of(&mut self, n: &Node) -> Result<f64> {
        let trains = !matches!(n.arg("train"), Arg::Bool(false));
        let own = self.number(n, "p").filter(|_| trains).unwrap_or(0.0);
        self.rate(n, own)
    }

    /// `dropout` of activations [rows, tokens, …].
    pub(super) fn dropout(&mut self, n: &Node) -> Result<Vec<Val>> {
        let rate = self.rate_of(n)?;
        if let Some(Val::Probs(v, mask, before)) = self.operand(n, "input") {
            return match before == 0.0 || rate == 0.0 {
                true => Ok(vec![Val::Probs(v, mask, before.max(rate))]),
                false => Err(self.refuse(n, "probabilities are dropped twice")),
            };
        }
        let x = self.data(n, "input")?;
        if rate == 0.0 {
            return Ok(vec![Val::Data(x)]);
        }
        let shape = x.shape.clone();
        if shape.len() < 3 || shape[..2] != [self.sizes.rows, self.sizes.seq] {
            let what = format!("dropout of {shape:?}, and not of [rows, tokens, ...]");
            return Err(self.refuse(n, &what).help("use --dropout 0, or set its rate to 0"));
        }
        let x = self.whole(n, &x)?;
        let [run, places] = self.drawn();
        let to: String = (0..shape.len()).map(letter).collect();
        // A letter that no dim has.
        let rule = format!("{},{}->{to}", letter(shape.len()), &to[..2]);
        let sizes = (2..shape.len()).map(|d| sized(letter(d), shape[d]));
        let draw = Draw {
            rule: self.rule(n, &rule, &[run, places])?,
            from: Distribution::Keep(1.0 - rate),
            stream: self.stream(n, ""),
            sizes: Sizes(sizes.collect()),
        };
        let kept = self.emit(n, "kept", draw, &[run, places])?;
        let y = self.emit(n, "dropped", Mul::same(), &[x.value, kept])?;
        Ok(vec![Val::Data(View::plain(y, &shape))])
    }

    /// What an attention keeps of its probabilities, by its rate of dropout, and the operands that go with it.
    pub(super) fn kept(&mut self, n: &Node, rate: f64) -> (Option<AttentionDropout>, Vec<Value>) {
        if rate == 0.0 {
            return (None, vec![]);
        }
        let stream = self.stream(n, ".probabilities");
        (Some(AttentionDropout { rate: 1.0 - rate, stream }), self.drawn().to_vec())
    }

    /// The run and the places of tokens.
    fn drawn(&mut self) -> [Value; 2] {
        [inputs::RUN, inputs::PLACES].map(|name| self.of_input(name))
    }

    /// A stream of its own for a node: the name of its module, and from the second on there a number.
    fn stream(&mut self, n: &Node, of: &str) -> StreamName {
        let scope = if n.scope.is_empty() { "model" } else { &n.scope };
        let name = format!("{}{of}", clean(scope));
        let used = self.streams.entry(name.clone()).or_insert(0);
        *used += 1;
        StreamName::of(&if *used == 1 { name } else { format!("{name}-{used}") })
    }
}
