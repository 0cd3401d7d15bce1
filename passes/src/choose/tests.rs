//! Against all choices of small problems, one by one.

use super::budget::cut;
use super::*;

/// Xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }

    fn index(&mut self, n: usize) -> usize {
        usize::try_from(self.below(n as u64)).unwrap()
    }

    /// Few values, so that there are ties; or many, or as large as they come.
    fn cost(&mut self, most: u64) -> Cost {
        match self.below(8) {
            0 => Cost::NEVER,
            _ => Cost { time: self.below(most), memory: self.below(most) },
        }
    }

    fn lambda(&mut self) -> Lambda {
        match self.below(6) {
            0 => Lambda::ZERO,
            1 => Lambda::MEMORY,
            2 => Lambda::new(self.below(u64::MAX), self.below(u64::MAX) + 1),
            _ => Lambda::new(self.below(5), self.below(5) + 1),
        }
    }
}

/// A problem as it was given.
#[derive(Default)]
struct Given {
    ways: Vec<usize>,
    units: Vec<usize>,
    tables: Vec<(Vec<usize>, Vec<Cost>)>,
}

impl Given {
    fn random(r: &mut Random, vars: usize, ways: usize) -> Given {
        let n = 1 + r.index(vars);
        let most = [4, 4, 1000, 1 << 50][r.index(4)];
        let count = 1 + r.index(3);
        let ways = (0..n).map(|_| 1 + r.index(ways)).collect();
        let mut g = Given { ways, ..Given::default() };
        g.units = (0..n).map(|_| 10 * r.index(count)).collect();
        for _ in 0..r.index(2 * n + 2) {
            let size = 1 + r.index(n.min(3));
            let mut vars = vec![];
            while vars.len() < size {
                let v = r.index(n);
                if !vars.contains(&v) {
                    vars.push(v);
                }
            }
            let entries: usize = vars.iter().map(|&v| g.ways[v]).product();
            g.tables.push((vars, (0..entries).map(|_| r.cost(most)).collect()));
        }
        g
    }

    /// `count` equal units, joined like layers; `skip` joins each to the one before the last, too.
    fn chain(r: &mut Random, count: usize, ways: usize, skip: bool) -> Given {
        let mut g = Given::default();
        let most = [4, 1000][r.index(2)];
        let mut table = |n| (0..n).map(|_| r.cost(most)).collect::<Vec<_>>();
        let (one, two) = (table(ways), table(ways * ways));
        let (three, far) = (table(ways * ways * ways), table(ways * ways));
        for unit in 0..count {
            let [a, b] = [2 * unit, 2 * unit + 1];
            g.ways.extend([ways, ways]);
            g.units.extend([unit, unit]);
            g.tables.push((vec![a], one.clone()));
            g.tables.push((vec![b, a], two.clone()));
            if unit > 0 {
                g.tables.push((vec![a - 1, b, a], three.clone()));
            }
            if unit > 1 && skip {
                g.tables.push((vec![a, a - 3], far.clone()));
            }
        }
        g
    }

    fn problem(&self) -> Problem {
        let mut p = Problem::new();
        let add = |(&ways, &unit)| p.var(ways, unit);
        let vars: Vec<Var> = self.ways.iter().zip(&self.units).map(add).collect();
        for (table, costs) in &self.tables {
            p.table(&table.iter().map(|&v| vars[v]).collect::<Vec<_>>(), costs.clone());
        }
        p
    }

    fn cost(&self, choice: &[usize]) -> Cost {
        let mut sum = Cost::ZERO;
        for (vars, costs) in &self.tables {
            let (mut at, mut stride) = (0, 1);
            for &v in vars.iter().rev() {
                at += choice[v] * stride;
                stride *= self.ways[v];
            }
            if !costs[at].allowed() {
                return Cost::NEVER;
            }
            sum = Cost { time: sum.time + costs[at].time, memory: sum.memory + costs[at].memory };
        }
        sum
    }

    /// Every choice, with its cost.
    fn all(&self) -> Vec<(Vec<usize>, Cost)> {
        let mut all = vec![vec![]];
        for &n in &self.ways {
            let longer = |c: Vec<usize>| (0..n).map(move |way| [&c[..], &[way]].concat());
            all = all.into_iter().flat_map(longer).collect();
        }
        all.into_iter().map(|c| (c.clone(), self.cost(&c))).collect()
    }
}

/// What a fraction makes of a cost.
fn score(lambda: Lambda, cost: Cost) -> u128 {
    match cost {
        Cost::NEVER => NEVER,
        Cost { time, memory } => {
            u128::from(lambda.bytes()) * u128::from(time)
                + u128::from(lambda.ps()) * u128::from(memory)
        }
    }
}

/// The bound that prices of memory can give: the least time, as if choices could be mixed.
fn mixed(all: &[(Vec<usize>, Cost)], budget: u64) -> u64 {
    let whole = |x: u64| i128::from(x);
    let allowed = || all.iter().map(|a| a.1).filter(|c| c.allowed());
    let mut least = allowed().filter(|c| c.memory <= budget).map(|c| c.time).min().unwrap();
    for over in allowed().filter(|c| c.memory > budget) {
        for under in allowed().filter(|c| c.memory <= budget) {
            let (faster, over) = (whole(under.time) - whole(over.time), whole(over.memory));
            let (part, of) = (whole(budget - under.memory), over - whole(under.memory));
            let time = whole(under.time) - (faster * part).div_euclid(of);
            least = least.min(u64::try_from(time).unwrap());
        }
    }
    least
}

#[test]
fn the_best_of_all() {
    let mut r = Random(1);
    for _ in 0..2000 {
        let (g, lambda) = (Given::random(&mut r, 6, 4), r.lambda());
        let p = g.problem();
        let solved = solve(&p, lambda);
        let best = g.all().iter().map(|a| score(lambda, a.1)).min().unwrap();
        assert!(solved.exact);
        assert_eq!((solved.score, solved.bound), (best, best));
        let cost = g.cost(&solved.ways);
        assert_eq!(score(lambda, cost), best);
        assert_eq!(solved.cost.allowed(), best < NEVER);
        assert!(solved.cost == cost || !cost.allowed());
        assert_eq!(p.cost(&solved.ways), solved.cost);
        // No smaller way is as good.
        for (v, &way) in solved.ways.iter().enumerate().filter(|_| cost.allowed()) {
            let mut other = solved.ways.clone();
            for smaller in 0..way {
                other[v] = smaller;
                assert!(score(lambda, g.cost(&other)) > best, "{v} could be {smaller}");
            }
        }
        assert_eq!(solve(&g.problem(), lambda), solved);
    }
}

#[test]
fn the_best_with_each_way() {
    let mut r = Random(2);
    for _ in 0..500 {
        let (g, lambda) = (Given::random(&mut r, 6, 4), r.lambda());
        let (p, all) = (g.problem(), g.all());
        for v in 0..g.ways.len() {
            let least = |way| {
                let with = all.iter().filter(|a| a.0[v] == way);
                with.map(|a| score(lambda, a.1)).min().unwrap()
            };
            let expected: Vec<u128> = (0..g.ways[v]).map(least).collect();
            assert_eq!(best_with(&p, lambda, Var(v)), Some(expected));
        }
    }
}

#[test]
fn a_budget_and_its_bound() {
    let mut r = Random(3);
    let (mut met, mut tight, mut unfit) = (0, 0, 0);
    for _ in 0..1000 {
        let g = Given::random(&mut r, 5, 3);
        let all = g.all();
        let budget = all[r.index(all.len())].1.memory.saturating_sub(r.below(3)).min(1 << 60);
        let choice = within(&g.problem(), budget);
        assert!(choice.exact && choice.solves <= 14);
        let allowed: Vec<Cost> = all.iter().map(|a| a.1).filter(|c| c.allowed()).collect();
        let Some(&least) = allowed.iter().min_by_key(|c| (c.memory, c.time)) else {
            assert!(!choice.fits && !choice.cost.allowed());
            assert_eq!(choice.bound, u64::MAX);
            continue;
        };
        assert_eq!(g.cost(&choice.ways), choice.cost);
        assert_eq!(choice.fits, least.memory <= budget);
        if !choice.fits {
            assert_eq!(choice.cost, least);
            unfit += 1;
            continue;
        }
        assert!(choice.cost.memory <= budget);
        let best = allowed.iter().filter(|c| c.memory <= budget).map(|c| c.time).min().unwrap();
        assert!(choice.bound <= best && best <= choice.cost.time);
        assert_eq!(choice.bound, mixed(&all, budget));
        let price = choice.lambda;
        let dual = allowed.iter().map(|&c| score(price, c)).min().unwrap();
        assert_eq!(choice.bound, price.time(dual, budget));
        met += i32::from(choice.bound == choice.cost.time);
        tight += i32::from(choice.bound < best);
    }
    assert!(met > 200 && tight > 50 && unfit > 50, "{met} {tight} {unfit}");
}

#[test]
fn the_bound_is_met_by_what_a_price_chooses() {
    let mut r = Random(4);
    for _ in 0..500 {
        let (g, lambda) = (Given::random(&mut r, 5, 3), r.lambda());
        let solved = solve(&g.problem(), lambda);
        if solved.cost.allowed() && lambda != Lambda::ZERO && lambda.ps() > 0 {
            let choice = within(&g.problem(), solved.cost.memory);
            assert!(choice.fits);
            assert_eq!((choice.bound, choice.cost.time), (solved.cost.time, solved.cost.time));
        }
    }
}

#[test]
fn equal_units_are_eliminated_once() {
    let mut r = Random(5);
    for i in 0..60 {
        let (g, lambda) = (Given::chain(&mut r, 4, 3, i % 2 == 0), r.lambda());
        let solved = solve(&g.problem(), lambda);
        let all = g.all();
        let best = all.iter().map(|a| score(lambda, a.1)).min().unwrap();
        assert_eq!((solved.score, score(lambda, g.cost(&solved.ways))), (best, best));
        let v = r.index(8);
        let least = |way| all.iter().filter(|a| a.0[v] == way).map(|a| score(lambda, a.1)).min();
        let expected = (0..3).map(|way| least(way).unwrap()).collect();
        assert_eq!(best_with(&g.problem(), lambda, Var(v)), Some(expected));
    }
    // The first, those between, and the last, of which nothing goes on.
    let g = Given::chain(&mut r, 126, 6, false);
    assert_eq!(solve(&g.problem(), Lambda::ZERO).kinds, 3);
    let mut other = g;
    other.tables[200].1[3].memory ^= 1;
    assert_eq!(solve(&other.problem(), Lambda::ZERO).kinds, 4);
    // The first two lack a skip.
    let g = Given::chain(&mut r, 126, 6, true);
    assert_eq!(solve(&g.problem(), Lambda::ZERO).kinds, 4);
}

#[test]
fn one_chain_of_all_where_units_pass_the_limit() {
    let mut r = Random(8);
    for _ in 0..10 {
        // In a unit one variable joins two seams with the two before: five at once. From one end,
        // three are enough.
        let mut g = Given { ways: vec![3; 9], ..Given::default() };
        let [a, b, c, d] = [0; 4].map(|_| (0..9).map(|_| r.cost(9)).collect::<Vec<_>>());
        for unit in 0..3 {
            let x = 3 * unit;
            g.units.extend([unit; 3]);
            g.tables.push((vec![x, x + 1], a.clone()));
            g.tables.push((vec![x + 2, x], b.clone()));
            if unit > 0 {
                g.tables.push((vec![x - 1, x], c.clone()));
                g.tables.push((vec![x, x - 2], d.clone()));
            }
        }
        let (mut p, lambda, all) = (g.problem(), r.lambda(), g.all());
        let best = all.iter().map(|a| score(lambda, a.1)).min().unwrap();
        for (limit, exact) in [(243, true), (27, true), (26, false)] {
            p.limit = limit;
            let solved = solve(&p, lambda);
            assert_eq!(solved.exact, exact);
            assert!(solved.bound <= best && best <= solved.score);
            assert!(!exact || (solved.bound, solved.score) == (best, best));
            assert_eq!(best_with(&p, lambda, Var(3)).is_some(), exact);
        }
    }
}

#[test]
fn equal_units_choose_the_same_and_ties_go_to_the_first_way() {
    let mut p = Problem::new();
    let x: Vec<Var> = (0..50).map(|unit| p.var(3, unit)).collect();
    let time = |time| Cost { time, memory: 0 };
    let own: Vec<Cost> = [5, 3, 3].map(time).into();
    // Another way than the unit before costs 1.
    let same: Vec<Cost> = (0..9).map(|i| time(u64::from(i / 3 != i % 3))).collect();
    let own = p.table(&x[..1], own);
    x[1..].iter().for_each(|&v| p.again(&[v], own));
    let same = p.table(&x[..2], same);
    x[1..].windows(2).for_each(|two| p.again(two, same));
    let solved = solve(&p, Lambda::ZERO);
    assert_eq!((solved.ways, solved.score), (vec![1; 50], 150));
    assert_eq!(best_with(&p, Lambda::ZERO, x[7]), Some(vec![154, 150, 150]));
    let mut free = Problem::new();
    (0..7).for_each(|v| {
        free.var(1 + v % 3, v / 2);
    });
    assert_eq!(solve(&free, Lambda::ZERO).ways, [0; 7]);
}

#[test]
fn a_cut_fills_the_budget() {
    // Each of 20 units takes 10 ps and 10 bytes, or 20 ps.
    let mut p = Problem::new();
    let x: Vec<Var> = (0..20).map(|unit| p.var(2, unit)).collect();
    let own = vec![Cost { time: 20, memory: 0 }, Cost { time: 10, memory: 10 }];
    let own = p.table(&x[..1], own);
    x[1..].iter().for_each(|&v| p.again(&[v], own));
    let choice = within(&p, 57);
    assert_eq!((choice.cost.time, choice.cost.memory), (350, 50));
    assert_eq!((choice.bound, choice.lambda), (343, Lambda::new(200, 200)));
    assert_eq!(choice.solves, 3);
}

#[test]
fn the_best_of_all_cuts() {
    let mut r = Random(6);
    let mut found = 0;
    for i in 0..600 {
        let g = match i % 2 {
            0 => Given::random(&mut r, 6, 3),
            _ => Given::chain(&mut r, 5, 3, true),
        };
        let any = |r: &mut Random| g.ways.iter().map(|&n| r.index(n)).collect::<Vec<_>>();
        let (a, b) = (any(&mut r), any(&mut r));
        let budget = g.cost(&a).memory.min(g.cost(&b).memory).min(1 << 60) + r.below(2);
        let mixes = (0..=50).map(|n| {
            let way = |v: usize| if g.units[v] < n { a[v] } else { b[v] };
            g.cost(&(0..a.len()).map(way).collect::<Vec<_>>())
        });
        let fit = mixes.filter(|c| c.allowed() && c.memory <= budget);
        let best = fit.min_by_key(|c| (c.time, c.memory));
        let cut = cut(&g.problem(), &a, &b, budget);
        assert_eq!(cut.as_ref().map(|c| c.1), best);
        if let Some((ways, cost)) = cut {
            assert_eq!(g.cost(&ways), cost);
            found += i32::from(ways != a && ways != b);
        }
    }
    assert!(found > 20, "{found}");
}

#[test]
fn beyond_the_limit_an_answer_and_a_bound() {
    let mut r = Random(7);
    let (mut beyond, mut best, mut proved) = (0, 0, 0);
    for _ in 0..1000 {
        let (g, lambda) = (Given::random(&mut r, 6, 4), r.lambda());
        let mut p = g.problem();
        p.limit = [6, 20][r.index(2)];
        let (all, solved) = (g.all(), solve(&p, lambda));
        let least = all.iter().map(|a| score(lambda, a.1)).min().unwrap();
        assert!(solved.bound <= least && least <= solved.score);
        assert_eq!(score(lambda, g.cost(&solved.ways)), solved.score);
        assert_eq!(solve(&p, lambda), solved);
        let budget = all[r.index(all.len())].1.memory.min(1 << 60);
        let choice = within(&p, budget);
        assert_eq!(choice.fits, choice.cost.memory <= budget);
        let fit = all.iter().filter(|a| a.1.allowed() && a.1.memory <= budget);
        if let Some(time) = fit.map(|a| a.1.time).min() {
            assert!(choice.bound <= time && (!choice.fits || time <= choice.cost.time));
        } else {
            assert!(!choice.fits);
        }
        if solved.exact {
            assert_eq!(solved.bound, solved.score);
            continue;
        }
        assert!(best_with(&p, lambda, Var(0)).is_none_or(|b| b.contains(&least)));
        beyond += 1;
        best += i32::from(solved.score == least);
        proved += i32::from(solved.bound == least);
        // No pair that shares a table gains.
        for (vars, _) in g.tables.iter().filter(|_| solved.cost.allowed()) {
            let pairs = vars.iter().flat_map(|&a| vars.iter().map(move |&b| (a, b)));
            for (a, b) in pairs {
                let mut other = solved.ways.clone();
                for way in 0..g.ways[a] * g.ways[b] {
                    (other[a], other[b]) = (way % g.ways[a], way / g.ways[a]);
                    let gain = score(lambda, g.cost(&other)).cmp(&solved.score);
                    assert!(a == b || gain.then(other.cmp(&solved.ways)).is_ge());
                }
            }
        }
    }
    assert!(beyond > 250 && best * 100 > beyond * 95, "{best} of {beyond}");
    assert!(proved * 100 > beyond * 25, "{proved} of {beyond}");
}

#[test]
fn costs_as_large_as_they_come() {
    let large = Cost { time: (1 << 50) - 1, memory: (1 << 50) - 1 };
    let most = Cost { time: (1 << 62) - 1, memory: (1 << 62) - 1 };
    for (cost, count) in [(large, 4096), (most, 1)] {
        let mut p = Problem::new();
        let x: Vec<Var> = (0..=count).map(|v| p.var(2, v / 100)).collect();
        let table = p.table(&x[..2], vec![cost; 4]);
        (1..count).for_each(|i| p.again(&[x[i], x[i + 1]], table));
        let sum = |n: u64| n * count as u64;
        for lambda in [Lambda::ZERO, Lambda::MEMORY, Lambda::new(u64::MAX, u64::MAX)] {
            let solved = solve(&p, lambda);
            let total = Cost { time: sum(cost.time), memory: sum(cost.memory) };
            assert_eq!((solved.cost, solved.score), (total, score(lambda, total)));
            assert!(solved.score < NEVER);
        }
        assert!(!within(&p, sum(cost.memory) - 1).fits);
        let choice = within(&p, sum(cost.memory));
        assert_eq!((choice.fits, choice.bound), (true, sum(cost.time)));
    }
    // More is not allowed, neither at once nor as a sum.
    let half = Cost { time: 1 << 61, memory: 0 };
    let (mut p, more) = (Problem::new(), half.plus(half));
    let x = p.var(1, 0);
    assert!(half.allowed() && !more.allowed() && Lambda::ZERO.score(more) == NEVER);
    let table = p.table(&[x], vec![half]);
    assert!(solve(&p, Lambda::ZERO).cost.allowed());
    p.again(&[x], table);
    assert!(!solve(&p, Lambda::ZERO).cost.allowed());
    // A byte outweighs much time where there is no other way.
    let mut p = Problem::new();
    let x = p.var(2, 0);
    let slow = Cost { time: 1 << 56, memory: 0 };
    p.table(&[x], vec![Cost { time: 0, memory: 1 }, slow]);
    assert_eq!((within(&p, 0).cost, within(&p, 0).fits), (slow, true));
}

#[test]
fn much_that_is_not_allowed() {
    let mut p = Problem::new();
    let x: Vec<Var> = (0..3).map(|v| p.var(2, v)).collect();
    let (free, some) = (Cost::ZERO, Cost { time: 1, memory: 0 });
    let one = p.table(&x[..1], vec![Cost::NEVER, free]);
    let two = p.table(&x[..2], vec![Cost::NEVER, Cost::NEVER, some, some]);
    // So many that 2^120 each is 2^128.
    for _ in 0..256 {
        p.again(&x[..1], one);
        p.again(&x[1..], two);
    }
    for limit in [1, 1 << 22] {
        p.limit = limit;
        let solved = solve(&p, Lambda::MEMORY);
        assert_eq!((solved.ways, solved.score, solved.bound), (vec![1, 1, 0], 257, 257));
    }
    p.table(&x[2..], vec![Cost::NEVER; 2]);
    assert!(!solve(&p, Lambda::ZERO).cost.allowed());
    assert!(!within(&p, u64::MAX).fits);
}

#[test]
#[should_panic(expected = "entries of a table")]
fn a_table_has_an_entry_for_each_combination() {
    let mut p = Problem::new();
    let x = [p.var(2, 0), p.var(3, 0)];
    p.table(&x, vec![Cost::ZERO; 7]);
}

#[test]
#[should_panic(expected = "a variable twice")]
fn a_table_has_a_variable_once() {
    let mut p = Problem::new();
    let x = p.var(2, 0);
    p.table(&[x, x], vec![Cost::ZERO; 4]);
}
