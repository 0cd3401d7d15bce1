//! Random meshes of one to three axes, and layouts over them.

use super::Draw;
use super::drawn::ROWS;

/// Axes that somebody may call so; the rows of the batch are cut over the first two.
const NAMES: [&str; 8] = ["dp_replicate", "dp_shard", "cp", "tp", "a", "b", "c", "pp"];

/// The axes of a mesh, and the parts of them that layouts are asked over.
#[derive(Clone)]
pub struct Axes {
    pub mesh: Vec<(String, usize)>,
    parts: Vec<(String, usize)>,
}

impl Axes {
    /// At most `most` parts.
    pub fn draw(draw: &mut Draw, most: usize) -> Axes {
        let mut names = NAMES.to_vec();
        let (mut mesh, mut parts, mut ranks) = (vec![], vec![], 1);
        for _ in 0..1 + draw.below(3) {
            let at = draw.below(names.len());
            let name = names.remove(at);
            let size = if name == "pp" { 2 } else { [2, 2, 3, 4][draw.below(4)] };
            let rows = name.starts_with("dp_");
            // Rows are cut evenly.
            if ranks * size > 12 || (rows && ROWS % (ranks * size) != 0) {
                continue;
            }
            if name != "pp" && parts.len() == most {
                continue;
            }
            ranks *= size;
            mesh.push((name.to_string(), size));
            if name == "pp" {
                // It cuts the model, and no value.
            } else if size == 4 && !rows && parts.len() + 1 < most && draw.below(2) == 0 {
                parts.extend([1, 2].map(|pre| (format!("{name}:({pre})2"), 2)));
            } else {
                parts.push((name.to_string(), size));
            }
        }
        Axes { mesh, parts }
    }

    /// How many ranks have rows of their own.
    pub fn rows(&self) -> usize {
        self.mesh.iter().filter(|a| a.0.starts_with("dp_")).map(|a| a.1).product()
    }

    /// What is asked of a tensor: every part for one of its dims or none. Of a dim, all but the last cut it evenly.
    pub fn asked(&self, draw: &mut Draw, sizes: &[usize]) -> String {
        let mut of: Vec<Vec<&str>> = vec![vec![]; sizes.len()];
        let mut left = sizes.to_vec();
        let mut parts: Vec<&(String, usize)> = self.parts.iter().collect();
        draw.shuffle(&mut parts);
        for (name, n) in parts {
            let at = draw.below(sizes.len() + 1);
            if at < sizes.len() && left[at] > 0 {
                of[at].push(name);
                left[at] = if left[at] % n == 0 { left[at] / n } else { 0 };
            }
        }
        let mut one = |names: &Vec<&str>| match (names.is_empty(), draw.below(3) == 0) {
            (true, open) => if open { "?" } else { "-" }.to_string(),
            (false, open) => names.join("*") + if open { "?" } else { "" },
        };
        let all: Vec<String> = of.iter().map(&mut one).collect();
        let later = ["", "", "p1"][draw.below(3)];
        format!(" @({}){later}", all.join(","))
    }
}
