use super::*;
use crate::func::{Func, RoleKind};
use crate::interp::{Precision, call};
use crate::mesh::Mesh;
use crate::tensor::Tensor;

fn update(rules: &Rules, name: &str, shape: &[usize], given: &[(&str, &str)]) -> Update {
    let rule = rules.named(name).find(|r| r.fits(shape)).expect("a rule fits").clone();
    let given = given.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let attrs = rule.attributes(&given, [2, 3], Some(1), shape).unwrap_or_else(|e| panic!("{e:?}"));
    Update { rule, attrs, stack: false, lr: 1.0, group: 0 }
}

fn function(u: &Update, shape: &[usize]) -> Func {
    u.func(shape).unwrap_or_else(|d| panic!("{}", d.render()))
}

/// Numbers that look random, the same for the same seed.
fn noise(shape: &[usize], seed: usize) -> Tensor {
    let n: usize = shape.iter().product();
    let one = |k: usize| (((k * 7919 + seed * 104_729) % 1009) as f64 / 504.5) - 1.0;
    Tensor::new(shape, (0..n).map(one).collect())
}

fn run(f: &Func, args: &[Tensor]) -> Vec<Tensor> {
    let args: Vec<Vec<Tensor>> = args.iter().map(|t| vec![t.clone()]).collect();
    let made = call(&Mesh::default(), f, &args, Precision::F64).unwrap_or_else(|d| panic!("{d}"));
    made.into_iter().map(|mut t| t.swap_remove(0)).collect()
}

#[test]
fn every_built_in_rule_is_a_function() {
    for name in built_in().names() {
        for shape in [&[2, 3][..], &[3, 2], &[4]] {
            if !built_in().named(name).any(|r| r.fits(shape)) {
                assert!(["muon", "muon_heads"].contains(&name) && shape == [4], "{name} {shape:?}");
                continue;
            }
            let u = update(built_in(), name, shape, &[]);
            let f = function(&u, shape);
            let kept = u.kept(shape.len()).expect("states");
            assert_eq!(f.results.len(), 1 + kept.len(), "{name}");
        }
    }
}

/// An op that a rule names as its fused form makes what the text makes.
#[test]
fn fused_ops_are_their_texts() {
    for name in ["adamw", "sgd"] {
        let shape = [3, 4];
        let u = update(built_in(), name, &shape, &[("decay", "0.1")]);
        let f = function(&u, &shape);
        let op = u.fused().expect("it reads").expect("it has one");
        let of = |a: &crate::func::Port| match a.role.as_ref().map(|r| (r.kind, &*r.name)) {
            Some((RoleKind::Param, _)) => noise(&shape, 1),
            Some((RoleKind::Grad, _)) => noise(&shape, 2),
            Some((RoleKind::State(_), _)) => noise(&shape, 3).map(|x| x * x),
            Some((_, "lr")) => Tensor::scalar(0.01),
            _step => Tensor::scalar(3.0),
        };
        let args: Vec<Tensor> = f.args.iter().map(of).collect();
        let text = run(&f, &args);
        // The op's scalars stand behind the states: lr, the step if it asks for one, and a factor
        // of gradients.
        let mut ins = args.clone();
        ins.push(Tensor::scalar(1.0));
        let types: Vec<crate::types::Type> =
            ins.iter().map(|t| crate::types::Type::f32(&t.shape)).collect();
        let types: Vec<&crate::types::Type> = types.iter().collect();
        let mesh = Mesh::default();
        let outs = op.check(&mesh, &types, &[None, None, None][..1 + u.kept(2).unwrap().len()]);
        let outs = outs.unwrap_or_else(|e| panic!("{}", e.message));
        let outs: Vec<&crate::types::Type> = outs.iter().collect();
        let cx = crate::ops::EvalCx { mesh: &mesh, coords: &[], ins: &types, outs: &outs };
        let made = op.def().eval(&cx, &ins.iter().collect::<Vec<_>>());
        assert_eq!(made.len(), text.len(), "{name}");
        for (a, b) in made.iter().zip(&text) {
            let apart = a.zip(b, |a, b| (a - b).abs());
            assert!(apart.data.iter().all(|x| *x < 1e-12), "{name}: {apart:?}");
        }
    }
}

/// A stack is updated matrix by matrix.
#[test]
fn a_stack_is_its_matrices() {
    let (shape, inner) = ([2, 3, 5], [3, 5]);
    let given = [("dtype", "f32"), ("scale", "match_rms_adamw")];
    let mut u = update(built_in(), "muon", &inner, &given);
    let one = function(&u, &inner);
    u.stack = true;
    let all = function(&u, &shape);
    let [p, g, b] = [1, 2, 3].map(|seed| noise(&shape, seed));
    let lr = Tensor::scalar(0.1);
    let made = run(&all, &[p.clone(), g.clone(), b.clone(), lr.clone()]);
    for e in 0..2 {
        let part = |t: &Tensor| {
            let t = t.slice(0, e, 1);
            Tensor::new(&inner, t.data)
        };
        let alone = run(&one, &[part(&p), part(&g), part(&b), lr.clone()]);
        for (whole, alone) in made.iter().zip(&alone) {
            let apart = part(whole).zip(alone, |a, b| (a - b).abs());
            assert!(apart.data.iter().all(|x| *x < 1e-12), "{apart:?}");
        }
    }
}

/// What Muon makes of a matrix is nearly orthogonal, whichever side is longer.
#[test]
fn muon_turns_with_its_matrix() {
    let given = [("dtype", "f32"), ("scale", "none"), ("decay", "0")];
    let of = |shape: &[usize], g: &Tensor| {
        let f = function(&update(built_in(), "muon", shape, &given), shape);
        let zero = g.map(|_| 0.0);
        run(&f, &[zero.clone(), g.clone(), zero, Tensor::scalar(1.0)]).swap_remove(0)
    };
    let g = noise(&[3, 5], 2);
    let turned = |t: &Tensor| {
        let [n, m] = [t.shape[0], t.shape[1]];
        Tensor::from_fn(&[m, n], |i| t.at(&[i[1], i[0]]))
    };
    let (wide, tall) = (of(&[3, 5], &g), of(&[5, 3], &turned(&g)));
    let apart = wide.zip(&turned(&tall), |a, b| (a - b).abs());
    assert!(apart.data.iter().all(|x| *x < 1e-12), "{apart:?}");
    for r in 0..3 {
        let square: f64 = (0..5).map(|c| wide.at(&[r, c]).powi(2)).sum();
        assert!((0.5..1.5).contains(&square), "row {r}: {square}");
    }
}

const HEAD: &str = "update @mine(\n  %p: f32[*] param, %g: f32[*] grad, %m: f32[*] state[mean] = 0,\n  \
                    %lr: f32[] scalar \"lr\",\n) -> (f32[*] param, f32[*] state[mean])\n  with mu = 0.9\n";

/// The message of a text that is wrong: of reading it, or of its function for a matrix.
fn refused(text: &str) -> Diag {
    let rules = match Rules::parse(text, "mine.ir") {
        Ok(rules) => rules,
        Err(d) => return d,
    };
    let rule = rules.named("mine").next().expect("a rule").clone();
    let attrs = rule
        .attributes(&BTreeMap::new(), [4, 3], None, &[3, 4])
        .unwrap_or_else(|e| panic!("{e:?}"));
    let u = Update { rule, attrs, stack: false, lr: 1.0, group: 0 };
    u.func(&[3, 4]).map(|_| ()).expect_err(text)
}

#[test]
fn wrong_texts_are_refused_with_their_line() {
    let body = |text: &str| format!("{HEAD}{{\n  {text}\n}}\n");
    let head = |from: &str, to: &str| body("return %p; %m").replacen(from, to, 1);
    for (text, says, line) in [
        (body("return %p"), "1 values are returned, not 2", "line 1,"),
        (body("return %p; %lr"), "what is returned for `%m` is f32[], not f32[3,4]", "line 7,"),
        (body("return cast[bf16] %p; %m"), "what is returned for `%p` is bf16[3,4]", "line 7,"),
        (body("return %q; %m"), "`%q` is not defined above this line", "line 7,"),
        (body("return scale[$nu] %p; %m"), "`$nu` is no attribute of this rule", "line 7,"),
        (body("return no_op %p; %m"), "no_op", "line 7,"),
        (body("return add %p, %lr; %m"), "`add`", "line 7,"),
        (
            body("repeat i in 0..1e9, %x{i} at 0 is %p {\n %x{i+1} = exp %x{i}\n}\nreturn %p; %m"),
            "does not end in time",
            "line 7,",
        ),
        (
            body("repeat i in 0..inf, %x{i} at 0 is %p {\n %x{i+1} = exp %x{i}\n}\nreturn %p; %m"),
            "does not end in time",
            "line 7,",
        ),
        (body(&format!("return {}%p; %m", "(".repeat(100_000))), "stand in each other", "line 7,"),
        (body(&format!("return {}%p; %m", "sqrt ".repeat(9000))), "stand in each other", "line 7,"),
        (
            body(&format!("return scale[{}$mu] %p; %m", "-".repeat(9000))),
            "stand in each other",
            "line 7,",
        ),
        (
            body(
                "repeat i in 0..900, %x{i} at 0 is %p {\n %x{i+1} = sqrt sqrt %x{i}\n}\nreturn %p; %m",
            ),
            "more than 1000 ops",
            "line 8,",
        ),
        (head("state[mean] = 0", "state[mean] = 1e999"), "not a number that a state", "line 2,"),
        (head("%g: f32[*] grad", "%g: f32[*] param"), "2 arguments are `param`, not 1", "line 2,"),
        (head("f32[*] state[mean])", "f32[*] sum)"), "`sum` is nothing that", "line 4,"),
        (head(", f32[*] state[mean])", ")"), "result 2 is not `state[mean]`", "line 1,"),
        (head("\"lr\"", "\"loss\""), "no scalar of a step is called `loss`", "line 3,"),
        (
            head("state[mean] = 0", "state[Mean] = 0"),
            "`Mean` is not the name of a state",
            "line 2,",
        ),
        (head("%m: f32[*]", "%m: i32[*]"), "is returned in another type", "line 4,"),
    ] {
        let d = refused(&text);
        let place = d.place.clone().unwrap_or_default();
        assert!(d.message.contains(says), "{says}: {}", d.render());
        assert!(place.starts_with("mine.ir: @mine, ") && place.contains(line), "{says}: {place}");
        assert!(!d.help.is_empty(), "{}", d.render());
    }
}

/// What is said to do all of a rule keeps its states, and reads what a step has.
#[test]
fn fused_ops_are_updates() {
    for op in ["adamw[0.9; beta2=0.99; eps=1e-8; decay=0]", "sgd[0.1]", "exp", "add"] {
        let text = format!("{HEAD}  fused {op}\n{{\n  return %p; %m\n}}\n");
        let rule = Rules::parse(&text, "mine.ir").expect("it reads").named("mine").next().cloned();
        let rule = rule.expect("a rule");
        let attrs = rule.attributes(&BTreeMap::new(), [4, 3], None, &[3, 4]).expect("numbers");
        let u = Update { rule, attrs, stack: false, lr: 1.0, group: 0 };
        let d = u.fused().expect_err(op);
        assert!(d.message.contains("is no update of a parameter with these states"), "{d}");
    }
}

#[test]
fn attributes_are_those_of_the_rule() {
    let rule = built_in().named("muon").next().expect("it is there");
    let given = |k: &str, v: &str| {
        let one = BTreeMap::from([(k.to_string(), v.to_string())]);
        rule.attributes(&one, [8, 2], None, &[2, 8])
    };
    let number = |k: &str, v: &str, of: &str| match &given(k, v).expect("it is known")[of] {
        AttrValue::Numbers(all) => all[0],
        AttrValue::Word(word) => panic!("{word}"),
    };
    assert_eq!(number("scale", "original", "scale"), 2.0);
    assert_eq!(number("scale", "match_rms_adamw", "scale"), 0.2 * 8f64.sqrt());
    assert_eq!(number("scale", "spectral_unclamped", "scale"), 2.0);
    assert_eq!(number("nesterov", "no", "nesterov"), 1.0);
    assert_eq!(number("momentum", "0.5", "nesterov"), 0.5);
    for (k, v, says) in [
        ("momentun", "0.5", "has no attribute `momentun`"),
        ("scale", "rms", "`rms` is no scale"),
        ("steps", "(", "`steps` of `@muon`"),
    ] {
        let [what, help] = given(k, v).expect_err(k);
        assert!(what.contains(says) && !help.is_empty(), "{what}");
    }
}
