//! Runs one kernel: one `match`.

use crate::exchange::exchange;
use crate::native::Native;
use crate::product::then::Epilogue;
use crate::rows::{Registers, RowCall};
use crate::transport::Transport;
use crate::{attention, experts, grouped, moves, product, recurrence, rows, team};
use shardc_ir::diag::Result;
use shardc_ir::kernel::{Collective, Copy, Exchange, Kernel, Ragged};
use smallvec::SmallVec;
use std::sync::Arc;

/// What kernels need beside their memory.
pub struct Executor {
    transport: Box<dyn Transport>,
    threads: usize,
    crowded: bool,
    registers: Registers,
    native: Option<Arc<Native>>,
}

impl Executor {
    /// `threads`: how many threads a kernel may use, this one among them.
    pub fn new(transport: Box<dyn Transport>, threads: usize) -> Executor {
        Executor {
            transport,
            threads: threads.max(1),
            crowded: false,
            registers: Registers::default(),
            native: None,
        }
    }

    /// With compiled kernels over rows; those that are not among them are interpreted.
    pub fn with(self, native: Option<Arc<Native>>) -> Executor {
        Executor { native, ..self }
    }

    /// With more threads around than cores: a thread that waits gives its core away at once.
    pub fn crowded(self, crowded: bool) -> Executor {
        Executor { crowded, ..self }
    }

    pub fn transport(&mut self) -> &mut dyn Transport {
        &mut *self.transport
    }

    /// Runs a kernel on the memory of its operands, results and workspace, in this order.
    ///
    /// # Errors
    /// Those of the transport, and `moe-bound`.
    ///
    /// # Safety
    /// The memory of operand `i` is valid for as many elements as [`Kernel::reach`] says; results
    /// overlap no operands, but that of a kernel over rows or of an epilogue may be one that is walked
    /// alike. Nobody else uses this memory meanwhile, other ranks in collectives excepted.
    pub unsafe fn run(&mut self, kernel: &Kernel, memory: &[*mut f32]) -> Result<()> {
        let (threads, registers) = (self.threads, &mut self.registers);
        team::crowd(self.crowded);
        // SAFETY: by the caller, for every kind of kernel.
        unsafe {
            match kernel {
                Kernel::View => {}
                Kernel::Literal { values, to } => {
                    memory[*to].copy_from_nonoverlapping(values.as_ptr(), values.len());
                }
                Kernel::Rows(k) => {
                    let form = registers.form(k, self.native.as_deref());
                    let one = RowCall::of(k, memory.into(), form);
                    rows::run(&mut [one], threads, registers);
                }
                Kernel::HorizontalFusion(all) => {
                    let own = |(k, own): (_, &SmallVec<_>)| {
                        let memory = own.iter().map(|&i: &usize| memory[i]).collect();
                        RowCall::of(k, memory, registers.form(k, self.native.as_deref()))
                    };
                    let mut calls: Vec<RowCall> =
                        all.kernels.iter().zip(&all.operands).map(own).collect();
                    rows::run(&mut calls, threads, registers);
                }
                Kernel::Copy(all) => all.iter().for_each(|k| moves::copy(k, memory, threads)),
                Kernel::Gemm(k) => product::run(k, None, memory, threads),
                Kernel::GemmThen(then) => {
                    let form = |k| registers.form(k, self.native.as_deref());
                    let forms = then.blocks.iter().map(form).collect();
                    let epilogue = Epilogue { then, memory, forms };
                    product::run(&then.product, Some(&epilogue), memory, threads);
                }
                Kernel::Take(k) => moves::take(k, memory, threads),
                Kernel::IndexAdd { pick, clear } => {
                    clear.iter().for_each(|c| moves::clear(c, memory, threads));
                    moves::index_add(pick, memory, threads);
                }
                Kernel::Draw(k) => moves::draw(k, memory, threads),
                Kernel::Scan(k) => moves::scan(k, memory, threads),
                Kernel::Rope(k) => moves::rope(k, memory, threads),
                Kernel::Attention(k) => attention::forward(k, memory, threads),
                Kernel::AttentionGrad(k) => attention::backward(k, memory, threads),
                Kernel::Recurrence(k) => recurrence::forward(k, memory, threads),
                Kernel::RecurrenceGrad(k) => recurrence::backward(k, memory, threads),
                Kernel::TopK(k) => experts::top_k(k, memory, threads),
                Kernel::Route(k) => return experts::route(k, memory, threads),
                Kernel::Dispatch(k) => experts::dispatch(k, memory, threads),
                Kernel::Unpermute(k) => experts::unpermute(k, memory, threads),
                Kernel::CombineGatesGrad(k) => experts::combine_gates_grad(k, memory, threads),
                Kernel::Grouped(k) => grouped::run(k, memory, threads),
                Kernel::Collective(k) => return self.exchange(k, memory),
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Executor::run`].
    unsafe fn exchange(&mut self, k: &Collective, memory: &[*mut f32]) -> Result<()> {
        let threads = self.threads;
        // SAFETY: by the caller; nobody reads a result before the call begins.
        unsafe {
            match &k.exchange {
                Exchange::Broadcast { own: Some(own), to, .. } => {
                    let (extents, from) = (own.extents.clone(), own.view.clone());
                    let (to, elem) = (to.view.clone(), own.elem);
                    moves::copy(&Copy { clear: None, extents, from, to, elem }, memory, threads);
                }
                Exchange::AllToAll { clear: Some(block), .. }
                | Exchange::Reduce { clear: Some(block), .. } => {
                    moves::clear(block, memory, threads);
                }
                _meeting_alone => {}
            }
            let counts =
                |r: &Ragged, at: usize| *memory[r.counts.view.operand].cast::<i32>().add(at);
            let there = |r: &Ragged| Ok(experts::there(r, memory, |at| counts(r, at)));
            exchange(&mut *self.transport, k, memory, there)
        }
    }
}
