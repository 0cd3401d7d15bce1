//! Machines as data: what a datasheet says, and the few constants that a measurement must supply.

use serde::{Deserialize, Serialize};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::hardware::{Hardware, OwnProducts};
use shardc_ir::names::nearest;
use shardc_ir::types::DType;
use std::collections::BTreeMap;

/// Element type of a product's operands.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    F32,
    Bf16,
    F16,
    Fp8,
}

impl Precision {
    /// Its element type, if plans have it.
    fn dtype(self) -> Option<DType> {
        match self {
            Precision::F32 => Some(DType::F32),
            Precision::Bf16 => Some(DType::BF16),
            Precision::F16 => Some(DType::F16),
            Precision::Fp8 => None,
        }
    }

    /// As a plan and a file of a machine name it.
    pub fn name(self) -> &'static str {
        self.dtype().map_or("fp8", DType::name)
    }

    /// Bytes of an element.
    pub fn bytes(self) -> f64 {
        self.dtype().map_or(1.0, |d| d.bytes() as f64)
    }

    /// Of what stays out of fp8: activations between products, attention.
    pub fn wide(self) -> Precision {
        if self == Precision::Fp8 { Precision::Bf16 } else { self }
    }

    /// Of a product whose operands have this type; none of indices.
    pub fn of(dtype: DType) -> Option<Precision> {
        let all = [Precision::F32, Precision::Bf16, Precision::F16];
        all.into_iter().find(|p| p.dtype() == Some(dtype))
    }
}

/// Where a constant comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Provenance {
    /// On this machine.
    Measured,
    /// Fitted on published step times.
    Tables,
    /// Chosen before anything was measured.
    Prior,
}

/// A number that no datasheet has.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constant {
    pub value: f64,
    pub from: Provenance,
    /// Values that explain what was measured nearly as well; of a prior, what it may be.
    pub range: [f64; 2],
}

const fn prior(value: f64, range: [f64; 2]) -> Constant {
    Constant { value, from: Provenance::Prior, range }
}

/// The constants of a machine: shares of its peaks, and seconds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fit {
    /// Of the peak, by large products of full tiles.
    pub gemm: Constant,
    /// Of the bandwidth of memory, by kernels over rows.
    pub hbm: Constant,
    /// Of a rank's links in its domain, by collectives.
    pub link: Constant,
    /// Of its adapter.
    pub nic: Constant,
    /// Seconds of one step through the network.
    pub hop: Constant,
    /// Seconds of one launch.
    pub kernel: Constant,
    /// Seconds that each rank adds to a collective inside a domain.
    pub step: Constant,
}

/// Priors: of the size that such shares have on machines of these years, the same for all of them.
impl Default for Fit {
    fn default() -> Fit {
        Fit {
            gemm: prior(0.80, [0.45, 0.95]),
            hbm: prior(0.80, [0.50, 0.95]),
            link: prior(0.75, [0.40, 0.95]),
            nic: prior(0.80, [0.30, 0.95]),
            hop: prior(6e-6, [2e-6, 20e-6]),
            kernel: prior(4e-6, [1e-6, 10e-6]),
            step: prior(1.5e-6, [0.5e-6, 5e-6]),
        }
    }
}

/// Queries that one block of attention takes on a machine that says nothing of its own.
pub const QUERIES: f64 = 128.0;

/// Products by the compiler's own kernels on a device: those with an epilogue, and those of experts, which no library
/// takes over.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Epilogue {
    /// Bytes per second that the work on a result reads and writes, beside the result.
    pub speed: f64,
    /// As [`Device::short`] and [`Device::tiles`], of these products.
    #[serde(deserialize_with = "exactly_three")]
    pub short: [f64; 3],
    pub tiles: Vec<[f64; 3]>,
    /// As [`Fit::gemm`], by element type.
    pub gemm: BTreeMap<Precision, f64>,
}

/// A rank's machine, and those around it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    pub name: String,
    /// What people also call it, if that names no other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<String>,
    /// Machines of one chip share the constants that a measurement on one of them gave.
    pub chip: String,
    /// Processors that a tile of a product occupies.
    pub sms: u32,
    /// Bytes per second of its memory.
    pub hbm: f64,
    /// Bytes that programs may use.
    pub memory: u64,
    /// Devices behind one fast switch.
    pub domain: u32,
    /// Bytes per second to others of its domain, one direction.
    pub link: f64,
    /// Bytes per second of one network adapter, one direction.
    pub nic: f64,
    /// Adapters of a domain.
    pub nics_per_domain: u32,
    /// Watts that it may draw, if that is less than its chip is made for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<f64>,
    /// Watts for which the peaks hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub full_power: Option<f64>,
    /// Tiles of its products, if they are not those of GPUs: rows, columns, share of the peak.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tiles: Option<Vec<[f64; 3]>>,
    /// Lengths of rows, columns and the inner dim of which its products spend as much beside their arithmetic, if
    /// not as on GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "three")]
    pub short: Option<[f64; 3]>,
    /// Queries that a block of its attention takes, if not as many as on GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queries: Option<u32>,
    /// FLOPs in whose time its attention weighs a score (maximum, exponential, sum) beside its products.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weighing: Option<f64>,
    /// What its attention reaches backward of what it reaches forward, if not as much as on GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backward: Option<f64>,
    /// Collectives go on beside other work.
    #[serde(default = "yes")]
    pub overlaps: bool,
    /// FLOP/s without sparsity, by element type.
    pub peak: BTreeMap<Precision, f64>,
    /// Share of the peak that kernels of attention reach forward, by their generation; `own` that of the compiler's,
    /// if it is not that of `flash2`.
    pub attention: BTreeMap<String, f64>,
    /// Products with an epilogue and products of experts, if they are unlike other products.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epilogue: Option<Epilogue>,
    /// Where each number is from.
    pub source: BTreeMap<String, String>,
    #[serde(default)]
    pub fit: Fit,
}

fn yes() -> bool {
    true
}

/// Three numbers, and no more: of an array that is too long the rest would be left out.
pub(crate) fn exactly_three<'de, D: serde::Deserializer<'de>>(
    d: D,
) -> std::result::Result<[f64; 3], D::Error> {
    let all = Vec::<f64>::deserialize(d)?;
    let n = all.len();
    all.try_into().map_err(|_| serde::de::Error::invalid_length(n, &"three numbers"))
}

/// Three numbers that may be absent.
fn three<'de, D: serde::Deserializer<'de>>(
    d: D,
) -> std::result::Result<Option<[f64; 3]>, D::Error> {
    exactly_three(d).map(Some)
}

/// The files of `cost/hardware`.
const FILES: [&str; 24] = [
    include_str!("../hardware/a100-40.toml"),
    include_str!("../hardware/a100-80.toml"),
    include_str!("../hardware/a100-80-ndm.toml"),
    include_str!("../hardware/a100-80-roce.toml"),
    include_str!("../hardware/b200.toml"),
    include_str!("../hardware/b300.toml"),
    include_str!("../hardware/cpu-zen5-2c.toml"),
    include_str!("../hardware/gb200-nvl72.toml"),
    include_str!("../hardware/gb300-nvl72.toml"),
    include_str!("../hardware/h100-96-500w.toml"),
    include_str!("../hardware/h100-pcie.toml"),
    include_str!("../hardware/h100-sxm.toml"),
    include_str!("../hardware/h20.toml"),
    include_str!("../hardware/h200.toml"),
    include_str!("../hardware/h800.toml"),
    include_str!("../hardware/l40s.toml"),
    include_str!("../hardware/mi300x.toml"),
    include_str!("../hardware/mi325x.toml"),
    include_str!("../hardware/mi355x.toml"),
    include_str!("../hardware/rtx-3090.toml"),
    include_str!("../hardware/rtx-4090.toml"),
    include_str!("../hardware/rtx-5090.toml"),
    include_str!("../hardware/tpu-v5p.toml"),
    include_str!("../hardware/v100-32.toml"),
];

/// The names that begin with a word, else those that are near.
fn meant<'a>(word: &str, names: &'a [String]) -> Vec<&'a str> {
    let all = || names.iter().map(String::as_str);
    let begin: Vec<&str> = all().filter(|n| word.len() > 1 && n.starts_with(word)).collect();
    if begin.is_empty() { nearest(word, all(), 3) } else { begin }
}

impl Device {
    /// The machines that come with the compiler, by name.
    ///
    /// # Panics
    /// If a file of ours is wrong, which a test would see.
    pub fn known() -> Vec<Device> {
        let read = |text: &&str| Device::parse(text).expect("our files of machines are right");
        FILES.iter().map(read).collect()
    }

    /// True if it has a driver's context and NCCL's buffers beside a plan, as GPUs have.
    pub fn is_gpu(&self) -> bool {
        // On processors that were measured no time is hidden: their cores move the data.
        self.overlaps && !["tpu", "zen"].iter().any(|c| self.chip.starts_with(c))
    }

    /// True if the share of its peak that products reach is a guess, and so is every price.
    pub fn is_guessed(&self) -> bool {
        self.fit.gemm.from == Provenance::Prior
    }

    /// Its name, and what people also call it.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.name).chain(&self.also).map(String::as_str)
    }

    /// The machine of a name, in letters of any case.
    ///
    /// # Errors
    /// `device` lists those that are known.
    pub fn named(name: &str) -> Result<Device> {
        let all = Device::known();
        let names: Vec<String> = all.iter().map(|d| d.name.clone()).collect();
        let is = |d: &Device| d.names().any(|n| n.eq_ignore_ascii_case(name));
        all.into_iter().find(is).ok_or_else(|| {
            let short: String = name.chars().take(40).collect();
            let d = Diag::new("device", format!("unknown machine `{short}`"))
                .rule("a machine has a name, or is a TOML file");
            let d = match meant(&short.to_lowercase(), &names)[..] {
                [] => d,
                ref near => d.help(format!("did you mean {}?", near.join(" or "))),
            };
            d.help(format!("one of {}", names.join(", ")))
        })
    }

    /// Reads a machine.
    ///
    /// # Errors
    /// `device` if the text is none, or has numbers that cannot be.
    pub fn parse(text: &str) -> Result<Device> {
        let read: std::result::Result<Device, _> = toml::from_str(text);
        let device = read.map_err(|e| {
            Diag::new("device", e.message().to_string())
                .help("begin with a file of cost/hardware, or name a machine")
        })?;
        device.checked()
    }

    fn checked(self) -> Result<Device> {
        let f = &self.fit;
        let counts = [("sms", self.sms), ("domain", self.domain), ("nics", self.nics_per_domain)];
        let counts = counts.into_iter().chain(self.queries.map(|n| ("queries", n)));
        let speeds = [("hbm", self.hbm), ("memory", self.memory as f64), ("link", self.link)];
        let speeds = speeds.into_iter().chain([("nic", self.nic)]);
        let powers = [("power", self.power), ("full_power", self.full_power)];
        let powers = powers.into_iter().filter_map(|(n, x)| Some((n, x?)));
        let shares = [("gemm", f.gemm), ("hbm", f.hbm), ("link", f.link), ("nic", f.nic)];
        let shares = shares.into_iter().map(|(n, c)| (n, c.value));
        let positive = speeds
            .chain(counts.map(|(n, x): (&str, u32)| (n, f64::from(x))))
            .chain(powers)
            .chain(self.peak.values().map(|&x| ("peak", x)));
        let own = || self.epilogue.iter();
        let tiles = self.tiles.iter().chain(own().map(|e| &e.tiles)).flatten().flatten();
        let sides = tiles.map(|&x| ("tiles", x)).chain(self.backward.map(|x| ("backward", x)));
        let sides = sides.chain(own().map(|e| ("epilogue.speed", e.speed)));
        let bad =
            positive.chain(shares.clone()).chain(sides).find(|x| !(x.1.is_finite() && x.1 > 0.0));
        let over = shares.chain(self.attention.values().map(|&x| ("attention", x)));
        let over = over.chain(own().flat_map(|e| e.gemm.values()).map(|&x| ("gemm", x)));
        let over = over.into_iter().find(|x| !(x.1 > 0.0 && x.1 <= 1.0));
        let times = [("hop", f.hop.value), ("kernel", f.kernel.value), ("step", f.step.value)];
        let lengths = self.short.into_iter().chain(own().map(|e| e.short)).flatten();
        let lengths = lengths.map(|x| ("short", x));
        let lengths = lengths.chain(self.weighing.map(|x| ("weighing", x)));
        let mut times = times.into_iter().chain(lengths);
        let early = times.find(|x| !(x.1.is_finite() && x.1 >= 0.0));
        match bad.or(over).or(early) {
            None => Ok(self),
            Some((name, x)) => Err(Diag::new("device", format!("`{name}` is {x}"))
                .rule("speeds and counts are positive, shares at most 1, times at least 0")
                .help(format!("give {name} a number that there is"))),
        }
    }

    /// The part of its peaks that its power allows: as power goes with the clock where voltage is at
    /// its least.
    fn clock(&self) -> f64 {
        match (self.power, self.full_power) {
            (Some(has), Some(wants)) => (has / wants).min(1.0),
            _ => 1.0,
        }
    }

    /// FLOP/s at the clock that its power allows.
    ///
    /// # Errors
    /// `device` if it has no such products.
    pub fn peak(&self, p: Precision) -> Result<f64> {
        let peak = self.peak.get(&p).ok_or_else(|| {
            Diag::new("device", format!("{} has no products of {p:?}", self.name).to_lowercase())
                .rule("a machine computes in the element types of its table `peak`")
                .help("use another element type, or add its peak")
        })?;
        Ok(peak * self.clock())
    }

    /// Queries that a block of attention takes.
    pub fn block(&self) -> f64 {
        self.queries.map_or(QUERIES, f64::from)
    }

    /// Bytes per second that a kernel over rows reaches.
    pub fn memory_speed(&self) -> f64 {
        self.hbm * self.fit.hbm.value
    }

    /// Bytes per second that collectives reach in a domain.
    pub fn link_speed(&self) -> f64 {
        self.link * self.fit.link.value
    }

    /// Bytes per second of the network that each rank of a domain has, if all use it.
    pub fn nic_speed(&self) -> f64 {
        let each = f64::from(self.nics_per_domain) / f64::from(self.domain);
        self.nic * each.min(1.0) * self.fit.nic.value
    }

    /// Ranks of each domain that a job of so many takes: as many in each, if they are at least half of those there are (64 of
    /// the 72 of an NVL72), so that no group of ranks that fits a domain lies in two.
    pub fn ranks_of_domain(&self, world: usize) -> usize {
        let all = (self.domain as usize).max(1);
        if world <= all {
            return all;
        }
        (all.div_ceil(2)..=all).rev().find(|n| world.is_multiple_of(*n)).unwrap_or(all)
    }

    /// Numbers that [`Device::with`] changes.
    pub const NUMBERS: [&str; 5] = ["hbm", "link", "nic", "memory", "domain"];

    /// The number that a name means: its own, or what people also call it.
    pub fn number(name: &str) -> &str {
        match name {
            "ib" | "net" | "network" => "nic",
            "nvlink" => "link",
            other => other,
        }
    }

    /// With one number changed, as in `nic=100`: GB/s of hbm, link and nic, bytes of memory, counts.
    ///
    /// # Errors
    /// `device` if there is no such number, or it cannot be that.
    pub fn with(mut self, name: &str, value: f64) -> Result<Device> {
        match name {
            "hbm" => self.hbm = value * 1e9,
            "link" => self.link = value * 1e9,
            "nic" => self.nic = value * 1e9,
            "memory" => self.memory = value as u64,
            "domain" => {
                // As many adapters for each rank as before.
                let each = f64::from(self.nics_per_domain) / f64::from(self.domain);
                self.domain = value as u32;
                self.nics_per_domain = (each * value).ceil() as u32;
            }
            _ => {
                let short: String = name.chars().take(40).collect();
                return Err(Diag::new("device", format!("a machine has no number `{short}`"))
                    .help("one of hbm, link, nic (GB/s), memory, domain"));
            }
        }
        self.source.insert(name.into(), "what if".into());
        self.checked()
    }

    /// What choices inside passes are priced with: the speeds that are reached, with the link of each
    /// axis of a mesh, whose axes are from outer to inner.
    ///
    /// # Errors
    /// `device` if it has no products of this type.
    pub fn hardware(&self, axes: &[(String, usize)], p: Precision) -> Result<Hardware> {
        let mut links = BTreeMap::new();
        let mut stride = 1;
        for (name, size) in axes.iter().rev() {
            let inside = stride * size <= self.domain as usize;
            let speed = if inside { self.link_speed() } else { self.nic_speed() };
            links.insert(name.clone(), speed);
            stride *= size;
        }
        let (start, peak) = (self.fit.kernel.value, self.peak(p)?);
        Hardware {
            link: self.nic_speed(),
            links,
            latency: self.fit.hop.value,
            memory: self.memory_speed(),
            flops: peak * self.fit.gemm.value,
            start,
            line: Hardware::default().line,
            own: self.epilogue.as_ref().map(|e| OwnProducts {
                flops: peak * e.gemm.get(&p).copied().unwrap_or(self.fit.gemm.value),
                memory: e.speed,
            }),
        }
        .checked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_take_as_many_ranks_of_each_domain() {
        let rack = Device::named("gb200").expect("known");
        let of = |world| rack.ranks_of_domain(world);
        assert_eq!(
            [8, 72, 128, 144, 256, 192, 131, 1000].map(of),
            [72, 72, 64, 72, 64, 64, 72, 50]
        );
        let node = Device::named("h100").expect("known");
        assert_eq!([8, 12, 16, 1024].map(|n| node.ranks_of_domain(n)), [8, 6, 8, 8]);
    }

    #[test]
    fn every_number_of_every_machine_says_where_it_is_from() {
        let all = Device::known();
        assert_eq!(all.len(), FILES.len());
        let names: Vec<&str> = all.iter().flat_map(Device::names).collect();
        assert!((1..names.len()).all(|i| !names[..i].contains(&names[i])), "{names:?}");
        for d in &all {
            for of in ["peak", "sms", "hbm", "memory", "link", "nic"] {
                assert!(d.source.contains_key(of), "{}: {of}", d.name);
            }
            assert_eq!(d.power.is_some(), d.full_power.is_some(), "{}", d.name);
            assert_eq!(Device::named(&d.name).as_ref(), Ok(d));
        }
    }

    #[test]
    fn hostile_files_get_a_diagnostic() {
        let good = FILES[1];
        let epilogue = |speed: &str, short: &str| {
            let tiles = "tiles = [[1.0, 1.0, 1.0]]\ngemm = { bf16 = 0.5 }";
            format!("[epilogue]\nspeed = {speed}\nshort = {short}\n{tiles}\n[source]")
        };
        let text = good.replace("[source]", &epilogue("1e12", "[1.0, 2.0, 3.0]"));
        assert!(Device::parse(&text).is_ok());
        let swaps: [(&str, &str); 14] = [
            ("hbm = 2039e9", "hbm = 0"),
            ("hbm = 2039e9", "hbm = nan"),
            ("hbm = 2039e9", "hmb = 2039e9"),
            ("sms = 108", "sms = -1"),
            ("flash1 = 0.45", "flash1 = 2.0"),
            ("nic = 25e9", "nic = \"fast\""),
            ("hbm = 2039e9", "hbm = 2039e9\nshort = 160.0"),
            ("hbm = 2039e9", "hbm = 2039e9\nshort = [1.0, 2.0]"),
            ("hbm = 2039e9", "hbm = 2039e9\nshort = [1.0, 2.0, 3.0, 4.0]"),
            ("hbm = 2039e9", "hbm = 2039e9\nshort = [1.0, -2.0, 3.0]"),
            ("hbm = 2039e9", "hbm = 2039e9\nbackward = 0.0"),
            ("[source]", &epilogue("1e12", "[1.0, 2.0]")),
            ("[source]", &epilogue("0.0", "[1.0, 2.0, 3.0]")),
            ("[source]", &epilogue("1e12", "[1.0, 2.0, -3.0]")),
        ];
        let short = good.replace("hbm = 2039e9", "hbm = 2039e9\nshort = [1.0, 2.0, 3.0]");
        assert_eq!(Device::parse(&short).map(|d| d.short), Ok(Some([1.0, 2.0, 3.0])));
        for (from, to) in swaps {
            assert!(good.contains(from), "{from}");
            let d = Device::parse(&good.replace(from, to)).expect_err(to);
            assert_eq!(d.code, "device", "{to}");
        }
        assert_eq!(Device::named("abacus").expect_err("no machine").code, "device");
    }

    #[test]
    fn axes_inside_a_domain_have_its_links() {
        let d = Device::named("h100-sxm").expect("known");
        let axes = [("dp".to_string(), 4), ("tp".to_string(), 8)];
        let hw = d.hardware(&axes, Precision::Bf16).expect("has bf16");
        assert_eq!(hw.link_of("tp"), d.link_speed());
        assert_eq!(hw.link_of("dp"), d.nic_speed());
        assert!(Device::named("v100-32").expect("known").peak(Precision::Fp8).is_err());
    }

    #[test]
    fn a_machine_that_is_meant_is_named() {
        let help = |name: &str| Device::named(name).expect_err("no machine").help[0].clone();
        assert_eq!(help("h100-smx"), "did you mean h100-sxm?");
        assert_eq!(
            help("A100"),
            "did you mean a100-40 or a100-80 or a100-80-ndm or a100-80-roce?",
            "a GPU of two sizes is not guessed"
        );
        assert_eq!(Device::named("H100").expect("known").name, "h100-sxm");
        assert_eq!(Device::named("H100-SXM").expect("known").name, "h100-sxm");
        assert_eq!(help("mi300"), "did you mean mi300x?");
        assert!(help("abacus").starts_with("one of a100-40, "));
    }
}
