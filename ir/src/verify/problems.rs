//! Problems found so far, each once for all layers that have it.

use super::*;

/// Problems found so far, each once for all layers that have it.
#[derive(Default)]
pub(super) struct Problems {
    pub told: Vec<(Diag, BTreeSet<u32>)>,
    seen: HashMap<String, usize>,
    found: usize,
}

impl Problems {
    pub fn push(&mut self, layer: Option<u32>, d: impl FnOnce() -> Diag) {
        self.found += 1;
        if self.found > MAX_FOUND {
            return;
        }
        let d = d();
        let key = without_layer(&d, layer.unwrap_or(u32::MAX));
        let next = self.told.len();
        let at = *self.seen.entry(key).or_insert(next);
        if at == next && next < MAX_TOLD {
            self.told.push((d, BTreeSet::new()));
        }
        if let Some((_, layers)) = self.told.get_mut(at) {
            layers.extend(layer);
        }
    }

    pub fn finish(self) -> Result<(), Vec<Diag>> {
        let one = |(d, layers): (Diag, BTreeSet<u32>)| match layers.len() {
            0 | 1 => d,
            2 => d.why("same in 1 other layer"),
            n => d.why(format!("same in {} other layers", n - 1)),
        };
        let diags: Vec<Diag> = self.told.into_iter().map(one).collect();
        if diags.is_empty() { Ok(()) } else { Err(diags) }
    }
}

/// A message with the layer's number, and those of its neighbours, taken out of names (`%l3.x`,
/// `%d_l3.x`) and out of the scope; sizes that happen to be equal to it stay.
fn without_layer(d: &Diag, layer: u32) -> String {
    let place = d.place.as_deref().unwrap_or("");
    let (head, picture) = Diag::pictured(place);
    let number = layer.to_string();
    let path: Vec<_> = head.split('.').map(|p| if p == number { "{i}" } else { p }).collect();
    let mut out = format!("{} {}", d.code, path.join("."));
    // The op, without the carets below it: longer numbers move them.
    for text in [&*d.message, picture.trim_start().lines().next().unwrap_or("")] {
        for (k, part) in text.split('%').enumerate() {
            out.push_str(if k > 0 { "%" } else { " " });
            let name = part.strip_prefix("d_").unwrap_or(part).strip_prefix('l');
            let len = name.map_or(0, |t| t.bytes().take_while(u8::is_ascii_digit).count());
            let digits = name.map_or("", |t| &t[..len]);
            match digits.parse::<i64>().map(|d| d - i64::from(layer)) {
                Ok(distance @ -1..=1) => {
                    let start = part.len() - name.map_or(0, str::len);
                    out.push_str(&format!(
                        "{}{{i{distance:+}}}{}",
                        &part[..start],
                        &part[start + len..]
                    ));
                }
                _ => out.push_str(part),
            }
        }
    }
    out
}
