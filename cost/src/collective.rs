//! Seconds of an exchange between ranks, by the formulas of `docs/cost.md`.

use crate::device::Device;

/// Ranks after which an all_to_all starts no more messages at once.
const MESSAGES: f64 = 64.0;

/// Share of its domain's links that one pair of ranks gets.
const PAIR: f64 = 0.5;

/// Ranks of a group, and where they are.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Group {
    pub size: f64,
    /// Ranks of it in each fast domain.
    pub per_domain: f64,
}

impl Group {
    /// A group whose neighbours are `stride` ranks apart, on this device.
    pub fn new(d: &Device, stride: usize, size: usize) -> Group {
        let near = (d.domain as usize / stride.max(1)).clamp(1, size.max(1));
        // Domains that hold equal parts.
        let near = (1..=near).rev().find(|k| size % k == 0).unwrap_or(1);
        Group { size: size as f64, per_domain: near as f64 }
    }

    /// Fast domains that it reaches over.
    pub fn domains(self) -> f64 {
        self.size / self.per_domain
    }
}

/// What ranks do together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    /// Every rank has something for every other.
    AllToAll,
}

/// Seconds of a collective. `bytes` are those of the whole tensor: of an all_gather its result, of a
/// reduce_scatter its operand, of an all_to_all what one rank has for all.
pub fn seconds(d: &Device, kind: Kind, group: Group, bytes: f64) -> f64 {
    let (n, k, domains) = (group.size, group.per_domain, group.domains());
    if n <= 1.0 || bytes <= 0.0 {
        return 0.0;
    }
    let (hop, step) = (d.fit.hop.value, d.fit.step.value);
    if kind == Kind::AllToAll {
        return all_to_all(d, group, bytes, bytes);
    }
    let passes = if kind == Kind::AllReduce { 2.0 } else { 1.0 };
    let moved = passes * bytes * (n - 1.0) / n;
    if domains <= 1.0 {
        return moved / d.link_speed() + step * (n - 1.0);
    }
    let speed = d.link_speed().min(k * d.nic_speed());
    let steps = match kind {
        Kind::AllReduce => 3.0 * n.log2(),
        Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll => (domains - 1.0) + 0.2 * (n - 1.0),
    };
    moved / speed + hop * steps + step * (k - 1.0)
}

/// Seconds of an all_to_all in which a rank has `near` bytes for its domain's links, and `far` of them,
/// or fewer copies of the same, for all domains.
pub fn all_to_all(d: &Device, group: Group, far: f64, near: f64) -> f64 {
    let (n, k, domains) = (group.size, group.per_domain, group.domains());
    if n <= 1.0 || near <= 0.0 {
        return 0.0;
    }
    let step = d.fit.step.value;
    let inside = near * (k - 1.0) / n / d.link_speed();
    if domains <= 1.0 {
        return inside + step * (n - 1.0);
    }
    let outside = far * (domains - 1.0) / domains / d.nic_speed();
    outside.max(inside) + d.fit.hop.value * n.min(MESSAGES) / 2.0 + step * (k - 1.0)
}

/// Seconds of a transfer to the rank `stride` further on.
pub fn send(d: &Device, stride: usize, bytes: f64) -> f64 {
    if bytes <= 0.0 {
        return 0.0;
    }
    match stride < d.domain as usize {
        true => bytes / (d.link_speed() * PAIR).max(d.nic_speed()) + d.fit.hop.value,
        false => bytes / d.nic_speed() + d.fit.hop.value,
    }
}

/// What is seen of an exchange that goes on behind other work: never less than a part of it.
pub fn exposed(seconds: f64, behind: f64) -> f64 {
    exposed_at_least(LEAST, seconds, behind)
}

/// The same, with the part of it that is always seen.
pub fn exposed_at_least(part: f64, seconds: f64, behind: f64) -> f64 {
    (seconds - behind.max(0.0)).max(part * seconds)
}

/// The part of an exchange that no work hides.
const LEAST: f64 = 0.15;

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Kind; 4] =
        [Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter, Kind::AllToAll];

    #[test]
    fn doubling_the_network_never_slows_and_over_domains_helps() {
        for d in Device::known() {
            let twice = d.clone().with("nic", 2.0 * d.nic / 1e9).expect("a speed");
            for kind in KINDS {
                for (stride, size) in [(1, 2), (1, 8), (1, 64), (8, 4), (8, 128), (4, 16)] {
                    let g = Group::new(&d, stride, size);
                    let time = |d| seconds(d, kind, g, 1e9);
                    assert!(time(&twice) <= time(&d), "{} {kind:?} {stride} {size}", d.name);
                }
            }
            assert!(send(&twice, d.domain as usize, 1e8) < send(&d, d.domain as usize, 1e8));
        }
    }

    /// Ranks in a domain are never further from each other than the same number across domains.
    #[test]
    fn a_group_inside_a_domain_is_never_dearer_than_one_across() {
        for d in Device::known() {
            for size in [2, 4, 8, 16, 64].into_iter().filter(|&n| n <= d.domain as usize) {
                let near = Group::new(&d, 1, size);
                assert_eq!(near.domains(), 1.0);
                for stride in [2, 4, 8, 32, 128] {
                    let far = Group::new(&d, stride, size);
                    for kind in KINDS {
                        for bytes in [1e3, 1e6, 1e9] {
                            let (a, b) =
                                (seconds(&d, kind, near, bytes), seconds(&d, kind, far, bytes));
                            assert!(
                                a <= b * (1.0 + 1e-12),
                                "{} {kind:?} {size} {stride} {bytes}",
                                d.name
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn groups_are_split_into_equal_parts() {
        let d = Device::named("h100-sxm").expect("known");
        let of = |stride, size| {
            let g = Group::new(&d, stride, size);
            (g.per_domain, g.domains())
        };
        assert_eq!(of(1, 8), (8.0, 1.0));
        assert_eq!(of(1, 64), (8.0, 8.0));
        assert_eq!(of(8, 64), (1.0, 64.0));
        assert_eq!(of(4, 8), (2.0, 4.0));
        assert_eq!(of(1, 12), (6.0, 2.0));
    }

    #[test]
    fn an_all_reduce_is_a_scatter_and_a_gather() {
        let d = Device::named("a100-80").expect("known");
        let g = Group::new(&d, 1, 8);
        let of = |k| seconds(&d, k, g, 1e9);
        let both = of(Kind::ReduceScatter) + of(Kind::AllGather);
        // Its steps inside a domain are counted once.
        let steps = both - of(Kind::AllReduce);
        assert!((steps - d.fit.step.value * 7.0).abs() < 1e-9, "{steps}");
        assert_eq!(seconds(&d, Kind::AllReduce, Group::new(&d, 1, 1), 1e9), 0.0);
        assert_eq!(exposed(1.0, 0.4), 0.6);
        assert_eq!(exposed(1.0, 5.0), 0.15);
    }
}
