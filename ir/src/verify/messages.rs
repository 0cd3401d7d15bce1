//! What is said of an op that is wrong: by the names of its operands, and with the line that would be right.

use super::*;

impl Checker<'_> {
    /// A collective before ranks have programs: refused in a source, else only its shape counts.
    pub(super) fn early_collective(
        &self,
        n: &Node,
        ins: &[&Type],
        outs: &[&Type],
        p: &mut Problems,
    ) {
        let op = n.op.mnemonic();
        if self.phase == Phase::Source {
            return p.push(self.layer(n), || {
                self.at_node("phase", n, &[], format!("`{op}` in a program for one device"))
                    .rule("a source program has no collectives")
                    .help(format!("take `{op}` out: collectives follow from the shardings"))
            });
        }
        if n.ins.len() != n.outs.len() || n.ins.is_empty() {
            return p.push(self.layer(n), || {
                let m = format!("`{op}` has {} operands and {} results", n.ins.len(), n.outs.len());
                self.at_node("arity", n, &[], m).help(format!("name {} results", n.ins.len()))
            });
        }
        for ((t, o), own) in ins.iter().zip(&n.outs).zip(outs) {
            if t != own {
                p.push(self.layer(n), || self.wrong_result(n, *o, t, own));
            }
        }
    }

    pub(super) fn type_error(&self, n: &Node, e: &TypeError) -> Diag {
        let (message, named) = self.name_operands(n, &e.message);
        let show: Vec<usize> = match named.is_empty() {
            true => (0..n.ins.len().min(4)).collect(),
            false => named.iter().copied().collect(),
        };
        let help = self.name_operands(n, &e.help).0;
        let m = format!("`{}`: {message}", n.op.mnemonic());
        let mut d = self.at_node(e.code, n, &show, m).rule(self.rule_text(n)).help(help);
        // Of few operands all are shown: the others are what this one does not fit.
        let few = if n.ins.len() <= 3 { (0..n.ins.len()).collect() } else { show };
        for i in few {
            d = d.why(self.origin(n, i));
        }
        d
    }

    /// Replaces `operand 1` by the operand's name.
    pub(super) fn name_operands(&self, n: &Node, text: &str) -> (String, BTreeSet<usize>) {
        let (mut out, mut named) = (String::new(), BTreeSet::new());
        let mut rest = text;
        while let Some(at) = rest.find("operand ") {
            let tail = &rest[at + "operand ".len()..];
            let len = tail.bytes().take_while(u8::is_ascii_digit).count();
            let index = tail[..len].parse::<usize>().ok().filter(|&i| i < n.ins.len());
            out.push_str(&rest[..at]);
            match index {
                Some(i) => {
                    named.insert(i);
                    out.push_str(&format!("`{}`", self.f.name(n.ins[i])));
                    rest = &tail[len..];
                }
                None => {
                    out.push_str("operand ");
                    rest = tail;
                }
            }
        }
        (out + rest, named)
    }

    /// Type of an operand and where it comes from.
    pub(super) fn origin(&self, n: &Node, i: usize) -> String {
        let v = n.ins[i];
        let names = n.op.operands();
        let which = names.get(i).map_or(String::new(), |o| format!(", operand `{o}`,"));
        let from = match self.made[v] {
            Maker::Arg => "an argument".to_string(),
            Maker::None => "not defined yet".to_string(),
            Maker::Node(k) => {
                let maker = &self.f.nodes[k as usize];
                format!("made by `{}`", node_text(self.mesh, self.f, maker).text)
            }
        };
        format!("`{}`{which} is {}, {from}", self.f.name(v), self.type_of(v))
    }

    /// The letter rule, or what a collective does.
    pub(super) fn rule_text(&self, n: &Node) -> String {
        let ins: Vec<&Type> = n.ins.iter().map(|&v| self.f.ty(v)).collect();
        let ranks: Vec<usize> = ins.iter().map(|t| t.rank()).collect();
        if n.op.layout().is_none() && n.op.def().accepts(&ins).is_ok() {
            return n.op.def().rule(&ranks).to_string();
        }
        let doc = DOCS.iter().find(|d| d.0 == n.op.mnemonic()).map_or("", |d| d.1);
        doc.split_whitespace().collect::<Vec<_>>().join(" ").trim_end_matches('.').to_string()
    }

    pub(super) fn wrong_result(&self, n: &Node, out: Value, made: &Type, declared: &Type) -> Diag {
        let (made_text, got) = (type_text(self.mesh, made), type_text(self.mesh, declared));
        let m = format!(
            "`{}` makes `{}` a {made_text}, but it is declared {got}",
            n.op.mnemonic(),
            self.f.name(out)
        );
        let all: Vec<usize> = (0..n.ins.len().min(4)).collect();
        let mut d = self.at_node("result-type", n, &all, m).rule(self.rule_text(n));
        for i in all {
            d = d.why(self.origin(n, i));
        }
        d.help(match bridge(self.mesh, made, declared) {
            Some(step) => format!("declare `{made_text}`, or insert `{step}` after this op"),
            None => format!("declare `{made_text}`"),
        })
    }
}
