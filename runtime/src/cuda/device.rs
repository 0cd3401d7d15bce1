//! A device, its context, its streams and their events; errors of the driver as diagnostics.

use crate::alarm::Alarm;
use cudarc::driver::sys::CUdevice_attribute_enum as Is;
use cudarc::driver::{DriverError, result, sys};
use shardc_ir::diag::{Diag, Result, exact_bytes};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// An open device. Threads that use it call [`Device::bind`] first.
pub struct Device {
    number: sys::CUdevice,
    context: sys::CUcontext,
    /// Bytes of its memory that were taken at the end of each phase of the start.
    taken: Mutex<Vec<(&'static str, usize)>>,
}

// SAFETY: a context may be current in several threads.
unsafe impl Send for Device {}
// SAFETY: as above; the handles never change.
unsafe impl Sync for Device {}

/// Names the call in an error of the driver.
pub(super) trait Called<T> {
    fn called(self, call: &str) -> Result<T>;
}

impl<T> Called<T> for std::result::Result<T, result::DriverError> {
    fn called(self, call: &str) -> Result<T> {
        self.map_err(|e| {
            let name = e.error_name().map_or_else(|_| format!("{:?}", e.0), text);
            let meaning = e.error_string().map_or_else(|_| String::new(), text);
            Diag::new("cuda-driver", format!("{call}: {meaning} ({name}, code {})", e.0 as u32))
        })
    }
}

/// Why there is no device for this process.
fn no_device(d: Diag) -> Diag {
    d.coded("no-device").help("run with --device cpu")
}

fn text(s: &std::ffi::CStr) -> String {
    s.to_string_lossy().into_owned()
}

impl Device {
    /// Opens a device.
    ///
    /// # Errors
    /// `missing-library` without a driver, `cuda-driver` without such a device.
    pub fn open(ordinal: usize) -> Result<Arc<Device>> {
        let number = Device::number(ordinal)?;
        // SAFETY: the device exists.
        let context = unsafe { result::primary_ctx::retain(number) };
        let context = context.called("cuDevicePrimaryCtxRetain")?;
        let device = Device { number, context, taken: Mutex::default() };
        device.phase("others and the driver")?;
        Ok(Arc::new(device))
    }

    /// Bytes of its memory that are left, and all.
    fn left(&self) -> Result<(usize, usize)> {
        self.bind()?;
        result::mem_get_info().called("cuMemGetInfo")
    }

    /// A phase of the start is over: what has been taken since the last one is its.
    pub(super) fn phase(&self, what: &'static str) -> Result<()> {
        let (left, all) = self.left()?;
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).push((what, all - left));
        Ok(())
    }

    /// What was taken in each phase of the start, in words, the last of which goes on; what is left, and all.
    fn phases(&self, goes_on: &'static str) -> (String, usize, usize) {
        let (left, all) = self.left().unwrap_or_default();
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let ends = taken.iter().copied().chain([(goes_on, all - left)]);
        let begins = std::iter::once(0).chain(taken.iter().map(|t| t.1));
        let own = |((what, end), begin): ((&str, usize), usize)| {
            format!("{what} {}", exact_bytes(end.saturating_sub(begin)))
        };
        (ends.zip(begins).map(own).collect::<Vec<_>>().join(", "), left, all)
    }

    /// The same as a line.
    pub(super) fn held(&self) -> String {
        let (taken, left, all) = self.phases("scratch and graphs");
        format!("taken: {taken}; {} of {} are left", exact_bytes(left), exact_bytes(all))
    }

    /// That so many bytes have no room, and who has taken what there is.
    fn full(&self, bytes: usize) -> Diag {
        let (taken, left, all) = self.phases("ranks");
        let message = format!(
            "a rank needs {} of its device's memory, {} of {} are left",
            exact_bytes(bytes),
            exact_bytes(left),
            exact_bytes(all)
        );
        Diag::new("out-of-memory", message)
            .rule("what a plan needs fits beside what the driver and NCCL hold")
            .why(format!("taken: {taken}"))
            .help("compile for more ranks, with --recompute, or for less with --memory")
    }

    /// Memory of so many bytes.
    ///
    /// # Errors
    /// `out-of-memory`, and `cuda-driver`.
    pub(super) fn allocate(&self, bytes: usize) -> Result<sys::CUdeviceptr> {
        self.bind()?;
        // SAFETY: who gets it sets it before it is read, and frees it.
        match unsafe { result::malloc_sync(bytes) } {
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Err(self.full(bytes)),
            other => other.called("cuMemAlloc"),
        }
    }

    /// How many devices there are; one at least.
    ///
    /// # Errors
    /// As for [`Device::open`].
    pub fn count() -> Result<usize> {
        Device::ready()?;
        let count = result::device::get_count().called("cuDeviceGetCount").map_err(no_device)?;
        match usize::try_from(count) {
            Ok(n) if n > 0 => Ok(n),
            _ => Err(no_device(Diag::new("cuda-driver", "the driver has no device"))),
        }
    }

    /// Loads the driver.
    fn ready() -> Result<()> {
        // SAFETY: looks for the library by name, as every later call does.
        if !unsafe { sys::is_culib_present() } {
            return Err(Diag::new("missing-library", "libcuda.so.1 is not here")
                .rule("--device cuda needs NVIDIA's driver")
                .help("install the driver, or run with --device cpu"));
        }
        static ASKED: Once = Once::new();
        ASKED.call_once(ask);
        result::init().called("cuInit").map_err(no_device)
    }

    /// Lets kernels of this device use the memory of another.
    ///
    /// # Errors
    /// `cuda-driver` if they cannot.
    pub fn reach(&self, other: &Device) -> Result<()> {
        self.bind()?;
        let mut can = 0;
        // SAFETY: both devices exist, and their contexts are retained.
        let done = unsafe {
            let asked = sys::cuDeviceCanAccessPeer(&mut can, self.number, other.number);
            asked.result().called("cuDeviceCanAccessPeer")?;
            if can == 0 {
                return Err(Diag::new(
                    "cuda-driver",
                    format!(
                        "devices {} and {} do not reach each other's memory",
                        self.number, other.number
                    ),
                )
                .rule("the ranks of one process exchange data between their devices' memories")
                .help("run on 1 device: set CUDA_VISIBLE_DEVICES=0"));
            }
            sys::cuCtxEnablePeerAccess(other.context, 0)
        };
        match done {
            sys::cudaError_enum::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            other => other.result().called("cuCtxEnablePeerAccess"),
        }
    }

    /// What only this device in the world is called. It is not opened for that.
    ///
    /// # Errors
    /// As for [`Device::open`].
    pub fn name_of(ordinal: usize) -> Result<String> {
        let uuid = result::device::get_uuid(Device::number(ordinal)?).called("cuDeviceGetUuid")?;
        Ok(uuid.bytes.iter().map(|b| format!("{:02x}", *b as u8)).collect())
    }

    fn number(ordinal: usize) -> Result<sys::CUdevice> {
        Device::ready()?;
        let number = i32::try_from(ordinal).unwrap_or(i32::MAX);
        result::device::get(number).called("cuDeviceGet").map_err(no_device)
    }

    /// What its maker calls it, as `NVIDIA H100 80GB HBM3`.
    pub fn title(&self) -> Result<String> {
        result::device::get_name(self.number).called("cuDeviceGetName")
    }

    /// Bytes of its memory.
    pub fn memory(&self) -> Result<usize> {
        // SAFETY: the device exists.
        unsafe { result::device::total_mem(self.number) }.called("cuDeviceTotalMem")
    }

    /// How many multiprocessors it has.
    pub fn multiprocessors(&self) -> Result<usize> {
        let count = self.attribute(Is::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        Ok(usize::try_from(count?).unwrap_or(1).max(1))
    }

    fn attribute(&self, attribute: Is) -> Result<i32> {
        // SAFETY: the device exists.
        unsafe { result::device::get_attribute(self.number, attribute) }
            .called("cuDeviceGetAttribute")
    }

    /// Makes the device that of this thread.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { result::ctx::set_current(self.context) }.called("cuCtxSetCurrent")
    }

    /// The architecture that code for this device is compiled for, as `sm_90a`.
    pub fn arch(&self) -> Result<String> {
        let major = self.attribute(Is::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(Is::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        // From Hopper on, what is special to an architecture needs its own name.
        Ok(format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" }))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained by `open`. An error would mean that the driver is gone already.
        let _ = unsafe { result::primary_ctx::release(self.number) };
    }
}

/// What the driver reads when it starts: how many queues of the device streams share, and whether code is
/// loaded at once.
const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
const LOADING: &str = "CUDA_MODULE_LOADING";
/// The most queues that there are.
const MOST_QUEUES: usize = 32;

/// Asks the driver for as many queues as there are, unless the user wants fewer.
fn ask() {
    // SAFETY: the driver was not started, and has no threads that read it; Rust's own are held up.
    unsafe {
        if std::env::var_os(QUEUES).is_none() {
            std::env::set_var(QUEUES, MOST_QUEUES.to_string());
        }
        std::env::set_var(LOADING, "EAGER");
    }
}

/// Checks that there are queues for several processes: on one that streams share, a receive that waits for another
/// rank holds up what that rank waits for. One process waits for nobody else.
///
/// # Errors
/// `cuda-driver` if the user wants fewer.
pub fn queues() -> Result<()> {
    let few = |set: &String| set.trim().parse::<usize>().is_ok_and(|k| k < MOST_QUEUES);
    let Some(set) = std::env::var(QUEUES).ok().filter(few) else { return Ok(()) };
    Err(Diag::new("cuda-driver", format!("{QUEUES} is {}", set.trim()))
        .rule(format!("each stream of a rank has a queue of the device: {MOST_QUEUES} of them"))
        .why("ranks wait for each other for ever where receives and what they wait for share one")
        .help(format!("unset {QUEUES}: shardc asks for {MOST_QUEUES}")))
}

/// Called while work is awaited, with how long it was: an error ends the wait. And with `None` when it is done.
pub(super) type WaitWatch = Box<dyn Fn(Option<Duration>) -> Result<()> + Send + Sync>;

/// Looks before the core is offered to others; for how long it is offered before sleeping. That is a
/// time and no count: on a busy core a yield takes as long as others want.
const SPINS: u32 = 1000;
const OFFERED: Duration = Duration::from_millis(5);
/// The longest sleep between two looks, and which part of the time waited so far a sleep is.
const NAP: Duration = Duration::from_micros(500);
const PART: u32 = 64;

/// Waits until something is done, looking often at first; who watches is asked meanwhile, with how long it was, and an
/// error ends the wait.
pub(super) fn wait_for(
    mut done: impl FnMut() -> Result<bool>,
    watch: impl Fn(Duration) -> Result<()>,
) -> Result<()> {
    let (since, mut looks) = (Instant::now(), 0);
    while !done()? {
        if looks < SPINS {
            looks += 1;
            std::hint::spin_loop();
            continue;
        }
        let waited = since.elapsed();
        if waited < OFFERED {
            std::thread::yield_now();
            continue;
        }
        watch(waited)?;
        std::thread::sleep(NAP.min(waited / PART));
    }
    Ok(())
}

/// A queue of work on a device.
pub struct Stream {
    pub(super) device: Arc<Device>,
    pub(super) stream: sys::CUstream,
    watch: OnceLock<WaitWatch>,
    /// Who watches copies, of which rank, and for how long.
    copies: OnceLock<(Arc<Alarm>, usize, Duration)>,
}

// SAFETY: a stream may be used from any thread, and `&self` never by two at once: it is a rank's.
unsafe impl Send for Stream {}
// SAFETY: the driver's calls on a stream may come from several threads.
unsafe impl Sync for Stream {}

impl Stream {
    /// One whose work begins behind that of others that waits, too.
    pub fn new(device: &Arc<Device>) -> Result<Arc<Stream>> {
        Stream::with(device, |[least, _]| least)
    }

    /// One whose work comes first, where blocks of a device become free: others wait for what it brings.
    pub fn first(device: &Arc<Device>) -> Result<Arc<Stream>> {
        Stream::with(device, |[_, most]| most)
    }

    fn with(device: &Arc<Device>, priority: impl Fn([i32; 2]) -> i32) -> Result<Arc<Stream>> {
        device.bind()?;
        let ([mut least, mut most], mut stream) = ([0; 2], std::ptr::null_mut());
        let plain = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: they write two numbers, and a stream.
        unsafe {
            let range = sys::cuCtxGetStreamPriorityRange(&mut least, &mut most);
            range.result().called("cuCtxGetStreamPriorityRange")?;
            let made = sys::cuStreamCreateWithPriority(&mut stream, plain, priority([least, most]));
            made.result().called("cuStreamCreateWithPriority")?;
        }
        let (watch, copies) = (OnceLock::new(), OnceLock::new());
        Ok(Arc::new(Stream { device: device.clone(), stream, watch, copies }))
    }

    /// Whom to ask, while work of this stream is awaited, whether it will ever be done: it may wait for
    /// other ranks. The first one is asked.
    pub(super) fn watch(&self, watch: WaitWatch) {
        let _ = self.watch.set(watch);
    }

    /// Copies of this rank have a limit from now on.
    pub(super) fn limit(&self, alarm: &Arc<Alarm>, rank: usize, limit: Duration) {
        let _ = self.copies.set((alarm.clone(), rank, limit));
    }

    /// Does what copies memory of the device, with the limit for it.
    pub(super) fn copying<T>(&self, work: impl FnOnce() -> T) -> T {
        match self.copies.get() {
            None => work(),
            Some((alarm, rank, limit)) => alarm.copying(*rank, *limit, work),
        }
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// `cuda-driver`, for what this work did wrong, and those of who watches.
    pub fn wait(&self) -> Result<()> {
        self.device.bind()?;
        let Some(watch) = self.watch.get() else {
            // SAFETY: the stream lives.
            return unsafe { result::stream::synchronize(self.stream) }
                .called("cuStreamSynchronize");
        };
        let done = || {
            // SAFETY: the stream lives.
            match unsafe { sys::cuStreamQuery(self.stream) } {
                sys::cudaError_enum::CUDA_ERROR_NOT_READY => Ok(false),
                other => other.result().called("cuStreamQuery").map(|()| true),
            }
        };
        wait_for(done, |waited| watch(Some(waited)))?;
        watch(None)
    }

    /// The work that was queued so far, to be waited for.
    pub(super) fn mark(&self) -> Result<Event> {
        self.device.bind()?;
        let plain = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING;
        let event = result::event::create(plain).called("cuEventCreate")?;
        let event = Event { device: self.device.clone(), event };
        // SAFETY: both live.
        unsafe { result::event::record(event.event, self.stream) }.called("cuEventRecord")?;
        Ok(event)
    }

    /// What is queued from now on begins after some work of another stream, of this device or of
    /// another.
    pub(super) fn after(&self, work: &Event) -> Result<()> {
        self.device.bind()?;
        let how = sys::CUevent_wait_flags_enum::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live.
        unsafe { result::stream::wait_event(self.stream, work.event, how) }
            .called("cuStreamWaitEvent")
    }
}

/// Work of a stream up to some moment.
pub struct Event {
    device: Arc<Device>,
    event: sys::CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; an event is recorded once, before anybody else has it.
unsafe impl Sync for Event {}

impl Event {
    /// True if the work is done.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub(super) fn done(&self) -> Result<bool> {
        self.device.bind()?;
        // SAFETY: the event lives.
        match unsafe { result::event::query(self.event) } {
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            other => other.called("cuEventQuery").map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: made by `mark`; the driver keeps it until those that wait for it have.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: made by `new`, and used by nobody any more.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}
