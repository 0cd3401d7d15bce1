//! NCCL's functions, by nccl.h of version 2.18 and later, loaded when they are first asked for.

use crate::alarm::Alarm;
use libloading::Library as Object;
use shardc_ir::diag::{Diag, Result};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, OnceLock};

/// Names of the library: with the version of its interface, and as a developer's link.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The variable by which it starts kernels of several communicators in the order of their calls, and the first version
/// that does.
const IN_ORDER: &str = "NCCL_LAUNCH_ORDER_IMPLICIT";
const SINCE: i32 = 22_600;

/// A communicator of the library.
pub(super) type Handle = *mut c_void;
/// A stream of the driver.
pub(super) type Queue = *mut c_void;

/// By which processes know that they are of one job; process 0 makes it.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Id(pub [u8; 128]);

/// `ncclDataType_t`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(super) enum DataType {
    Byte = 1,
    I32 = 2,
    F16 = 6,
    F32 = 7,
    BF16 = 9,
}

/// `ncclRedOp_t`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(super) enum Fold {
    Sum = 0,
    Max = 2,
    Min = 3,
}

/// `ncclResult_t`.
const SUCCESS: c_int = 0;
const CUDA: c_int = 1;
const SYSTEM: c_int = 2;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const REMOTE: c_int = 6;
const IN_PROGRESS: c_int = 7;
/// `NCCL_SPLIT_NOCOLOR`: a member of no part.
pub(super) const NO_PART: c_int = -1;

type Code = c_int;

/// `ncclConfig_t` of 2.18, which later versions take as such; what is `UNSET` is the library's choice.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cluster: c_int,
    least_blocks: c_int,
    most_blocks: c_int,
    network: *const c_char,
    share: c_int,
    /// Where later versions have something else, which they do not read of this one.
    rest: c_int,
}

const UNSET: c_int = c_int::MIN;

impl Config {
    /// Of a communicator whose calls take this many blocks of the device at most, if that is not the library's choice.
    /// Nothing is shared with others: of communicators that share, calls follow each other.
    pub fn of(most_blocks: Option<c_int>) -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: UNSET,
            cluster: UNSET,
            least_blocks: UNSET,
            most_blocks: most_blocks.unwrap_or(UNSET),
            network: std::ptr::null(),
            share: 0,
            rest: UNSET,
        }
    }
}

/// Declares the table of functions, and loads it.
macro_rules! functions {
    ($($name:ident: $symbol:literal ($($arg:ty),*)),* $(,)?) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($arg),*) -> Code,)*
        }

        impl Functions {
            /// # Errors
            /// The name of a function that is not there.
            fn load(object: &Object) -> std::result::Result<Functions, &'static str> {
                $(
                    // SAFETY: the types are those of nccl.h.
                    let $name = *unsafe { object.get($symbol.as_bytes()) }.map_err(|_| $symbol)?;
                )*
                Ok(Functions { $($name),* })
            }
        }
    };
}

functions! {
    version: "ncclGetVersion" (*mut c_int),
    unique_id: "ncclGetUniqueId" (*mut Id),
    init: "ncclCommInitRank" (*mut Handle, c_int, Id, c_int),
    split: "ncclCommSplit" (Handle, c_int, c_int, *mut Handle, *mut Config),
    destroy: "ncclCommDestroy" (Handle),
    abort: "ncclCommAbort" (Handle),
    async_error: "ncclCommGetAsyncError" (Handle, *mut c_int),
    group_start: "ncclGroupStart" (),
    group_end: "ncclGroupEnd" (),
    send: "ncclSend" (*const c_void, usize, DataType, c_int, Handle, Queue),
    recv: "ncclRecv" (*mut c_void, usize, DataType, c_int, Handle, Queue),
    broadcast: "ncclBroadcast" (*const c_void, *mut c_void, usize, DataType, c_int, Handle, Queue),
    all_gather: "ncclAllGather" (*const c_void, *mut c_void, usize, DataType, Handle, Queue),
    all_reduce: "ncclAllReduce" (*const c_void, *mut c_void, usize, DataType, Fold, Handle, Queue),
    reduce: "ncclReduce" (*const c_void, *mut c_void, usize, DataType, Fold, c_int, Handle, Queue),
    reduce_scatter: "ncclReduceScatter"
        (*const c_void, *mut c_void, usize, DataType, Fold, Handle, Queue),
}

/// The library.
pub(super) struct Library {
    functions: Functions,
    text: unsafe extern "C" fn(Code) -> *const c_char,
    last: unsafe extern "C" fn(Handle) -> *const c_char,
    _object: Object,
}

/// What does not hold where NCCL gives a code.
fn rule(code: Code) -> &'static str {
    match code {
        CUDA => "NCCL's own calls of the driver succeed: the device has room for its buffers",
        SYSTEM => "NCCL reaches every host of the job, and has memory of this one for its buffers",
        REMOTE => "all processes of a group live, and the network between them works",
        INVALID_ARGUMENT | INVALID_USAGE => {
            "all ranks of a group run the same collectives, in the same order"
        }
        _internal => "NCCL itself works: no more is known of this error",
    }
}

/// Elements in the device's memory: address, number and type.
#[derive(Clone, Copy)]
pub(super) struct Data {
    pub at: u64,
    pub count: usize,
    pub kind: DataType,
}

impl Library {
    /// The library, loaded once.
    ///
    /// # Errors
    /// `missing-library`.
    pub fn get() -> Result<&'static Library> {
        static LOADED: OnceLock<std::result::Result<Library, Diag>> = OnceLock::new();
        LOADED.get_or_init(Library::load).as_ref().map_err(Clone::clone)
    }

    /// Whether kernels of several communicators start in the order of their calls, on all ranks.
    ///
    /// # Errors
    /// Those of NCCL.
    pub fn launches_in_order(&self) -> Result<bool> {
        let asked = std::env::var(IN_ORDER).is_ok_and(|on| on == "1");
        Ok(asked && self.version()? >= SINCE)
    }

    fn load() -> Result<Library> {
        if std::env::var_os(IN_ORDER).is_none() {
            // SAFETY: NCCL was not loaded, and has no threads that read it; Rust's own are held up.
            unsafe { std::env::set_var(IN_ORDER, "1") };
        }
        let missing = |what: String| {
            Diag::new("missing-library", what)
                .rule("--transport nccl needs NVIDIA's NCCL, 2.18 or later")
                .help("install it (pip install nvidia-nccl-cu13) where LD_LIBRARY_PATH says")
        };
        // SAFETY: NVIDIA's library, whose start has no conditions.
        let open = |name: &&str| unsafe { Object::new(*name) }.ok();
        let object = NAMES.iter().find_map(open);
        let object = object.ok_or_else(|| missing(format!("{} is not here", NAMES[0])))?;
        let without = |name: &str| missing(format!("{} has no {name}", NAMES[0]));
        let functions = Functions::load(&object).map_err(without)?;
        let symbol = "ncclGetErrorString";
        // SAFETY: the type is that of nccl.h.
        let text = *unsafe { object.get(symbol.as_bytes()) }.map_err(|_| without(symbol))?;
        let symbol = "ncclGetLastError";
        // SAFETY: as above.
        let last = *unsafe { object.get(symbol.as_bytes()) }.map_err(|_| without(symbol))?;
        Ok(Library { functions, text, last, _object: object })
    }

    /// `call` names the function and who it was called for, in an error.
    fn check(&self, code: Code, call: impl FnOnce() -> String) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: texts that end with 0: for any code, and for the last error of any communicator.
        let (text, last) = unsafe {
            let said = |text: *const c_char| CStr::from_ptr(text).to_string_lossy().into_owned();
            (said((self.text)(code)), said((self.last)(std::ptr::null_mut())))
        };
        let d = Diag::new("rank-failed", format!("{}: {text} (code {code})", call()));
        let d =
            d.rule(rule(code)).help("run again with NCCL_DEBUG=WARN to see what NCCL says of it");
        Err(if last.trim().is_empty() { d } else { d.why(format!("NCCL says: {}", last.trim())) })
    }

    /// As 22605 for 2.26.5.
    pub fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: writes one number.
        let code = unsafe { (self.functions.version)(&mut version) };
        self.check(code, || "ncclGetVersion".into())?;
        Ok(version)
    }

    pub fn unique_id(&self) -> Result<Id> {
        let mut id = Id([0; 128]);
        // SAFETY: writes one id.
        let code = unsafe { (self.functions.unique_id)(&mut id) };
        self.check(code, || "ncclGetUniqueId".into())?;
        Ok(id)
    }
}

/// A communicator: some ranks, in order.
pub(super) struct Comm {
    library: &'static Library,
    handle: Handle,
    /// For errors: `rank 3 of tp`.
    name: String,
    alarm: Arc<Alarm>,
}

// SAFETY: one thread calls NCCL for a communicator; any may ask for its errors.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl Comm {
    /// The communicator of all ranks, with the device that is current; all ranks call it.
    pub fn of_all(id: &Id, rank: usize, ranks: usize, alarm: &Arc<Alarm>) -> Result<Comm> {
        let library = Library::get()?;
        let (mut handle, name) = (std::ptr::null_mut(), format!("rank {rank} of all {ranks}"));
        let (n, r) = (ranks as c_int, rank as c_int);
        // SAFETY: writes one handle.
        let code = unsafe { (library.functions.init)(&mut handle, n, *id, r) };
        library.check(code, || format!("ncclCommInitRank on {name}"))?;
        Ok(Comm { library, handle, name, alarm: alarm.clone() })
    }

    /// The part of this communicator whose members give the same number, in the order of `key`; `None`
    /// for those that give none. All members call it.
    pub fn part(
        &self,
        (number, key): (Option<usize>, usize),
        mut config: Config,
        name: String,
    ) -> Result<Option<Comm>> {
        let mut handle = std::ptr::null_mut();
        let color = number.map_or(NO_PART, |n| n as c_int);
        // SAFETY: writes one handle; the configuration is read meanwhile.
        let code = unsafe {
            let split = self.library.functions.split;
            split(self.handle, color, key as c_int, &mut handle, &mut config)
        };
        self.library.check(code, || format!("ncclCommSplit on {name}"))?;
        let alarm = self.alarm.clone();
        Ok(number.map(|_| Comm { library: self.library, handle, name, alarm }))
    }

    /// Gives up all that is under way, after which nothing may be done with it.
    pub fn abort(&self) {
        // SAFETY: the communicator lives: after a failure it is not destroyed.
        let _ = unsafe { (self.library.functions.abort)(self.handle) };
    }

    fn check(&self, call: &str, code: Code) -> Result<()> {
        self.library.check(code, || format!("{call} on {}", self.name))
    }

    /// What went wrong since it was made.
    pub fn check_async(&self) -> Result<()> {
        let mut state = SUCCESS;
        // SAFETY: the communicator lives.
        let code = unsafe { (self.library.functions.async_error)(self.handle, &mut state) };
        self.check("ncclCommGetAsyncError", code)?;
        if state == IN_PROGRESS { Ok(()) } else { self.check("what was queued", state) }
    }

    /// Calls within become one operation.
    pub fn together(&self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: no conditions.
        self.check("ncclGroupStart", unsafe { (self.library.functions.group_start)() })?;
        let done = calls();
        // SAFETY: no conditions.
        let code = unsafe { (self.library.functions.group_end)() };
        done?;
        self.check("ncclGroupEnd", code)
    }
}

impl Comm {
    /// Queues a send to member `to`.
    ///
    /// # Safety
    /// All data are memory of the communicator's device and are there until what is queued is done;
    /// nobody writes what is read meanwhile, nor uses what is written. The queue is a stream of that
    /// device.
    pub unsafe fn send(&self, d: Data, to: usize, queue: Queue) -> Result<()> {
        let f = self.library.functions.send;
        // SAFETY: the communicator lives; all else by the caller.
        let code = unsafe { f(d.at as _, d.count, d.kind, to as c_int, self.handle, queue) };
        self.check("ncclSend", code)
    }

    /// Queues that data of member `from` arrive.
    ///
    /// # Safety
    /// As for [`Comm::send`].
    pub unsafe fn recv(&self, d: Data, from: usize, queue: Queue) -> Result<()> {
        let f = self.library.functions.recv;
        // SAFETY: the communicator lives; all else by the caller.
        let code = unsafe { f(d.at as _, d.count, d.kind, from as c_int, self.handle, queue) };
        self.check("ncclRecv", code)
    }

    /// `from` of member `root` to everybody's `to`, which has room for as many.
    ///
    /// # Safety
    /// As for [`Comm::send`].
    pub unsafe fn broadcast(&self, from: Data, to: u64, root: usize, queue: Queue) -> Result<()> {
        let (f, root) = (self.library.functions.broadcast, root as c_int);
        // SAFETY: the communicator lives; all else by the caller.
        let code =
            unsafe { f(from.at as _, to as _, from.count, from.kind, root, self.handle, queue) };
        self.check("ncclBroadcast", code)
    }

    /// `from` of every member, one after the other, to `to`, which has room for all.
    ///
    /// # Safety
    /// As for [`Comm::send`].
    pub unsafe fn all_gather(&self, from: Data, to: u64, queue: Queue) -> Result<()> {
        let f = self.library.functions.all_gather;
        // SAFETY: the communicator lives; all else by the caller.
        let code = unsafe { f(from.at as _, to as _, from.count, from.kind, self.handle, queue) };
        self.check("ncclAllGather", code)
    }

    /// The fold of everybody's `from`, to everybody's `to`, which has room for as many.
    ///
    /// # Safety
    /// As for [`Comm::send`].
    pub unsafe fn all_reduce(&self, from: Data, to: u64, fold: Fold, queue: Queue) -> Result<()> {
        let f = self.library.functions.all_reduce;
        // SAFETY: the communicator lives; all else by the caller.
        let code =
            unsafe { f(from.at as _, to as _, from.count, from.kind, fold, self.handle, queue) };
        self.check("ncclAllReduce", code)
    }

    /// The fold of everybody's `from`, to `to` of member `root`, which has room for as many.
    ///
    /// # Safety
    /// As for [`Comm::send`].
    pub unsafe fn reduce(
        &self,
        from: Data,
        to: u64,
        fold: Fold,
        root: usize,
        queue: Queue,
    ) -> Result<()> {
        let (f, root) = (self.library.functions.reduce, root as c_int);
        // SAFETY: the communicator lives; all else by the caller.
        let code = unsafe {
            f(from.at as _, to as _, from.count, from.kind, fold, root, self.handle, queue)
        };
        self.check("ncclReduce", code)
    }

    /// The fold of everybody's part for this member: `from` has one of `to.count` for each.
    ///
    /// # Safety
    /// As for [`Comm::send`].
    pub unsafe fn reduce_scatter(
        &self,
        from: u64,
        to: Data,
        fold: Fold,
        queue: Queue,
    ) -> Result<()> {
        let f = self.library.functions.reduce_scatter;
        // SAFETY: the communicator lives; all else by the caller.
        let code = unsafe { f(from as _, to.at as _, to.count, to.kind, fold, self.handle, queue) };
        self.check("ncclReduceScatter", code)
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // After a failure, what is under way may never end, and it would wait for that.
        if self.alarm.is_rung() {
            return;
        }
        // SAFETY: made by the library, and nothing is queued any more. An error has no one to tell.
        let _ = unsafe { (self.library.functions.destroy)(self.handle) };
    }
}
