//! Declarations of states: `state exp_avg: f32 of param = 0`.

use super::cursor::{Fail, Res};
use super::parse::Parser;
use super::print::Printer;
use crate::func::{StateDecl, StateInit, StateName, StateOwner};
use crate::types::DType;
use std::fmt::Write as _;

impl Printer<'_> {
    pub fn state(&mut self, s: &StateDecl) {
        self.line_of_no_layer();
        let _ = writeln!(self.out, "{s}");
    }
}

impl Parser<'_> {
    /// Declarations of states, as many as there are.
    pub fn states(&mut self) -> Res<Vec<StateDecl>> {
        let mut all = vec![];
        loop {
            self.c.blank();
            if !self.c.eat("state ") {
                return Ok(all);
            }
            self.c.spaces();
            let name = self.state_name()?;
            self.c.spaces();
            self.c.must(":")?;
            self.c.spaces();
            let dtype = self.dtype()?;
            self.c.spaces();
            let Some(owner) = StateOwner::ALL.into_iter().find(|o| self.c.eat(o.name())) else {
                let known = StateOwner::ALL.map(StateOwner::name).join("` or `");
                return Err(self.c.needs("an owner").help(format!("write `{known}`")));
            };
            self.c.spaces();
            self.c.must("=")?;
            self.c.spaces();
            let init = StateInit::Number(self.start()?);
            all.push(StateDecl { name, dtype, owner, init });
        }
    }

    /// The number that a state begins as.
    fn start(&mut self) -> Res<f64> {
        let at = self.c.at;
        let text = self.c.decimal();
        text.parse().ok().filter(|x: &f64| x.is_finite()).ok_or_else(|| {
            let m = "a state begins as a finite number";
            Fail::new("syntax", at, text.len().max(1), m).help("for example `= 0`")
        })
    }

    /// The name of a state.
    pub fn state_name(&mut self) -> Res<StateName> {
        let at = self.c.at;
        let word = self.c.word();
        StateName::read(word).ok_or_else(|| {
            let m = format!("`{word}` is not the name of a state");
            Fail::new("syntax", at, word.len().max(1), m)
                .help("use lower case letters, digits and `_`, as in `state[exp_avg] \"w\"`")
        })
    }

    /// An element type.
    pub fn dtype(&mut self) -> Res<DType> {
        let at = self.c.at;
        let word = self.c.word();
        DType::named(word).ok_or_else(|| {
            self.c.at = at;
            let help = "for example `f32[4,16]`; the element types are f32, bf16, f16 and i32";
            self.c.needs("a type").help(help)
        })
    }
}
