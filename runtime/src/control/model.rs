//! A model of joining and ending: three processes, what is on its way between them, and one fault at any
//! moment. All interleavings are explored. It is written from `join.rs` and `ending.rs`, and has to be
//! changed with them; times are in it as order alone: what waits for a time happens when nothing
//! else can.

use std::collections::{BTreeMap, HashSet, VecDeque};

const N: usize = 3;

/// What one process sends to another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Said {
    Hello,
    Table,
    Gather,
    Share,
    Bye,
    Fail,
    Stop,
    Where,
    /// The connection has ended, and no more comes.
    End,
}

/// Where a process is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum At {
    /// It has not called process 0 yet; of process 0, it waits for all.
    Start,
    /// It has said hello.
    Called,
    Running,
    /// Its part is done, and it waits for all.
    Done,
    /// It has failed and told process 0, or was told to stop: it waits for the end of the connection.
    Failed,
    Stopped,
    /// All are done, and it ends what they share: over MPI, where all have to be there for that.
    Leaves,
    /// Process 0: it has told all to stop, and waits for where they are.
    Concludes,
    /// Process 0 is lost: it tells the process below, and waits for that to end.
    Pending,
    /// As the lowest that is left, it waits for the others.
    Gathers,
    /// It has ended, with a status.
    Ended(u8),
    /// Killed, or stopped for ever.
    Dead,
    Silent,
}

/// Ways in which one process may fail.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Fault {
    None,
    Kill,
    Silence,
    Error,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct ModelWorld {
    at: [At; N],
    /// By sender and receiver.
    wires: [[VecDeque<Said>; N]; N],
    /// Those of whom process 0 has a hello, a result, a goodbye, and where they are; those that have its goodbye,
    /// and that have begun to end what they share.
    came: u8,
    done: u8,
    left: u8,
    told: u8,
    freed: u8,
    ends: u8,
    /// Ranks end together, as those of MPI do; others each for itself.
    together: bool,
    /// Process 0 has told all that they are done.
    leaving: bool,
    fault: Fault,
    /// Messages that were printed.
    printed: u8,
    /// The fault came before all had joined.
    early: bool,
}

impl ModelWorld {
    fn new(fault: Fault, together: bool) -> ModelWorld {
        ModelWorld {
            at: [At::Start; N],
            wires: std::array::from_fn(|_| std::array::from_fn(|_| VecDeque::new())),
            came: 1,
            done: 0,
            left: 0,
            told: 0,
            freed: 0,
            ends: 0,
            together,
            leaving: false,
            fault,
            printed: 0,
            early: false,
        }
    }

    /// Whether what a process shares with the others can end.
    fn may_leave(&self) -> bool {
        !self.together || self.ends == 7
    }

    fn lives(&self, p: usize) -> bool {
        !matches!(self.at[p], At::Ended(_) | At::Dead | At::Silent)
    }
    fn send(&mut self, from: usize, to: usize, what: Said) {
        if !self.wires[from][to].contains(&Said::End) {
            self.wires[from][to].push_back(what);
        }
    }
    fn tell(&mut self, from: usize, what: Said) {
        match from {
            0 => (1..N).for_each(|p| self.send(0, p, what)),
            _ => self.send(from, 0, what),
        }
    }
    /// A process ends: all its connections do.
    fn end(&mut self, p: usize, at: At) {
        self.at[p] = at;
        (0..N).filter(|&q| q != p).for_each(|q| self.send(p, q, Said::End));
    }
    fn print(&mut self, p: usize, status: u8) {
        self.printed += 1;
        self.end(p, At::Ended(status));
    }

    /// Process 0 knows a cause.
    fn stop_all(&mut self) {
        if self.at[0] != At::Concludes {
            self.at[0] = At::Concludes;
            self.told = 0;
            self.tell(0, Said::Stop);
        }
    }

    /// Process 0 is lost, to a process that runs.
    fn succeed(&mut self, p: usize) {
        // It calls those below it; one that has ended, or does not answer, cannot be told.
        match (1..p).find(|&q| self.lives(q)) {
            Some(q) => {
                self.send(p, q, Said::Where);
                self.at[p] = At::Pending;
            }
            None => self.at[p] = At::Gathers,
        }
    }

    /// What a process makes of what it hears.
    fn hears(&mut self, p: usize, from: usize, what: Said) {
        let bit = 1 << from;
        let at = self.at[p];
        match (p, what) {
            (0, Said::Hello) => {
                self.came |= bit;
                if self.came == 7 && at == At::Start {
                    self.at[0] = At::Running;
                    self.tell(0, Said::Table);
                }
            }
            (_, Said::Table) => self.at[p] = At::Running,
            (0, Said::Gather) => {
                self.done |= bit;
                self.all_done();
            }
            (_, Said::Share) => {
                self.ends |= 1 << p;
                self.at[p] = At::Leaves;
            }
            (0, Said::Bye) => self.left |= bit,
            (_, Said::Bye) => self.freed |= 1 << p,
            (0, Said::Fail) => {
                self.told |= bit;
                let told = self.told;
                self.stop_all();
                self.told |= told;
            }
            (0, Said::Where) => self.told |= bit,
            (_, Said::Stop) => {
                self.tell(p, Said::Where);
                self.at[p] = At::Stopped;
            }
            (_, Said::Where) if self.lives(p) => self.told |= bit,
            (0, Said::End) => self.lost(from),
            (_, Said::End) if from == 0 => match at {
                At::Start | At::Called => {
                    // It goes on calling until its time is over.
                    self.at[p] = At::Start;
                }
                At::Leaves if self.freed & 1 << p != 0 => {}
                At::Running | At::Done | At::Leaves | At::Failed => self.succeed(p),
                At::Stopped => self.end(p, At::Ended(6)),
                _ => {}
            },
            // The one below has printed.
            (_, Said::End) if at == At::Pending && from < p => self.end(p, At::Ended(6)),
            _ => {}
        }
    }

    fn all_done(&mut self) {
        if self.done == 7 && self.at[0] == At::Done {
            self.leaving = true;
            self.tell(0, Said::Share);
            self.ends |= 1;
            self.at[0] = At::Leaves;
        }
    }

    /// Process 0 finds a process lost.
    fn lost(&mut self, p: usize) {
        match self.at[0] {
            At::Start => self.came &= !(1 << p),
            At::Running | At::Done | At::Leaves if self.left & 1 << p == 0 => {
                self.told |= 1 << p;
                let told = self.told;
                self.stop_all();
                self.told |= told;
            }
            At::Concludes => self.told |= 1 << p,
            _ => {}
        }
    }

    /// All worlds that may follow at once.
    fn next(&self) -> Vec<ModelWorld> {
        let mut all = vec![];
        let mut add = |change: &dyn Fn(&mut ModelWorld)| {
            let mut w = self.clone();
            change(&mut w);
            all.push(w);
        };
        for p in 0..N {
            if !self.lives(p) {
                continue;
            }
            match self.at[p] {
                At::Start if p > 0 && self.at[0] == At::Start => add(&|w| {
                    w.send(p, 0, Said::Hello);
                    w.at[p] = At::Called;
                }),
                At::Running => add(&|w| {
                    w.at[p] = At::Done;
                    match p {
                        0 => w.done |= 1,
                        _ => w.tell(p, Said::Gather),
                    }
                    w.all_done();
                }),
                At::Leaves if self.may_leave() => add(&|w| {
                    w.tell(p, Said::Bye);
                    w.end(p, At::Ended(0));
                }),
                At::Concludes if self.told | 1 == 7 => add(&|w| w.print(0, 6)),
                _ => {}
            }
            for from in (0..N).filter(|&q| !self.wires[q][p].is_empty()) {
                add(&|w| {
                    let what = w.wires[from][p].pop_front().expect("not empty");
                    w.hears(p, from, what);
                });
            }
            // Somebody has not joined, or not heard of it.
            let early = self.at[0] == At::Start || self.at.contains(&At::Called);
            match self.fault {
                Fault::None => {}
                // It may be killed when it has told some and not the others.
                Fault::Kill => (0..1 << N).for_each(|untold: u8| {
                    add(&|w| {
                        (w.fault, w.early) = (Fault::None, early);
                        (0..N).filter(|q| untold & 1 << q != 0).for_each(|q| {
                            w.wires[p][q].pop_back();
                        });
                        w.end(p, At::Dead);
                    });
                }),
                Fault::Silence => add(&|w| {
                    (w.fault, w.early) = (Fault::None, early);
                    w.at[p] = At::Silent;
                }),
                Fault::Error if matches!(self.at[p], At::Running | At::Done) => add(&|w| {
                    w.fault = Fault::None;
                    match p {
                        0 => w.stop_all(),
                        _ => {
                            w.tell(p, Said::Fail);
                            w.at[p] = At::Failed;
                        }
                    }
                }),
                Fault::Error => {}
            }
        }
        if all.is_empty() { self.after_a_while() } else { all }
    }

    /// What happens after a time in which nothing else does: the shortest wait first.
    fn after_a_while(&self) -> Vec<ModelWorld> {
        let of = |at: At| (0..N).find(|&p| self.at[p] == at);
        let mut w = self.clone();
        // ASKED, GATHERED, PRINTED, then the silence of one that has stopped, then that of the start.
        if self.at[0] == At::Concludes {
            w.print(0, 6);
        } else if let Some(p) = of(At::Gathers) {
            w.print(p, 6);
        } else if let Some(p) = of(At::Pending) {
            w.at[p] = At::Gathers;
        } else if let Some(p) = of(At::Stopped) {
            w.end(p, At::Ended(6));
        } else if let Some(p) = of(At::Silent).filter(|_| self.joined()) {
            w.at[p] = At::Dead;
            (0..N).filter(|&q| q != p).for_each(|q| w.send(p, q, Said::End));
        } else if let Some(p) = (0..N).find(|&p| matches!(self.at[p], At::Start | At::Called)) {
            w.print(p, 6);
        } else {
            return vec![];
        }
        vec![w]
    }

    /// Somebody listens to the others.
    fn joined(&self) -> bool {
        (0..N).any(|p| {
            let listens = [At::Running, At::Done, At::Leaves, At::Failed, At::Pending, At::Gathers];
            listens.contains(&self.at[p])
        })
    }

    /// What is wrong with a world in which nothing more happens; `None` if nothing is.
    fn wrong(&self) -> Option<String> {
        let left = |p: &usize| !matches!(self.at[*p], At::Dead | At::Silent);
        let alive: Vec<usize> = (0..N).filter(left).collect();
        let status = |p: &usize| match self.at[*p] {
            At::Ended(s) => Some(s),
            _ => None,
        };
        let all: Vec<Option<u8>> = alive.iter().map(status).collect();
        if all.contains(&None) {
            return Some(format!("waits for ever: {:?}", self.at));
        }
        let ended_well = all.iter().all(|s| *s == Some(0));
        let one = all.iter().all(|s| *s == all[0]);
        // Of a job that has not begun each says why it has not; of one whose work is done, those that have
        // not left when one is lost say that it was.
        let apart = self.early || self.leaving;
        let messages = if ended_well { self.printed == 0 } else { self.printed == 1 || apart };
        match (one || apart, messages) {
            (false, _) => Some(format!("statuses {all:?}")),
            (_, false) => Some(format!("{} messages, {:?}", self.printed, self.at)),
            _ => None,
        }
    }
}

/// All worlds that can be, and what is wrong with those at an end, how often.
fn explore(fault: Fault, together: bool) -> (usize, usize, BTreeMap<String, usize>) {
    let mut known = HashSet::new();
    let mut open = vec![ModelWorld::new(fault, together)];
    let (mut ends, mut wrong) = (0, BTreeMap::new());
    while let Some(w) = open.pop() {
        if !known.insert(w.clone()) {
            continue;
        }
        let next = w.next();
        if next.is_empty() {
            ends += 1;
            w.wrong().into_iter().for_each(|why| *wrong.entry(why).or_default() += 1);
        }
        open.extend(next);
    }
    (known.len(), ends, wrong)
}

#[test]
fn whatever_fails_all_end_alike_and_one_speaks() {
    for together in [true, false] {
        for fault in [Fault::None, Fault::Error, Fault::Kill, Fault::Silence] {
            let (worlds, ends, wrong) = explore(fault, together);
            println!("{fault:?}, {together}: {worlds} states, {ends} ends, {wrong:?}");
            assert!(worlds > 30 && ends > 0, "{fault:?}: nothing was explored");
            assert!(wrong.is_empty(), "{fault:?}, together {together}: {wrong:#?}");
        }
    }
}
