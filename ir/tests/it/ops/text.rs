//! Text round trips, and inferred types against evaluated shapes.

use shardc_ir::attr::AttrCx;
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{NAMES, Op};
use shardc_ir::samples;
use shardc_ir::types::Type;

/// Ops whose meaning is a movement between ranks have no samples on one device.
pub const RANKED: &[&str] = &[
    "fan_out",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "slice",
    "pad_to_partial",
    "all_to_all",
    "exchange",
    "all_to_all_v",
    "permute",
    "broadcast",
    "reduce",
    "to_partial",
    "to_varying",
    "from_varying",
    "ring_shard",
];

#[test]
fn every_op_has_samples() {
    let sampled: Vec<&str> = samples::all().iter().map(|s| s.op.mnemonic()).collect();
    for name in NAMES {
        let ranked = RANKED.contains(name);
        assert_ne!(sampled.contains(name), ranked, "samples of `{name}`");
    }
}

#[test]
fn ops_survive_a_round_trip_through_text() {
    let mesh = Mesh::default();
    for s in samples::all() {
        let mut text = String::new();
        s.op.write(&mesh, &mut text);
        let (name, attrs) = match text.split_once('[') {
            Some((n, a)) => (n, Some(a.strip_suffix(']').expect("closed"))),
            None => (text.as_str(), None),
        };
        let ranks: Vec<usize> = s.ins.iter().map(Type::rank).collect();
        let back = Op::read(name, attrs, AttrCx { mesh: &mesh, ranks: &ranks });
        assert_eq!(back.as_ref(), Ok(&s.op), "{text}");
    }
}

#[test]
fn evaluated_tensors_have_the_inferred_shapes() {
    for s in samples::all() {
        let ins = s.draw(1);
        let outs = s.eval(&ins.iter().collect::<Vec<_>>());
        let types = s.types();
        assert_eq!(outs.len(), types.len(), "{}", s.text);
        for (t, ty) in outs.iter().zip(&types) {
            assert_eq!(t.shape, ty.sizes(), "{}", s.text);
            assert!(t.data.iter().all(|x| x.is_finite()), "{}: {t:?}", s.text);
        }
    }
}
