//! What the text of a model says beside its program: where the numbers of a parameter come from,
//! and which values are the residual stream.
//!
//! ```text
//! weight := "[" { "ones" | "zeros" | "normal=" deviation | "uniform=" bound | "log_uniform=" bound | "tp_dim=" dim | "experts=" count
//!                 | "tensor=" "\"" name "\""
//!                 | "part=" dim ":" start ":" size of the dim [ ":" step ] ";" } "]"
//! ```
//!
//! `[normal=0.02]` is a parameter of which nothing is known but how it begins: all of the tensor of
//! its own name. With `experts` it is a stack of tensors whose name has a `*` for their number, or
//! one tensor.

use super::cursor::{Fail, Res};
use super::parse::Parser;
use super::types::{push_number, write_quoted};
use crate::attr::MAX_SIZE;
use crate::func::{Func, Role, RoleKind, Value};
use crate::maps::HashMap;
use crate::source::{Source, vocabulary};
use crate::types::Type;
use crate::weights::{Init, TensorSlice, Weight};
use std::fmt::Write as _;

/// What a model's text says of its values.
#[derive(Default)]
pub(super) struct SourceMarks<'a> {
    weights: HashMap<Value, &'a Weight>,
    residual: HashMap<Value, usize>,
}

impl<'a> SourceMarks<'a> {
    /// Those of a model.
    pub fn of(s: &'a Source) -> SourceMarks<'a> {
        let params = s.module.funcs.iter().flat_map(|f| &f.args).filter(|a| is_param(&a.role));
        let weights = params.map(|a| a.value).zip(&s.weights).collect();
        SourceMarks { weights, residual: s.sequence.iter().copied().collect() }
    }

    /// Appends what is said of an argument.
    pub fn write_weight(&self, v: Value, out: &mut String) {
        let Some(Weight {
            param,
            tensor,
            tensor_shape,
            experts,
            part,
            shape,
            init,
            matrix,
            tp_dim,
        }) = self.weights.get(&v)
        else {
            return;
        };
        // What follows from the rest.
        debug_assert_eq!(*matrix, shape.len() > 1, "{param}");
        let stacked = self.weights[&v].is_stacked();
        debug_assert_eq!(*tensor_shape, stored_shape(shape, stacked, *part, tensor_shape));
        out.push_str(" [");
        let _ = match init {
            Init::Ones => write!(out, "ones"),
            Init::Zeros => write!(out, "zeros"),
            Init::Normal(deviation) => write!(out, "normal={deviation:?}"),
            Init::LogOfUniform(bound) => write!(out, "log_uniform={bound:?}"),
            Init::Uniform(bound) => write!(out, "uniform={bound:?}"),
        };
        if let Some(d) = tp_dim {
            let _ = write!(out, "; tp_dim={d}");
        }
        if let Some(n) = experts {
            let _ = write!(out, "; experts={n}");
        }
        if tensor != param {
            out.push_str("; tensor=");
            match stacked {
                false => write_quoted(tensor, out),
                true => write_quoted(&tensor.replacen("{}", "*", 1), out),
            }
        }
        if let Some(p) = part {
            let _ = write!(out, "; part={}:{}:{}", p.dim, p.start, tensor_shape[p.dim]);
            if p.step != 1 {
                let _ = write!(out, ":{}", p.step);
            }
        }
        out.push(']');
    }

    /// Appends what is said of the result of an op.
    pub fn write_residual(&self, v: Value, out: &mut String) {
        if let Some(&d) = self.residual.get(&v) {
            out.push_str(" residual=");
            push_number(d, out);
        }
    }
}

fn is_param(role: &Option<Role>) -> bool {
    role.as_ref().is_some_and(|r| r.kind == RoleKind::Param)
}

/// The shape of the checkpoint's tensor that a parameter of this shape is, or is a part of.
fn stored_shape(
    shape: &[usize],
    stacked: bool,
    part: Option<TensorSlice>,
    total: &[usize],
) -> Vec<usize> {
    let mut all = shape[usize::from(stacked)..].to_vec();
    if let Some(p) = part {
        all[p.dim] = total[p.dim];
    }
    all
}

/// What was read of a model beside its program.
#[derive(Default)]
pub(super) struct Read {
    weights: Vec<Weight>,
    sequence: Vec<(Value, usize)>,
}

impl Read {
    /// A model of these functions.
    pub fn source(self, module: crate::func::Module) -> Source {
        let vocab = module.funcs.first().map_or(i32::MAX as usize, vocabulary);
        let updates = String::new();
        Source { module, weights: self.weights, sequence: self.sequence, vocab, updates }
    }
}

impl Parser<'_> {
    /// What stands behind the role of an argument: `[ones; tp_dim=0]`.
    pub fn weight(&mut self, ty: &Type, role: &Option<Role>) -> Res<()> {
        let before = self.c.at;
        self.c.spaces();
        let at = self.c.at;
        let here = self.c.eat("[");
        let param = role.as_ref().filter(|r| r.kind == RoleKind::Param);
        let Some(role) = param.filter(|_| self.source.is_some()) else {
            self.c.at = before;
            return match here {
                false => Ok(()),
                true => Err(Fail::new(
                    "syntax",
                    at,
                    1,
                    "only a parameter of a model is followed by `[`",
                )
                .help("leave the brackets out; they say how a `param` of a model begins")),
            };
        };
        let mut w = Weight::plain(&role.name, &ty.sizes());
        let mut said = vec![];
        let mut more = here;
        while more {
            self.c.spaces();
            self.weight_item(&mut w, &mut said)?;
            self.c.spaces();
            more = !self.c.eat("]");
            if more {
                self.c.must(";")?;
            }
        }
        check(&mut w).map_err(|m| {
            let help = "for example `[normal=0.02; tp_dim=0]` or `[ones]`";
            Fail::new("attribute", at, self.c.at - at, format!("`{}`: {m}", w.param)).help(help)
        })?;
        if let Some(read) = &mut self.source {
            read.weights.push(w);
        }
        Ok(())
    }

    /// One of them; `said` are the words that stood before it.
    fn weight_item(&mut self, w: &mut Weight, said: &mut Vec<String>) -> Res<()> {
        let at = self.c.at;
        let word = self.c.word();
        // There is one beginning.
        let about = if matches!(word, "ones" | "zeros" | "uniform" | "log_uniform") {
            "normal"
        } else {
            word
        };
        if said.iter().any(|s| s == about) {
            let m = format!("`{word}` repeats what was said before it");
            return Err(Fail::new("attribute", at, word.len(), m).help("say it once"));
        }
        said.push(about.into());
        match word {
            "ones" => w.init = Init::Ones,
            "zeros" => w.init = Init::Zeros,
            "normal" => w.init = Init::Normal(self.spread("deviation", "normal=0.02")?),
            "log_uniform" => {
                w.init = Init::LogOfUniform(self.spread("bound", "log_uniform=16.0")?);
            }
            "uniform" => w.init = Init::Uniform(self.spread("bound", "uniform=0.125")?),
            "tp_dim" => w.tp_dim = Some(self.counted()?),
            "experts" => w.experts = Some(self.counted()?),
            "tensor" => {
                self.c.must("=")?;
                w.tensor = self.c.quoted()?;
            }
            "part" => {
                let dim = self.counted()?;
                self.c.must(":")?;
                let start = self.number(MAX_SIZE)?;
                self.c.must(":")?;
                let size = self.number(MAX_SIZE)?;
                let Some(&len) = w.shape.get(dim) else {
                    let m = format!("dim {dim} of a value of {} dims", w.shape.len());
                    return Err(Fail::new("attribute", at, self.c.at - at, m)
                        .help("`part=DIM:START:SIZE` cuts a dim that there is"));
                };
                let step = if self.c.eat(":") { self.number(MAX_SIZE)? } else { 1 };
                w.part = Some(TensorSlice { dim, start, len, step });
                w.tensor_shape[dim] = size;
            }
            _ => {
                self.c.at = at;
                let f = self.c.needs(
                    "`ones`, `zeros`, `normal`, `uniform`, `log_uniform`, `tp_dim`, `experts`, `tensor` or `part`",
                );
                return Err(f.help("for example `[normal=0.02; tp_dim=0]` or `[ones]`"));
            }
        }
        Ok(())
    }

    /// How far from 0 initial values are, `what` it is called.
    fn spread(&mut self, what: &str, example: &str) -> Res<f64> {
        self.c.must("=")?;
        let at = self.c.at;
        let text = self.c.decimal();
        let number = text.parse().ok().filter(|d: &f64| d.is_finite() && *d >= 0.0);
        number.ok_or_else(|| {
            Fail::new("attribute", at, text.len(), format!("`{text}` is not a {what}"))
                .help(format!("for example `{example}`"))
        })
    }

    fn counted(&mut self) -> Res<usize> {
        self.c.must("=")?;
        self.number(MAX_SIZE)
    }

    /// What stands behind the type of a result: `residual=1`.
    pub fn residual(&mut self, f: &Func, v: Value) -> Res<()> {
        let before = self.c.at;
        self.c.spaces();
        let at = self.c.at;
        if !self.c.eat("residual=") {
            self.c.at = before;
            return Ok(());
        }
        let (dim, rank) = (self.number(MAX_SIZE)?, f.ty(v).rank());
        let fail = |m: String, help: &str| Fail::new("attribute", at, 8, m).help(help);
        let Some(read) = &mut self.source else {
            let m = "only a model says what its residual stream is".into();
            return Err(fail(m, "leave `residual` out of programs of ranks"));
        };
        if dim >= rank {
            let m = format!("`residual={dim}` of a value of {rank} dims");
            return Err(fail(m, "name the dim of tokens, as in `residual=1`"));
        }
        read.sequence.push((v, dim));
        Ok(())
    }
}

/// Checks what a text says of a parameter, and gives its tensors the names that a checkpoint has.
fn check(w: &mut Weight) -> Result<(), String> {
    let rank = w.shape.len();
    if let Some(n) = w.experts {
        if w.shape.first() != Some(&n) {
            return Err(format!("experts={n} is not the size of its dim 0"));
        }
        let (tensor, places) = (&w.tensor, w.tensor.matches('*').count());
        if places > 1 || tensor.contains("{}") {
            return Err(format!(
                "the name of the tensors, \"{tensor}\", needs one `*` for the number"
            ));
        }
        if places == 1 && w.part.is_some() {
            return Err("a stack of experts is not part of a tensor".into());
        }
        if places == 1 {
            w.tensor = w.tensor.replacen('*', "{}", 1);
            w.tensor_shape.remove(0);
        }
    }
    if let Some(p) = w.part {
        let size = w.tensor_shape[p.dim];
        if p.place(&(0..p.len)).is_none_or(|at| at.end > size) {
            return Err(format!("{} elements from {} on are not among {size}", p.len, p.start));
        }
    }
    match w.tp_dim.filter(|&d| d >= rank) {
        Some(d) => Err(format!("tp_dim={d} of a value of {rank} dims")),
        None => Ok(()),
    }
}
