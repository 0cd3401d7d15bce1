//! Random modules, printed and read back.

use super::*;
use proptest::prelude::*;

/// Choices for a random module, drawn in advance.
#[derive(Clone, Debug)]
struct Draw {
    axes: Vec<usize>,
    cut: bool,
    funcs: usize,
    dice: Vec<u32>,
}

fn draws() -> impl Strategy<Value = Draw> {
    let axes = prop::collection::vec(prop::sample::select(vec![2usize, 3, 4, 6, 8]), 0..4);
    let dice = prop::collection::vec(any::<u32>(), 400);
    (axes, any::<bool>(), 1usize..3, dice).prop_map(|(axes, cut, funcs, dice)| Draw {
        axes,
        cut,
        funcs,
        dice,
    })
}

/// Rolls the dice, over and over.
struct Dice<'a> {
    dice: &'a [u32],
    at: usize,
}

impl Dice<'_> {
    fn roll(&mut self, n: usize) -> usize {
        self.at += 1;
        (self.dice[self.at % self.dice.len()] as usize).wrapping_add(self.at / self.dice.len()) % n
    }
    fn set(&mut self, mesh: &Mesh) -> AtomSet {
        mesh.all().iter().filter(|_| self.roll(3) == 0).collect()
    }
    /// A type with marks: every atom in at most one place.
    fn marked(&mut self, mesh: &Mesh, mut t: Type) -> Type {
        for a in mesh.all().iter() {
            let rank = t.rank();
            match self.roll(8) {
                0 => t.replicated = t.replicated.with(a),
                1 => t.varying = t.varying.with(a),
                2 => t.sum = t.sum.with(a),
                3 => t.max = t.max.with(a),
                4 => t.min = t.min.with(a),
                5 | 6 if rank > 0 => {
                    let d = &mut t.dims[self.roll(rank)];
                    d.atoms = d.atoms.push(a).unwrap();
                    d.atoms = if self.roll(8) == 0 { d.atoms.turned() } else { d.atoms };
                }
                _ => {}
            }
        }
        t
    }
    fn name(&mut self) -> Name {
        let hint = ["x", "q", "attn.out", "d_w", "l3.z", "w.12", "_", "0"][self.roll(8)];
        let layer = (self.roll(2) == 0).then(|| self.roll(4) as u32);
        Name::parse(&match layer {
            Some(l) => format!("l{l}.{hint}"),
            None => hint.to_string(),
        })
    }
    fn asked(&mut self, mesh: &Mesh, rank: usize) -> Annotation {
        let dim = |s: &mut Self| {
            let atoms = AtomList::collect(s.set(mesh).iter()).unwrap();
            AnnotatedDim { atoms, open: s.roll(2) == 0 }
        };
        Annotation { dims: (0..rank).map(|_| dim(self)).collect(), priority: self.roll(3) as u8 }
    }
    fn role(&mut self, i: usize) -> Option<Role> {
        let name =
            ["w", "a \"quoted\" one", "é\n\t\\", "layers.7.{x}", "model.layers.2.q"][self.roll(5)];
        let kind = RoleKind::ALL[self.roll(RoleKind::ALL.len())];
        (self.roll(3) > 0).then(|| Role::new(kind, format!("{name}{i}")))
    }
    fn collective(&mut self, mesh: &Mesh) -> Op {
        let (mut axes, dim, to) = (self.set(mesh), self.roll(3), self.roll(3));
        if axes.is_empty() {
            axes = AtomSet::one(Atom(0));
        }
        match self.roll(11) {
            0 => FanOut { axes }.into(),
            1 => AllReduce { axes }.into(),
            2 => AllGather { axes, dim }.into(),
            3 => ReduceScatter { axes, dim }.into(),
            4 => Slice { axes, dim }.into(),
            5 => PadToPartial { axes, dim }.into(),
            6 => AllToAll { axes, from: dim, to }.into(),
            9 if to == 0 => Exchange::shifted(axes, dim, 3 - 2 * dim as i64).into(),
            9 => Exchange::over(axes).into(),
            7 => Broadcast { axes, dim, from: to }.into(),
            8 => Reduce { axes, dim, to }.into(),
            _ => Permute { axes, shift: dim }.into(),
        }
    }
}

fn module(d: &Draw) -> Module {
    let names = ["pp", "dp_shard", "tp"];
    let axes: Vec<(&str, usize)> = names.into_iter().zip(d.axes.iter().copied()).collect();
    let mut mesh = Mesh::new(&axes).unwrap();
    if d.cut {
        for i in 0..mesh.axes.len() {
            if mesh.axes[i].size.is_multiple_of(2) {
                mesh.cut(i, 2).unwrap();
            }
        }
    }
    let mut dice = Dice { dice: &d.dice, at: 0 };
    let samples = samples::all();
    let funcs = (0..d.funcs).map(|i| func(&format!("f.{i}"), &mesh, &mut dice, &samples)).collect();
    let phase = Phase::ALL[dice.roll(Phase::ALL.len())];
    let params = (0..dice.roll(3)).map(|i| layout(i, &mesh, &mut dice)).collect();
    let states = (0..dice.roll(3)).map(|i| state(i, &mut dice)).collect();
    Module { mesh, phase, states, params, funcs }
}

fn state(i: usize, d: &mut Dice) -> StateDecl {
    let init = StateInit::Number([0.0, -1.5e-7, 3.0][d.roll(3)]);
    StateDecl {
        name: [StateName::new("exp_avg"), StateName::new("8_x")][i],
        dtype: DType::ALL[d.roll(DType::ALL.len())],
        owner: StateOwner::ALL[d.roll(2)],
        init,
    }
}

fn layout(i: usize, mesh: &Mesh, d: &mut Dice) -> ParamLayout {
    let ty = |d: &mut Dice| d.marked(mesh, Type::new(DType::F32, &[4, 6]));
    let many = if mesh.atoms.is_empty() { 0 } else { d.roll(3) };
    let steps: Vec<LayoutStep> =
        (0..many).map(|_| LayoutStep { op: d.collective(mesh), ty: ty(d) }).collect();
    let names = ["w", "a \"b\" : c", "model.layers.0.q.weight", "{i} // x"];
    ParamLayout {
        param: Role::new(RoleKind::Param, format!("{}{i}", names[d.roll(names.len())])),
        stored: ty(d),
        prepared: d.roll(steps.len() + 1),
        mirrored: d.roll(steps.len() + 1),
        steps,
        trainable: d.roll(2) == 0,
        name: d.name(),
        scope: names[d.roll(names.len())].into(),
    }
}

fn func(name: &str, mesh: &Mesh, d: &mut Dice, samples: &[samples::Sample]) -> Func {
    let mut f = Func::new(name);
    let arg = |f: &mut Func, d: &mut Dice, t: Type| {
        let (t, role, name) = (d.marked(mesh, t), d.role(f.values.len()), d.name());
        let v = f.arg(t, name, role);
        if d.roll(4) == 0 {
            let a = d.asked(mesh, f.ty(v).rank());
            f.annotations.insert(v, a);
        }
        v
    };
    // Values cannot be used before the line that defines them, so arguments come first.
    let steps: Vec<_> = (0..d.roll(12))
        .map(|_| {
            let s = &samples[d.roll(samples.len())];
            let (op, ins, outs) = match d.roll(4) {
                0 if !mesh.atoms.is_empty() => {
                    let t = Type::new(DType::ALL[d.roll(3)], &[4, 6, 1 + d.roll(5)]);
                    (d.collective(mesh), vec![t.clone()], vec![t])
                }
                _ => (s.op.clone(), s.ins.clone(), s.types()),
            };
            (op, ins.into_iter().map(|t| arg(&mut f, d, t)).collect::<Vec<_>>(), outs)
        })
        .collect();
    let note = ["why it exists", "uses %x and \"y\" // twice", "{i}", "repeat i in 0..=1 {"];
    let scopes =
        ["", "model.layers.0.mlp", "model.layers.1.mlp", "model.layers.2.mlp", "h.1", "a-b/c"];
    for (op, ins, outs) in steps {
        let scope = f.scope(scopes[d.roll(scopes.len())]);
        let mut values = vec![];
        for t in outs {
            let (t, name) = (d.marked(mesh, t), d.name());
            let v = f.value(t, name);
            if d.roll(4) == 0 {
                let a = d.asked(mesh, f.ty(v).rank());
                f.annotations.insert(v, a);
            }
            values.push(v);
        }
        let note = (d.roll(3) == 0).then(|| note[d.roll(note.len())].into());
        if d.roll(6) == 0 {
            f.scopes[scope].stage = d.roll(3);
        }
        let part = Part::ALL[if d.roll(4) == 0 { d.roll(3) } else { 0 }];
        let kept = op.layout().is_some() && d.roll(4) == 0;
        f.nodes.push(Node { note, part, kept, ..Node::new(op, &ins, &values, scope) });
    }
    for i in 0..f.values.len() {
        if d.roll(3) == 0 {
            let role = d.role(i);
            f.results.push(Port { value: shardc_ir::func::Value(i as u32), role });
        }
    }
    f
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn random_modules_read_back(d in draws()) {
        let m = module(&d);
        let (folded, unrolled) = (print(&m), print_with(&m, Repeat::Unroll));
        let back = read(&unrolled);
        // Atoms may be coarser: a cut that no type uses leaves no trace.
        if back.mesh == m.mesh {
            assert_same(&m, &back);
        }
        prop_assert_eq!(print_with(&back, Repeat::Unroll), &unrolled[..]);
        prop_assert_eq!(&expand(&folded).unwrap().text, &unrolled);
        prop_assert_eq!(print(&back), folded);
    }

    #[test]
    fn repeated_layers_fold_without_loss(
        pattern in prop::collection::vec(0usize..3, 1..4),
        count in 1usize..12,
        first in 0usize..100,
        down in any::<bool>(),
    ) {
        let n = pattern.len() * count;
        let mut text = "mesh []\n\nfunc @f(%h: f32[4]) -> f32[4] {\n".to_string();
        let mut last = "%h".to_string();
        for k in 0..n {
            let i = if down { first + n - 1 - k } else { first + k };
            text += &format!(" m.{i}.x{}:\n", pattern[k % pattern.len()]);
            for j in 0..=pattern[k % pattern.len()] {
                let dup = if j > 0 { format!(".{j}") } else { String::new() };
                let name = format!("%l{i}.y{dup}");
                text += &format!("  {name} = gelu {last} : f32[4]  // of layer {i}\n");
                last = name;
            }
        }
        text += &format!("  return {last}\n}}\n");
        let m = read(&text);
        prop_assert_eq!(print_with(&m, Repeat::Unroll), &text[..]);
        let folded = print(&m);
        prop_assert_eq!(expand(&folded).unwrap().text, text);
        // At most the pattern twice, head and braces: never more with the number of layers.
        let lines = 8 + 3 * pattern.iter().map(|p| p + 2).sum::<usize>();
        prop_assert!(folded.lines().count() <= lines, "{}", folded);
    }
}
