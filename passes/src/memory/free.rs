//! Free places of a growing piece of memory: first fit.

use std::collections::BTreeMap;

/// Free blocks by offset; everything from `top` on is free.
#[derive(Default)]
pub(super) struct FreeList {
    blocks: BTreeMap<usize, usize>,
    top: usize,
}

impl FreeList {
    pub fn take(&mut self, size: usize) -> usize {
        let fit = self.blocks.iter().find(|b| *b.1 >= size).map(|(&o, &s)| (o, s));
        if let Some((o, s)) = fit {
            self.blocks.remove(&o);
            if s > size {
                self.blocks.insert(o + size, s - size);
            }
            return o;
        }
        // The last block may reach up to the top and be extended.
        let last =
            self.blocks.last_key_value().map(|(&o, &s)| (o, s)).filter(|(o, s)| o + s == self.top);
        let o = last.map_or(self.top, |(o, _)| o);
        if last.is_some() {
            self.blocks.remove(&o);
        }
        self.top = o + size;
        o
    }

    pub fn give(&mut self, mut offset: usize, mut size: usize) {
        if let Some((&o, &s)) =
            self.blocks.range(..offset).next_back().filter(|(o, s)| **o + **s == offset)
        {
            self.blocks.remove(&o);
            (offset, size) = (o, s + size);
        }
        if let Some(s) = self.blocks.remove(&(offset + size)) {
            size += s;
        }
        self.blocks.insert(offset, size);
    }
}
