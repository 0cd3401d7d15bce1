//! What an archive returns: its loss, and what a program shows.

use super::graph::{Id, Node};
use super::lower::{Lower, MAX_RANK, Val};
use shardc_ir::diag::{Diag, Result};

impl Lower<'_> {
    /// Finds logits among the outputs, and refuses a loss that is none of a program of ours.
    pub(super) fn outputs(&mut self) -> Result<()> {
        let outputs = &self.g.outputs;
        let tokens = self.g.batch().is_some_and(|b| b.1.is_some());
        let rows = [self.sizes.rows, self.sizes.seq];
        let (rows, dims) = if tokens { (&rows[..], 3..=3) } else { (&rows[..1], 1..=MAX_RANK) };
        for &id in outputs {
            let mean = match self.val(id).clone() {
                Val::Mean(m) => m,
                _other => continue,
            };
            if self.loss.is_none() {
                (self.loss, self.added) = (Some(mean.sum), mean.added.map(|v| v.value));
                self.counted = true;
            } else {
                self.second(id);
            }
        }
        for &id in outputs {
            let Val::Data(v) = self.val(id).clone() else { continue };
            let float = self.draft.ty(v.value).dtype.is_float();
            let fits = dims.contains(&v.shape.len()) && v.shape.starts_with(rows);
            if self.loss.is_none() && v.shape.is_empty() && self.rank(v.value) == 0 && float {
                self.loss = Some(v.value);
            } else if v.shape.is_empty() && float {
                self.second(id);
            } else if self.logits.is_none() && fits && float {
                let n =
                    Node { op: "output".into(), args: vec![], outs: vec![id], scope: "".into() };
                self.logits = Some(self.whole(&n, &v)?.value);
                self.shown = if tokens { "logits" } else { "output" };
            }
        }
        if let Some(id) = self.scored.filter(|_| self.loss.is_none()) {
            let name = &self.g.names[id];
            return Err(Diag::new("import-loss", format!("`{name}` is a loss, but no output"))
                .at(self.archive.path().display().to_string())
                .rule("the loss is a scalar output: a cross-entropy, or what is made of it")
                .help("return it, or export without labels"));
        }
        match self.logits.or(self.loss) {
            Some(_) => Ok(()),
            None => Err(Diag::new(
                "import-loss",
                "no output is a loss, logits [rows, tokens, vocabulary], or of rows",
            )
            .at(self.archive.path().display().to_string())
            .help(
                "return a scalar loss, or export a model with a head, such as AutoModelForCausalLM",
            )),
        }
    }

    /// Says that an output is not trained.
    fn second(&mut self, id: Id) {
        let name = &self.g.names[id];
        let what = format!("output `{name}` is a second scalar: it is not part of the loss");
        let help = "return the sum of all losses first, or leave it out";
        self.warnings.push(Diag::new("no-effect", what).help(help));
    }
}
