//! What becomes of each op. A new op of ours is a row here.

use super::compare::Order;
use super::compose;
use super::graph::Node;
use super::inplace::{pure, renames};
use super::lower::{Lower, Val};
use super::recur::Cell;
use shardc_ir::diag::Result;
use shardc_ir::names;
use shardc_ir::ops::unary::Rounding;
use shardc_ir::ops::{
    Abs, Cos, Erf, Exp, Log, Log1p, Logistic, Op, Round, Rsqrt, Scale, Sign, Silu, Sin, Sqrt, Tanh,
};

/// Functions of two operands, of which one may be a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Arithmetic {
    Add,
    Sub,
    /// The second less the first.
    Rsub,
    Mul,
    Div,
    Max,
    Min,
    /// 1 where the first is less.
    Less,
    Equal,
}

/// How an op is lowered.
#[derive(Clone, Copy)]
pub(super) enum How {
    /// Nothing becomes of its first operand.
    Same,
    /// A function of each element: the name of its result, and the op.
    Unary(&'static str, fn() -> Op),
    Binary(Arithmetic),
    Call(fn(&mut Lower, &Node) -> Result<Vec<Val>>),
    /// An expression of others.
    Text(&'static str),
}

use How::{Binary, Call, Same, Text, Unary};

/// All ops, by name.
const TABLE: &[(&str, How)] = &[
    ("_to_copy.default", Same),
    ("_unsafe_view.default", Call(|l, n| l.view(n, "size"))),
    ("_weight_norm.default", Call(|l, n| l.weight_norm(n))),
    ("abs.default", Unary("abs", || Abs {}.into())),
    ("add.Scalar", Binary(Arithmetic::Add)),
    ("add.Tensor", Binary(Arithmetic::Add)),
    ("addmm.default", Call(|l, n| l.addmm(n))),
    ("alias.default", Same),
    ("baddbmm.default", Call(|l, n| l.baddbmm(n))),
    ("bitwise_not.default", Call(|l, n| l.not(n))),
    ("bmm.default", Call(|l, n| l.matmul(n, "mat2"))),
    ("broadcast_tensors.default", Call(|l, n| l.broadcast(n))),
    ("broadcast_to.default", Call(|l, n| l.expand(n))),
    ("cat.default", Call(|l, n| l.cat(n))),
    ("chunk.default", Call(|l, n| l.split(n, "chunks"))),
    ("clamp.Tensor", Call(|l, n| l.clamp(n))),
    ("clamp.default", Call(|l, n| l.clamp(n))),
    ("clone.default", Same),
    ("contiguous.default", Same),
    ("conv1d.default", Call(|l, n| l.conv(n, 1))),
    ("conv1d.padding", Call(|l, n| l.conv(n, 1))),
    ("conv2d.default", Call(|l, n| l.conv(n, 2))),
    ("conv2d.padding", Call(|l, n| l.conv(n, 2))),
    ("ceil.default", Unary("ceil", || Round { to: Rounding::Ceil }.into())),
    ("cos.default", Unary("cos", || Cos {}.into())),
    ("cross_entropy_loss.default", Call(|l, n| l.cross_entropy(n))),
    ("detach.default", Call(|l, n| l.detach(n))),
    ("div.Scalar", Binary(Arithmetic::Div)),
    ("div.Tensor", Binary(Arithmetic::Div)),
    ("dropout.default", Call(|l, n| l.dropout(n))),
    ("embedding.default", Call(|l, n| l.embedding(n))),
    ("erf.default", Unary("erf", || Erf {}.into())),
    ("eq.Scalar", Call(|l, n| l.compare(n, Order::Equal))),
    ("eq.Tensor", Call(|l, n| l.compare(n, Order::Equal))),
    ("exp.default", Unary("exp", || Exp {}.into())),
    ("expand.default", Call(|l, n| l.expand(n))),
    ("flatten.using_ints", Call(|l, n| l.flatten(n))),
    ("floor.default", Unary("floor", || Round { to: Rounding::Floor }.into())),
    ("gather.default", Call(|l, n| l.gather(n))),
    ("ge.Scalar", Call(|l, n| l.compare(n, Order::AtLeast))),
    ("ge.Tensor", Call(|l, n| l.compare(n, Order::AtLeast))),
    ("gelu.default", Call(|l, n| l.gelu(n))),
    ("gt.Scalar", Call(|l, n| l.compare(n, Order::Above))),
    ("gt.Tensor", Call(|l, n| l.compare(n, Order::Above))),
    ("index.Tensor", Call(|l, n| l.index(n))),
    ("index_select.default", Call(|l, n| l.index(n))),
    ("layer_norm.default", Call(|l, n| l.layer_norm(n))),
    ("le.Scalar", Call(|l, n| l.compare(n, Order::AtMost))),
    ("le.Tensor", Call(|l, n| l.compare(n, Order::AtMost))),
    ("linear.default", Call(|l, n| l.linear(n))),
    ("log.default", Unary("log", || Log {}.into())),
    ("log1p.default", Unary("log1p", || Log1p {}.into())),
    ("lt.Scalar", Call(|l, n| l.compare(n, Order::Less))),
    ("lt.Tensor", Call(|l, n| l.compare(n, Order::Less))),
    ("masked_fill.Scalar", Call(|l, n| l.masked_fill(n))),
    ("matmul.default", Call(|l, n| l.matmul(n, "other"))),
    ("maximum.default", Binary(Arithmetic::Max)),
    ("mean.default", Call(|l, n| l.mean(n, true))),
    ("mean.dim", Call(|l, n| l.mean(n, true))),
    ("minimum.default", Binary(Arithmetic::Min)),
    ("mm.default", Call(|l, n| l.matmul(n, "mat2"))),
    ("binary_cross_entropy.default", Call(|l, n| l.bce(n))),
    ("binary_cross_entropy_with_logits.default", Call(|l, n| l.bce_logits(n))),
    ("huber_loss.default", Call(|l, n| l.distance(n, Some("delta"), false))),
    ("kl_div.default", Call(|l, n| l.kl_div(n))),
    ("l1_loss.default", Call(|l, n| l.distance(n, None, false))),
    ("smooth_l1_loss.default", Call(|l, n| l.distance(n, Some("beta"), true))),
    ("mse_loss.default", Call(|l, n| l.mse(n))),
    ("mul.Scalar", Binary(Arithmetic::Mul)),
    ("mul.Tensor", Binary(Arithmetic::Mul)),
    ("ne.Scalar", Call(|l, n| l.compare(n, Order::Other))),
    ("ne.Tensor", Call(|l, n| l.compare(n, Order::Other))),
    ("neg.default", Unary("neg", || Scale { by: -1.0 }.into())),
    ("numpy_T.default", Call(|l, n| l.turn(n))),
    ("permute.default", Call(|l, n| l.permute(n))),
    ("pow.Tensor_Scalar", Call(|l, n| l.pow(n))),
    ("reciprocal.default", Call(|l, n| l.reciprocal(n))),
    ("relu.default", Call(|l, n| l.relu(n))),
    ("repeat.default", Call(|l, n| l.repeat(n))),
    ("repeat_interleave.self_int", Call(|l, n| l.repeat_interleave(n))),
    ("reshape.default", Call(|l, n| l.view(n, "shape"))),
    ("rms_norm.default", Call(|l, n| l.rms_norm(n))),
    ("round.default", Unary("round", || Round { to: Rounding::Even }.into())),
    ("rsqrt.default", Unary("rstd", || Rsqrt {}.into())),
    ("rsub.Scalar", Binary(Arithmetic::Rsub)),
    ("rsub.Tensor", Binary(Arithmetic::Rsub)),
    ("scaled_dot_product_attention.default", Call(|l, n| l.attention(n))),
    ("scatter.value", Call(|l, n| l.scatter(n))),
    ("select.int", Call(|l, n| l.select(n))),
    ("sigmoid.default", Unary("sigmoid", || Logistic {}.into())),
    ("silu.default", Unary("act", || Silu { beta: None }.into())),
    ("sin.default", Unary("sin", || Sin {}.into())),
    ("slice.Tensor", Call(|l, n| l.slice(n))),
    ("softmax.int", Call(|l, n| l.softmax(n))),
    ("_softmax.default", Call(|l, n| l.softmax(n))),
    ("log_softmax.int", Call(|l, n| l.log_softmax_of(n))),
    ("_log_softmax.default", Call(|l, n| l.log_softmax_of(n))),
    ("softplus.default", Call(|l, n| l.softplus(n))),
    ("split.Tensor", Call(|l, n| l.split(n, "split_size"))),
    ("split_with_sizes.default", Call(|l, n| l.split(n, "split_sizes"))),
    ("sqrt.default", Unary("sqrt", || Sqrt {}.into())),
    ("squeeze.dim", Call(|l, n| l.squeeze(n))),
    ("sub.Scalar", Binary(Arithmetic::Sub)),
    ("sub.Tensor", Binary(Arithmetic::Sub)),
    ("sum.default", Call(|l, n| l.mean(n, false))),
    ("sum.dim_IntList", Call(|l, n| l.mean(n, false))),
    ("sym_size.int", Call(|l, n| l.size(n))),
    ("stack.default", Call(|l, n| l.stack(n))),
    ("t.default", Call(|l, n| l.turn(n))),
    ("tanh.default", Unary("tanh", || Tanh {}.into())),
    ("to.device", Same),
    ("to.dtype", Same),
    ("to.dtype_layout", Same),
    ("topk.default", Call(|l, n| l.topk(n))),
    ("transpose.int", Call(|l, n| l.transpose(n))),
    ("type_as.default", Same),
    ("unbind.int", Call(|l, n| l.unbind(n))),
    ("unflatten.int", Call(|l, n| l.unflatten(n))),
    ("unsqueeze.default", Call(|l, n| l.unsqueeze(n))),
    ("view_as.default", Call(|l, n| l.view(n, "size"))),
    ("view.default", Call(|l, n| l.view(n, "size"))),
    ("where.ScalarOther", Call(|l, n| l.choose(n))),
    ("where.ScalarSelf", Call(|l, n| l.choose(n))),
    ("where.self", Call(|l, n| l.choose(n))),
    ("adaptive_avg_pool1d.default", Call(|l, n| l.adaptive(n, 1))),
    ("adaptive_avg_pool2d.default", Call(|l, n| l.adaptive(n, 2))),
    ("amax.default", Call(|l, n| l.extreme(n, true))),
    ("amin.default", Call(|l, n| l.extreme(n, false))),
    ("argsort.default", Call(|l, n| l.sorted(n, false))),
    ("argsort.stable", Call(|l, n| l.sorted(n, false))),
    ("argmax.default", Call(|l, n| l.extreme_at(n, true, false))),
    ("argmin.default", Call(|l, n| l.extreme_at(n, false, false))),
    ("avg_pool1d.default", Call(|l, n| l.pool(n, 1, false))),
    ("avg_pool2d.default", Call(|l, n| l.pool(n, 2, false))),
    ("batch_norm.default", Call(|l, n| l.batch_norm(n))),
    ("bilinear.default", Call(|l, n| l.bilinear(n))),
    ("constant_pad_nd.default", Call(|l, n| l.padded(n))),
    ("conv_transpose1d.default", Call(|l, n| l.conv_back(n, 1))),
    ("conv_transpose2d.input", Call(|l, n| l.conv_back(n, 2))),
    ("copy.default", Call(|l, n| l.copied(n, "src"))),
    ("cumprod.default", Call(|l, n| l.product_along(n, true))),
    ("cumsum.default", Call(|l, n| l.cumsum(n))),
    ("diagonal.default", Call(|l, n| l.diagonal(n))),
    ("dot.default", Call(|l, n| l.matmul(n, "tensor"))),
    ("einsum.default", Call(|l, n| l.einsum(n))),
    ("embedding_bag.padding_idx", Call(|l, n| l.bags(n))),
    ("expand_as.default", Call(|l, n| l.expand(n))),
    ("fill.Tensor", Call(|l, n| l.copied(n, "value"))),
    ("flip.default", Call(|l, n| l.flip(n))),
    ("group_norm.default", Call(|l, n| l.group_norm(n, false))),
    ("gru.input", Call(|l, n| l.layers(n, Cell::Gru))),
    ("gru_cell.default", Call(|l, n| l.cell(n, Cell::Gru))),
    ("index_add.default", Call(|l, n| l.added_at(n, "source"))),
    ("instance_norm.default", Call(|l, n| l.group_norm(n, true))),
    ("lift_fresh_copy.default", Same),
    ("linalg_vector_norm.default", Call(|l, n| l.vector_norm(n))),
    ("lstm.input", Call(|l, n| l.layers(n, Cell::Lstm))),
    ("lstm_cell.default", Call(|l, n| l.cell(n, Cell::Lstm))),
    ("mT.default", Call(|l, n| l.turned_last(n))),
    ("max.default", Call(|l, n| l.extreme(n, true))),
    ("max.dim", Call(|l, n| l.extreme_at(n, true, true))),
    ("max.other", Binary(Arithmetic::Max)),
    ("max_pool1d.default", Call(|l, n| l.pool(n, 1, true))),
    ("max_pool2d.default", Call(|l, n| l.pool(n, 2, true))),
    ("min.default", Call(|l, n| l.extreme(n, false))),
    ("min.dim", Call(|l, n| l.extreme_at(n, false, true))),
    ("min.other", Binary(Arithmetic::Min)),
    ("multi_margin_loss.default", Call(|l, n| l.multi_margin(n))),
    ("mv.default", Call(|l, n| l.matmul(n, "vec"))),
    ("nll_loss_nd.default", Call(|l, n| l.nll(n))),
    ("one_hot.default", Call(|l, n| l.one_hot(n))),
    ("pad.default", Call(|l, n| l.padded(n))),
    ("pixel_shuffle.default", Call(|l, n| l.pixel_shuffle(n))),
    ("prod.dim_int", Call(|l, n| l.product_along(n, false))),
    ("rnn_tanh.input", Call(|l, n| l.layers(n, Cell::Tanh))),
    ("rnn_tanh_cell.default", Call(|l, n| l.cell(n, Cell::Tanh))),
    ("roll.default", Call(|l, n| l.roll(n))),
    ("scatter.src", Call(|l, n| l.written_at(n))),
    ("scatter_add.default", Call(|l, n| l.added_at(n, "src"))),
    ("select_scatter.default", Call(|l, n| l.within(n))),
    ("sign.default", Unary("sign", || Sign {}.into())),
    ("slice_scatter.default", Call(|l, n| l.within(n))),
    ("sort.default", Call(|l, n| l.sorted(n, true))),
    ("sort.stable", Call(|l, n| l.sorted(n, true))),
    ("squeeze.default", Call(|l, n| l.squeezes(n))),
    ("squeeze.dims", Call(|l, n| l.squeezes(n))),
    ("std.correction", Call(|l, n| l.variance(n, true))),
    ("std.default", Call(|l, n| l.variance(n, true))),
    ("std.dim", Call(|l, n| l.variance(n, true))),
    ("tril.default", Call(|l, n| l.triangle(n, true))),
    ("triu.default", Call(|l, n| l.triangle(n, false))),
    ("unfold.default", Call(|l, n| l.unfold(n))),
    ("upsample_bilinear2d.vec", Call(|l, n| l.resized(n, true))),
    ("upsample_linear1d.vec", Call(|l, n| l.resized(n, true))),
    ("upsample_nearest1d.vec", Call(|l, n| l.resized(n, false))),
    ("upsample_nearest2d.vec", Call(|l, n| l.resized(n, false))),
    ("var.correction", Call(|l, n| l.variance(n, false))),
    ("var.default", Call(|l, n| l.variance(n, false))),
    ("var.dim", Call(|l, n| l.variance(n, false))),
];

/// The row of an op.
pub(super) fn row(op: &str) -> Option<How> {
    let own = TABLE.iter().find(|r| r.0 == op).map(|r| r.1);
    own.or_else(|| compose::text(op).map(Text))
}

/// What ops that are not there can be made of.
const COMPOSED: &[(&str, &str)] = &[
    ("conv", "a convolution over one or two dims"),
    ("relu6", "an activation such as ReLU, SiLU or GELU"),
    ("masked_fill", "masks that do not depend on data: those are known when the model is imported"),
    ("index", "an embedding, or a slice by numbers"),
    ("bernoulli", "no dropout: set its rates to 0"),
    ("view_as_complex", "rotary embeddings by cosines and sines of halves"),
    ("polar", "rotary embeddings by cosines and sines of halves"),
    ("einsum", "matmul"),
    ("cond", "a model whose control flow does not depend on data"),
    ("while_loop", "a model whose control flow does not depend on data"),
];

/// The way out of an op that is not there.
pub(super) fn nearest(op: &str) -> String {
    let name = op.rsplit("higher_order.").next().unwrap_or(op);
    if let Some((_, by)) = COMPOSED.iter().find(|c| name.trim_start_matches('_').starts_with(c.0)) {
        return format!("use in its place: {by}");
    }
    if pure(op).is_some_and(|plain| renames(op) || row(&plain).is_some()) {
        return "it writes into a tensor, or a part of one, that is read by other names: write into a \
                copy (`x = x.clone()`), or make a new tensor (torch.where, torch.cat)"
            .into();
    }
    let near = names::nearest(op, TABLE.iter().map(|r| r.0), 2);
    match near.is_empty() {
        true => "build it of sums, products and functions of one element".into(),
        false => format!("the nearest that is read: `{}`", near.join("`, `")),
    }
}
