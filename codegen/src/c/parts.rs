//! The only row of a kernel, folded in parts.

use super::{StrideWriter, fold};
use shardc_ir::kernel::Stage;

impl StrideWriter<'_> {
    /// A task is a part of the row, whose folds it leaves; the one behind the others folds these, and writes
    /// what is made of them.
    pub(super) fn parts(&mut self, [walk, end]: &[Stage; 2], parts: usize) {
        let (k, left) = (self.k, self.k.operands());
        for &i in &walk.before {
            let line = self.vector(i, "1");
            self.line(2, &line);
        }
        self.begin(&walk.folds);
        self.line(2, &format!("if (task < {parts}) {{"));
        let bounds = Some(("start", "end"));
        self.walk(3, 0..1, |_| k.inner[0], bounds, &mut |w, depth, count| {
            w.elements(depth, walk, count);
        });
        for (slot, &f) in walk.folds.iter().enumerate() {
            let (at, whole) = (slot * parts, fold(self.fold(f).0)[2]);
            self.line(
                3,
                &format!("store_f32(m[{left}], {at} + task, 1, 1, all({whole}(acc{f})));"),
            );
        }
        self.line(3, "continue;");
        self.line(2, "}");
        self.walk(2, 0..1, |_| parts, None, &mut |w, depth, count| {
            for (slot, &f) in walk.folds.iter().enumerate() {
                let at = slot * parts;
                w.take(depth, f, &format!("load_f32(m[{left}], {at} + j, 1, {count})"), count);
            }
        });
        self.end(&walk.folds);
        for &i in &end.before {
            let line = self.vector(i, "1");
            self.line(2, &line);
        }
        for s in k.stores.iter().filter(|s| !k.stores_each(s)) {
            let line = self.store(s.value, s, "1");
            self.line(2, &line);
        }
    }
}
