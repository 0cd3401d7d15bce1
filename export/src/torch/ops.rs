//! The table of ops as Python: each op of a plan is an expression of torch, or of a function of `shardc.torch`.

pub(super) mod memory;
pub(super) mod over;
mod patterns;
pub(super) mod raised;
mod scans;
mod search;
pub(super) mod strides;

use super::dims::{added, items, letters, lone, number, permuted, places, quoted, reduced, spread};
use super::layout::Layouts;
use shardc_ir::attr::{Along, Broadcast};
use shardc_ir::func::{Func, Node, Value};
use shardc_ir::mesh::AtomSet;
use shardc_ir::ops::unary::Rounding;
use shardc_ir::ops::{AttentionDropout, Mask, Op, Scan, scan};
use shardc_ir::rng::Distribution;
use shardc_ir::rule::{Dims, Group, Rule};
use shardc_ir::types::{DType, Reduction, Type};

/// Most terms of a sum that is written with `+`.
const MOST_TERMS: usize = 16;

/// A node, with its operands as Python.
pub(super) struct Site<'a, 'b> {
    pub f: &'a Func,
    pub n: &'a Node,
    pub x: &'b [String],
    pub layouts: &'b mut Layouts<'a>,
    /// Whether its results are written over operands.
    pub over: bool,
    /// The operand that is gone behind it, and whose memory the result takes.
    pub dead: Option<usize>,
    /// Whether a gradient is used up.
    pub spent: bool,
    /// What positions are, as a key of what is known of them before the first step.
    pub origin: &'b dyn Fn(Value) -> Option<String>,
}

/// An op that has no words here, as it is called and what of it is not written.
pub(super) type Refused = String;

/// An element type of torch.
pub(super) fn dtype(d: DType) -> String {
    format!("torch.{}", d.facts().torch)
}

/// True of ops whose result is their operand as it is: no line is written for them.
pub(super) fn is_nothing(op: &Op) -> bool {
    matches!(
        op,
        Op::FanOut(_)
            | Op::StopGradient(_)
            | Op::ToPartial(_)
            | Op::ToVarying(_)
            | Op::FromVarying(_)
    )
}

/// The operand that a result is written over, of ops that are written so.
pub(super) fn written_over(op: &Op, result: usize) -> Option<usize> {
    let own = matches!(op, Op::Accumulate(_) | Op::AdamW(_) | Op::Sgd(_));
    op.def().in_place(result).filter(|_| own)
}

/// True of ops that exchange data: they can be begun, and waited for later.
pub(super) fn is_exchange(op: &Op) -> bool {
    op.collective().is_some()
}

/// The op as a Python expression; of several results a tuple.
#[expect(clippy::too_many_lines, reason = "the table of ops")]
pub(super) fn expression(s: &mut Site) -> Result<String, Refused> {
    let x = s.x;
    if let Some(i) = s.dead {
        return Ok(s.in_place(i));
    }
    let one = |before: &str, behind: &str| format!("{before}{}{behind}", x[0]);
    Ok(match &s.n.op {
        Op::Add(o) => match s.spread(&o.rule) {
            // Python reads no sum of a thousand terms.
            all if all.len() > MOST_TERMS && s.out(0).rank() == 0 => {
                format!("torch.stack([{}]).sum()", items(&all).join(", "))
            }
            all => sum(&all, s),
        },
        Op::Sub(o) => s.spread(&o.rule).join(" - "),
        Op::Mul(o) => s.spread(&o.rule).join(" * "),
        Op::Div(o) => s.spread(&o.rule).join(" / "),
        Op::Max(o) => format!("torch.fmax({})", s.spread(&o.rule).join(", ")),
        Op::Min(o) => format!("torch.fmin({})", s.spread(&o.rule).join(", ")),
        Op::Less(o) => format!("({}).float()", s.spread(&o.rule).join(" < ")),
        Op::Equal(o) => format!("({}).float()", s.spread(&o.rule).join(" == ")),
        Op::Select(o) => {
            let [m, a, b] = &s.spread(&o.rule)[..] else { return refused(s, "operands") };
            format!("torch.where({m} != 0, {a}, {b})")
        }
        Op::Accumulate(_) if s.over => {
            x.iter().skip(1).fold(x[0].clone(), |sum, x| format!("{sum}.add_({x})"))
        }
        Op::Accumulate(_) => x.join(" + "),
        Op::Scale(o) => format!("{} * {}", x[0], number(o.by)),
        Op::Shift(o) => format!("{} + {}", x[0], number(o.by)),
        Op::Exp(_) => one("torch.exp(", ")"),
        Op::Log(_) => one("torch.log(", ")"),
        Op::Log1p(_) => one("torch.log1p(", ")"),
        Op::Sqrt(_) => one("torch.sqrt(", ")"),
        Op::Rsqrt(_) => one("torch.rsqrt(", ")"),
        Op::Tanh(_) => one("torch.tanh(", ")"),
        Op::Logistic(_) => one("torch.sigmoid(", ")"),
        Op::Silu(o) => match o.beta {
            None => one("F.silu(", ")"),
            Some(beta) => format!("{0} * torch.sigmoid({0} * {1})", x[0], number(beta)),
        },
        Op::Gelu(_) => one("F.gelu(", ", approximate=\"tanh\")"),
        Op::Sin(_) => one("torch.sin(", ")"),
        Op::Cos(_) => one("torch.cos(", ")"),
        Op::Abs(_) => one("torch.abs(", ")"),
        Op::Sign(_) => one("torch.sign(", ")"),
        Op::Erf(_) => one("torch.erf(", ")"),
        Op::Softplus(_) => one("F.softplus(", ")"),
        Op::Pow(o) => format!("{} ** {}", x[0], number(o.to)),
        Op::Clamp(o) => {
            let ends = [("min", o.lo), ("max", o.hi)].into_iter().filter(|e| e.1.is_finite());
            let ends: Vec<String> = ends.map(|(k, v)| format!("{k}={}", number(v))).collect();
            match ends.is_empty() {
                true => x[0].clone(),
                false => format!("{}.clamp({})", x[0], ends.join(", ")),
            }
        }
        Op::Round(o) => match o.to {
            Rounding::Floor => one("torch.floor(", ")"),
            Rounding::Ceil => one("torch.ceil(", ")"),
            Rounding::Even => one("torch.round(", ")"),
        },
        Op::AtLeast(o) => format!("({} >= {}).float()", x[0], number(o.bound)),
        Op::Cast(o) => one("", &format!(".to({})", dtype(o.to))),
        Op::StopGradient(_)
        | Op::FanOut(_)
        | Op::ToPartial(_)
        | Op::ToVarying(_)
        | Op::FromVarying(_) => x[0].clone(),
        Op::Literal(o) => {
            let all: Vec<String> = o.values.iter().map(|v| number(f64::from(*v))).collect();
            format!("constant(({},))", all.join(", "))
        }
        Op::Fill(o) => {
            let (shape, d) = (s.shape(0), dtype(s.out(0).dtype));
            match o.value == 0.0 {
                true => format!("torch.zeros({shape}, dtype={d}, device=device)"),
                false => {
                    format!("torch.full({shape}, {}, dtype={d}, device=device)", number(o.value))
                }
            }
        }
        Op::Reshape(_) => format!("{}.reshape({})", x[0], s.shape(0)),
        Op::Transpose(o) => permuted(&x[0], &o.rule.0.ins[0], &o.rule.0.outs[0]),
        Op::Expand(o) => {
            let (from, to) = (&o.rule.0.ins[0], &o.rule.0.outs[0]);
            format!("{}.expand({})", spread(&x[0], from, to), s.shape(0))
        }
        Op::ReduceSum(o) => reduced(&x[0], "sum", &o.rule.0),
        Op::ReduceMax(o) => reduced(&x[0], "amax", &o.rule.0),
        Op::ReduceMin(o) => reduced(&x[0], "amin", &o.rule.0),
        Op::Cumsum(o) => match o.reverse {
            false => format!("{}.cumsum({})", x[0], o.dim),
            true => format!("{0}.flip({1}).cumsum({1}).flip({1})", x[0], o.dim),
        },
        Op::Dot(o) => s.dot(&o.rule.0),
        Op::Take(o) => {
            let r = &o.rule.0;
            let dim = lone(&r.ins[0], [&r.ins[1], &r.outs[0]]);
            let start = s.layouts.start(s.ty(0), dim);
            let padding = o.padding.zero().map_or(String::new(), |p| format!(", padding={p}"));
            format!("take({}, {}, {}, {start}{padding})", x[0], x[1], quoted(&r.to_string()))
        }
        Op::IndexAdd(o) => {
            let r = &o.rule.0;
            let dim = lone(&r.outs[0], [&r.ins[1], &r.ins[0]]);
            let (start, size) = (s.layouts.start(s.out(0), dim), s.layouts.length(s.out(0), dim));
            let padding = o.padding.zero().map_or(String::new(), |p| format!(", padding={p}"));
            let rule = quoted(&r.to_string());
            format!("index_add({}, {}, {rule}, {start}, {size}{padding})", x[0], x[1])
        }
        Op::Concat(o) => format!("torch.cat([{}], {})", x.join(", "), s.along(o.dim)),
        Op::Narrow(o) => {
            let (dim, step) = (s.along(o.dim), o.step.0);
            let n = s.out(0).dims[dim].size;
            let end = o.start + if n > 0 { (n - 1) * step + 1 } else { 0 };
            let by = if step == 1 { String::new() } else { format!(":{step}") };
            format!("{}[{}{}:{end}{by}]", x[0], ":, ".repeat(dim), o.start)
        }
        Op::Pad(o) => {
            let dim = s.along(o.dim);
            let size = s.out(0).dims[dim].size;
            format!("pad({}, {dim}, {size}, {}, {})", x[0], o.start, o.step.0)
        }
        Op::TopK(o) => {
            let Some((dim, _, k)) = o.dims() else { return refused(s, "the rule") };
            let (from, to) = (&o.rule.0.ins[0], &o.rule.0.outs[0]);
            let kept: Dims =
                from.iter().map(|g| if to.contains(g) { *g } else { added(to, from) }).collect();
            permuted(&format!("top_k({}, {dim}, {k})", x[0]), &kept, to)
        }
        Op::Rope(o) => {
            let adjacent = o.pairs == shardc_ir::ops::rope::Pairs::Adjacent;
            let pairs = if adjacent { ", adjacent=True" } else { "" };
            format!("rope({}{pairs})", x.join(", "))
        }
        Op::Attention(o) => {
            let more = s.more(o.behind(), [3, 4], (o.mask, o.softcap, &o.kept))?;
            format!("attention({}, {}{more})", x[..5].join(", "), number(o.scale))
        }
        Op::AttentionGrad(o) => {
            let more = s.more(o.behind(), [6, 7], (o.mask, o.softcap, &o.kept))?;
            format!("attention_grad({}, {}{more})", x[..8].join(", "), number(o.scale))
        }
        Op::MergeAttention(_) => format!("merge_attention({})", x.join(", ")),
        Op::Scan(o) => {
            let more = recurrent(x, o.behind(), o, s.ty(0));
            format!("scan({}{more})", x[..4].join(", "))
        }
        Op::ScanGrad(o) => {
            let more = recurrent(x, o.behind(), &o.forward(), s.ty(0));
            format!("scan_grad({}{more})", x[..6].join(", "))
        }
        Op::Route(o) => {
            let [groups, experts] = o.groups();
            let capacity = o.capacity.map_or("None".into(), |c| c.to_string());
            format!("route({}, {groups}, {experts}, {}, {capacity})", x[0], o.rows)
        }
        Op::Dispatch(_) => {
            let (groups, rows) = (s.layouts.length(s.out(0), 0), s.out(0).dims[2].size);
            format!("dispatch({}, {groups}, {rows})", x.join(", "))
        }
        Op::Unpermute(_) => format!("unpermute({})", x.join(", ")),
        Op::CombineGatesGrad(_) => format!("combine_gates_grad({})", x.join(", ")),
        Op::GroupedDot(_) => format!("grouped_dot({})", x.join(", ")),
        Op::GroupedDotT(_) => format!("grouped_dot_t({})", x.join(", ")),
        Op::GroupedOuter(_) => format!("grouped_outer({})", x.join(", ")),
        Op::Draw(o) => {
            let (ty, shape) = (s.out(0), s.shape(0));
            let starts: Vec<String> = (0..ty.rank()).map(|d| s.layouts.start(ty, d)).collect();
            let whole: Vec<String> = ty.dims.iter().map(|d| d.size.to_string()).collect();
            let from = match o.from {
                Distribution::Uniform => "None".to_string(),
                Distribution::Keep(p) => number(p),
                Distribution::Normal => return refused(s, "from=normal"),
            };
            format!(
                "draw({}, {}, {}, {shape}, [{}], [{}], keep={from}, stream={})",
                x[0],
                x[1],
                quoted(&o.rule.0.to_string()),
                starts.join(", "),
                whole.join(", "),
                quoted(&o.stream.0)
            )
        }
        Op::AdamW(o) => format!(
            "adamw({}, betas=({}, {}), eps={}, decay={}{})",
            x.join(", "),
            number(o.beta1),
            number(o.beta2),
            number(o.eps),
            number(o.decay),
            if s.spent { ", spent=True" } else { "" }
        ),
        Op::Sgd(o) => format!("sgd({}, decay={})", x.join(", "), number(o.decay)),
        Op::AllReduce(o) => {
            let over = s.layouts.group(o.axes.iter());
            let by = match s.ty(0).reduction(o.axes) {
                Some(Reduction::Max) => ", \"max\"",
                Some(Reduction::Min) => ", \"min\"",
                Some(Reduction::Sum) | None => "",
            };
            match x {
                [one] => format!("all_reduce({one}, {over}{by})"),
                many => format!("all_reduce([{}], {over}{by})", many.join(", ")),
            }
        }
        Op::AllGather(o) => {
            let (over, piece) = (s.pieces(s.ty(0), o.axes, o.dim), s.ty(0).chunk(s.mesh(), o.dim));
            let size = s.layouts.length(s.out(0), o.dim);
            format!("all_gather({}, {over}, {}, {piece}, {size})", x[0], o.dim)
        }
        Op::ReduceScatter(o) => {
            let (over, piece) =
                (s.pieces(s.out(0), o.axes, o.dim), s.out(0).chunk(s.mesh(), o.dim));
            let size = s.layouts.length(s.out(0), o.dim);
            format!("reduce_scatter({}, {over}, {}, {piece}, {size})", x[0], o.dim)
        }
        Op::Broadcast(o) => {
            format!("broadcast({}, {}, {})", x[0], s.pieces(s.ty(0), o.axes, o.dim), o.from)
        }
        Op::Reduce(o) => {
            format!("reduce({}, {}, {})", x[0], s.pieces(s.out(0), o.axes, o.dim), o.to)
        }
        Op::Slice(o) => {
            let start = s.layouts.within(s.out(0), s.ty(0), o.dim);
            let length = s.layouts.length(s.out(0), o.dim);
            format!("{}.narrow({}, {start}, {length})", x[0], o.dim)
        }
        Op::PadToPartial(o) => {
            let start = s.layouts.within(s.ty(0), s.out(0), o.dim);
            let size = s.layouts.length(s.out(0), o.dim);
            format!("pad({}, {}, {size}, {start})", x[0], o.dim)
        }
        Op::RingShard(o) => {
            let (over, n) = (s.layouts.over(o.axes.iter()), s.out(0).dims[o.dim].size);
            format!("{}.narrow({}, {over}.before({}) * {n}, {n})", x[0], o.dim, o.shift)
        }
        Op::Permute(o) => {
            format!("permute({}, {}, {})", x[0], s.layouts.group(o.axes.iter()), o.shift)
        }
        Op::AllToAll(o) => s.exchange(o.axes, None),
        Op::Exchange(o) => {
            let shift = o.halo().map(|h| (s.along(h.dim), h.start));
            s.exchange(o.axes, shift)
        }
        Op::AllToAllV(o) => {
            let over = s.layouts.group(o.axes.iter());
            let to_experts = if o.from == 1 { "True" } else { "False" };
            format!("all_to_all_v({}, {over}, to_experts={to_experts})", x.join(", "))
        }
    })
}

/// A sum, in which no more is made than the result.
fn sum(all: &[String], s: &Site) -> String {
    let rank = s.out(0).rank();
    let whole = (0..all.len()).find(|i| s.ty(*i).rank() == rank);
    let Some(first) = whole.filter(|_| all.len() > 2 && rank > 0) else { return all.join(" + ") };
    let mut others = (0..all.len()).filter(|i| *i != first);
    let second = others.next().map_or("", |i| &all[i]);
    let added = others.map(|i| format!(".add_({})", all[i]));
    format!("({} + {second}){}", all[first], added.collect::<String>())
}

fn refused<T>(s: &Site, what: &str) -> Result<T, Refused> {
    Err(format!("{} ({what})", s.n.op.mnemonic()))
}

impl<'a> Site<'a, '_> {
    fn ty(&self, i: usize) -> &'a Type {
        self.f.ty(self.n.ins[i])
    }

    fn out(&self, o: usize) -> &'a Type {
        self.f.ty(self.n.outs[o])
    }

    fn mesh(&self) -> &'a shardc_ir::mesh::Mesh {
        self.layouts.mesh
    }

    /// The local shape of a result.
    fn shape(&mut self, o: usize) -> String {
        let ty = self.out(o);
        let all: Vec<String> = (0..ty.rank()).map(|d| self.layouts.length(ty, d)).collect();
        format!("[{}]", all.join(", "))
    }

    fn along(&self, dim: Along) -> usize {
        dim.of(self.out(0).rank()).expect("a dim of the result")
    }

    /// Operands with the dims of the result.
    fn spread(&self, rule: &Broadcast) -> Vec<String> {
        let Some(r) = &rule.0 else { return self.x.to_vec() };
        r.ins.iter().zip(self.x).map(|(from, x)| spread(x, from, &r.outs[0])).collect()
    }

    /// The group of a collective, in the order of the pieces of a dim.
    fn pieces(&mut self, ty: &Type, axes: AtomSet, dim: usize) -> String {
        let own = ty.dims[dim].atoms.iter().filter(|a| axes.has(*a));
        self.layouts.group(own)
    }

    fn exchange(&mut self, axes: AtomSet, shift: Option<(usize, i64)>) -> String {
        let name = self.layouts.exchange(axes, self.ty(0), self.out(0), shift);
        format!("exchange({}, {name})", self.x[0])
    }

    /// Products of matrices as a call that needs no copies, where there is one.
    fn dot(&self, r: &Rule) -> String {
        let (a, b, o) = (&r.ins[0], &r.ins[1], &r.outs[0]);
        let x = &self.x[0];
        let mut y = self.x[1].clone();
        if self.ty(0).dtype != self.ty(1).dtype {
            y = format!("{y}.to({})", dtype(self.ty(0).dtype));
        }
        let of = |front: &[Group], last: &Group| o.split_last() == Some((last, front));
        if let ([front @ .., k], [m, n]) = (&a[..], &b[..])
            && !front.is_empty()
        {
            if n == k && of(front, m) {
                return format!("F.linear({x}, {y})");
            }
            if m == k && of(front, n) {
                return format!("{x} @ {y}");
            }
        }
        if let ([rows @ .., i], [others @ .., j]) = (&a[..], &b[..])
            && rows == others
            && !rows.is_empty()
            && (o[..] == [*i, *j] || o[..] == [*j, *i])
            && i != j
        {
            let flat = |x: &str| match rows.len() {
                1 => x.to_string(),
                n => format!("{x}.flatten(0, {})", n - 1),
            };
            let (first, second) = if o[0] == *i { (x, &y) } else { (&y, x) };
            return format!("{}.t() @ {}", flat(first), flat(second));
        }
        if a == b && o.is_empty() {
            return format!("torch.dot({x}.flatten(), {y}.flatten())");
        }
        if a == b && o[..] == a[..a.len() - 1] && self.ty(0).dtype == DType::F32 {
            return format!("torch.linalg.vecdot({x}, {y})");
        }
        if a == b && places(a, o).is_sorted() {
            return reduced(&format!("({x} * {y})"), "sum", &Rule::of(&[a], &[o]));
        }
        format!("torch.einsum({}, {x}, {y})", quoted(&letters(r)))
    }

    /// What attention takes behind positions.
    fn more(
        &mut self,
        behind: shardc_ir::ops::attention::Behind,
        positions: [usize; 2],
        (mask, softcap, kept): (Mask, Option<f64>, &Option<AttentionDropout>),
    ) -> Result<String, Refused> {
        let side = |n: Option<usize>| n.map_or("None".to_string(), |n| n.to_string());
        let [l, r, c] = [mask.left, mask.right, mask.chunk].map(side);
        let mut out = match mask {
            Mask::CAUSAL => ", causal".to_string(),
            Mask::FULL => ", full".to_string(),
            _other => format!(", Mask({l}, {r}, {c})"),
        };
        let origins = positions.map(|p| (self.origin)(self.n.ins[p]));
        if let [Some(q), Some(k)] = origins {
            out += &format!(", places={}", quoted(&format!("{q} | {k}")));
        }
        if let Some(c) = softcap {
            out += &format!(", softcap={}", number(c));
        }
        let x = |i: usize| &self.x[i];
        if let Some(i) = behind.slopes {
            out += &format!(", slopes={}", x(i));
        }
        if let Some(i) = behind.bias {
            out += &format!(", bias={}", x(i));
        }
        if let Some([q, k]) = behind.segments {
            out += &format!(", segments=({}, {})", x(q), x(k));
        }
        if let (Some([run, place]), Some(kept)) = (behind.drawn, kept) {
            let first = self.layouts.start(self.ty(0), 2);
            out += &format!(
                ", kept=({}, {}, {first}, {}, {})",
                number(kept.rate),
                quoted(&kept.stream.0),
                x(run),
                x(place)
            );
        }
        Ok(out)
    }
}

/// What a recurrence takes behind its values; `q` says how many tokens there are.
fn recurrent(x: &[String], behind: scan::ScanOperands, of: &Scan, q: &Type) -> String {
    let all = [("beta", behind.beta), ("segments", behind.segments), ("start", behind.start)];
    let all = all.iter().filter_map(|(name, i)| Some(format!(", {name}={}", x[(*i)?])));
    let tokens = q.dims[1].size / of.count();
    all.chain((!of.pieces.0.is_empty()).then(|| format!(", piece={tokens}"))).collect()
}
