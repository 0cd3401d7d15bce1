//! Matrix products by NVIDIA's cuBLASLt, which is loaded when it is first asked for. Sums keep one
//! order: of the ways to split them over blocks, only that is allowed whose parts are added afterwards.

use super::arena::DeviceArena;
use super::device::Stream;
use cudarc::cublaslt::{result, sys};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::{Gemm, Matrix};
use shardc_ir::types::DType;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of the library's own memory, as its maker advises for Hopper.
const WORKSPACE: usize = 32 << 20;
/// What the library says if it has no way to do a product.
const NONE: sys::cublasStatus_t = sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED;
/// What an algorithm is called by.
const ALGORITHM: sys::cublasLtMatmulAlgoConfigAttributes_t =
    sys::cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_ID;
/// Places in an arena begin at multiples of this.
const ALIGN: usize = shardc_ir::plan::ALIGN;

/// A rank's use of the library.
pub struct Products {
    stream: Arc<Stream>,
    handle: sys::cublasLtHandle_t,
    workspace: DeviceArena,
    /// `None` for products that the library cannot be told of, or has no way to do.
    known: HashMap<Gemm, Option<Known>>,
    chosen: Chosen,
}

/// The numbers of the ways in which the library does products of ranks of this process; `None` for those that it
/// does not do.
pub(super) type Chosen = Arc<Mutex<HashMap<Gemm, Option<i32>>>>;

/// By whom products are done, in words: how many sizes in which of the library's ways.
pub(super) fn told(chosen: &Chosen) -> String {
    let chosen = chosen.lock().unwrap_or_else(PoisonError::into_inner);
    let mut ways: BTreeMap<i32, usize> = BTreeMap::new();
    chosen.values().flatten().for_each(|way| *ways.entry(*way).or_default() += 1);
    let done: usize = ways.values().sum();
    let ways: Vec<String> = ways.iter().map(|(way, n)| format!("{way} for {n}")).collect();
    let version = Products::version().unwrap_or_default();
    let all = chosen.len();
    match done {
        0 => format!("cuBLASLt {version} does none of {all} sizes"),
        _ => {
            format!("cuBLASLt {version} does {done} of {all} sizes, algorithms {}", ways.join(", "))
        }
    }
}

// SAFETY: a handle and descriptors may be used from any thread, and are a rank's own.
unsafe impl Send for Products {}

/// A matrix in memory, its columns adjacent, as the library sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Side {
    /// 0, 1 or 2 for the product's a, b or out.
    which: usize,
    /// It is what is multiplied, else its transpose is.
    plain: bool,
    rows: usize,
    cols: usize,
    /// Elements from column to column.
    pitch: usize,
}

/// A product as the library is told: `out = left right`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct ProductCall {
    /// Left, right, out.
    sides: [Side; 3],
    /// Products of one call.
    batch: usize,
    /// Elements from product to product of a call, of a, b and out.
    steps: [usize; 3],
    /// Elements before a, b and out, by call.
    calls: Vec<[usize; 3]>,
}

/// What the library has made of a product.
struct Known {
    told: ProductCall,
    product: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Known {
    /// The number of the library's way to do it.
    fn way(&self) -> Result<i32> {
        let (of, mut way, mut written) = (ALGORITHM, 0i32, 0);
        // SAFETY: the algorithm is the library's, and writes one number.
        let code = unsafe {
            let to = (&raw mut way).cast();
            sys::cublasLtMatmulAlgoConfigGetAttribute(&self.algorithm, of, to, 4, &mut written)
        };
        called(code.result(), "cublasLtMatmulAlgoConfigGetAttribute")?;
        Ok(way)
    }
}

/// Names the call in an error of the library.
fn called<T>(done: std::result::Result<T, result::CublasError>, call: &str) -> Result<T> {
    done.map_err(|e| {
        Diag::new("cuda-driver", format!("{call}: {:?} (code {})", e.0, e.0 as u32))
            .help("or multiply without the library: --products own")
    })
}

/// A matrix with elements `down` apart in a column, `along` in a row; `None` if neither is adjacent.
fn side(which: usize, [rows, cols]: [usize; 2], [down, along]: [usize; 2]) -> Option<Side> {
    let one = |plain: bool, rows: usize, cols: usize, down: usize, along: usize| {
        // A dim of one element has any stride.
        let pitch = if cols == 1 { rows } else { along };
        (rows == 1 || down == 1).then_some(Side { which, plain, rows, cols, pitch })
    };
    let fits = |s: &Side| s.pitch >= s.rows;
    one(true, rows, cols, down, along)
        .filter(fits)
        .or_else(|| one(false, cols, rows, along, down).filter(fits))
}

/// How the library is told of a product; `None` if it cannot be.
fn tell(k: &Gemm) -> Option<ProductCall> {
    let elems = (k.a.elem, k.b.elem, k.out.elem);
    let known = matches!(
        elems,
        (DType::BF16, DType::BF16, DType::BF16 | DType::F32)
            | (DType::F16, DType::F16, DType::F16 | DType::F32)
            | (DType::F32, DType::F32, DType::F32)
    );
    if !known || !k.sum.is_empty() || [k.m, k.n, k.k].contains(&0) || k.batch.contains(&0) {
        return None;
    }
    let strides = |x: &Matrix| [x.row_stride, x.col_stride];
    let turned = |x: &Matrix| [x.col_stride, x.row_stride];
    let as_it_is = || {
        let a = side(0, [k.m, k.k], strides(&k.a))?;
        let b = side(1, [k.k, k.n], strides(&k.b))?;
        Some([a, b, side(2, [k.m, k.n], strides(&k.out)).filter(|s| s.plain)?])
    };
    // The transpose of the result is the product of the transposes, in the other order.
    let transposed = || {
        let a = side(0, [k.k, k.m], turned(&k.a))?;
        let b = side(1, [k.n, k.k], turned(&k.b))?;
        Some([b, a, side(2, [k.n, k.m], turned(&k.out)).filter(|s| s.plain)?])
    };
    let sides = transposed().or_else(as_it_is)?;
    let matrices = [&k.a, &k.b, &k.out];
    let (batch, around) = k.batch.split_last().map_or((1, &[][..]), |(n, rest)| (*n, rest));
    let step = |x: &Matrix| x.view.strides.get(around.len()).copied().unwrap_or(0);
    let steps = if k.batch.is_empty() { [0; 3] } else { matrices.map(step) };
    let mut calls = vec![matrices.map(|x| x.view.offset)];
    for (l, &n) in around.iter().enumerate() {
        let moved =
            |at: &[usize; 3], i: usize| [0, 1, 2].map(|x| at[x] + i * matrices[x].view.strides[l]);
        calls =
            calls.iter().flat_map(|at| (0..n).map(|i| moved(at, i)).collect::<Vec<_>>()).collect();
    }
    Some(ProductCall { sides, batch, steps, calls })
}

fn data_type(e: DType) -> sys::cudaDataType {
    match e {
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        DType::F32 => sys::cudaDataType::CUDA_R_32F,
        DType::I32 => sys::cudaDataType::CUDA_R_32I,
    }
}

fn elems(k: &Gemm) -> [DType; 3] {
    [k.a.elem, k.b.elem, k.out.elem]
}

/// The address of a number, and its bytes.
fn raw<T>(x: &T) -> (*const c_void, usize) {
    ((&raw const *x).cast(), size_of::<T>())
}

impl Products {
    /// True if the library can be told of a product: of two matrices of one type, summed over one loop,
    /// each with adjacent rows or columns.
    pub fn can(k: &Gemm) -> bool {
        tell(k).is_some()
    }

    /// True if the library is here.
    pub fn are_here() -> bool {
        // SAFETY: looks for the library by name, as every later call does.
        unsafe { sys::is_culib_present() }
    }

    /// The library's version, as `13.1.0`, if it is here.
    pub fn version() -> Option<String> {
        // SAFETY: looks for the library by name, and asks it for a number.
        let n = Products::are_here().then(|| unsafe { sys::cublasLtGetVersion() })?;
        Some(format!("{}.{}.{}", n / 10_000, n / 100 % 100, n % 100))
    }

    /// # Errors
    /// `missing-library` without the library.
    pub fn open(stream: &Arc<Stream>) -> Result<Products> {
        Products::noted(stream, Chosen::default())
    }

    /// The same; how products are done is noted.
    pub(super) fn noted(stream: &Arc<Stream>, chosen: Chosen) -> Result<Products> {
        if !Products::are_here() {
            return Err(Diag::new("missing-library", "libcublasLt.so.13 is not here")
                .rule("--products cublaslt needs NVIDIA's library of products")
                .help("install CUDA 12 or 13, or leave --products out"));
        }
        stream.device.bind()?;
        let workspace = DeviceArena::new(stream, WORKSPACE, false)?;
        let handle = called(result::create_handle(), "cublasLtCreate")?;
        Ok(Products { stream: stream.clone(), handle, workspace, known: HashMap::new(), chosen })
    }

    /// Lets the library choose how to do a product, once.
    pub(super) fn prepare(&mut self, k: &Gemm) -> Result<()> {
        if self.known.contains_key(k) {
            return Ok(());
        }
        let made = tell(k).map(|told| self.make(k, told)).transpose()?.flatten();
        let way = made.as_ref().map(Known::way).transpose()?;
        self.chosen.lock().unwrap_or_else(PoisonError::into_inner).insert(k.clone(), way);
        self.known.insert(k.clone(), made);
        Ok(())
    }

    /// Queues a product on the memory of its operands; false if the library cannot be told of it, or has no way to do it.
    ///
    /// # Safety
    /// As for [`super::Executor::run`].
    pub(super) unsafe fn run(&mut self, k: &Gemm, memory: &[u64]) -> Result<bool> {
        self.prepare(k)?;
        let Some(Some(p)) = self.known.get(k) else { return Ok(false) };
        let (one, add) = (1.0f32, if k.accumulate { 1.0f32 } else { 0.0 });
        let matrices = [&k.a, &k.b, &k.out];
        for call in &p.told.calls {
            let at = |s: Side| {
                let x = matrices[s.which];
                let byte = call[s.which] * x.elem.bytes();
                (memory[x.view.operand] + byte as u64) as *mut c_void
            };
            let [left, right, out] = p.told.sides.map(at);
            // SAFETY: by the caller; descriptors are ours, and name what the kernel reaches.
            let done = unsafe {
                result::matmul(
                    self.handle,
                    p.product,
                    raw(&one).0,
                    raw(&add).0,
                    left,
                    p.layouts[0],
                    right,
                    p.layouts[1],
                    out,
                    p.layouts[2],
                    out,
                    p.layouts[2],
                    &p.algorithm,
                    self.workspace.address(0) as *mut c_void,
                    WORKSPACE,
                    self.stream.stream.cast(),
                )
            };
            called(done, &format!("cublasLtMatmul of {}x{}x{}", k.m, k.n, k.k))?;
        }
        Ok(true)
    }

    /// Describes a product, and lets the library choose how to do it.
    fn make(&self, k: &Gemm, told: ProductCall) -> Result<Option<Known>> {
        use sys::cublasLtMatmulDescAttributes_t as Of;
        use sys::cublasLtMatrixLayoutAttribute_t as In;
        let single = sys::cudaDataType::CUDA_R_32F;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let product =
            called(result::create_matmul_desc(compute, single), "cublasLtMatmulDescCreate")?;
        for (s, which) in told
            .sides
            .iter()
            .zip([Of::CUBLASLT_MATMUL_DESC_TRANSA, Of::CUBLASLT_MATMUL_DESC_TRANSB])
        {
            let turn = i32::from(!s.plain);
            let (at, bytes) = raw(&turn);
            // SAFETY: the descriptor is alive, and copies the number.
            let set = unsafe { result::set_matmul_desc_attribute(product, which, at, bytes) };
            called(set, "cublasLtMatmulDescSetAttribute")?;
        }
        let mut layouts = [std::ptr::null_mut(); 3];
        for (to, s) in layouts.iter_mut().zip(&told.sides) {
            let (rows, cols, pitch) = (s.rows as u64, s.cols as u64, s.pitch as i64);
            let made =
                result::create_matrix_layout(data_type(elems(k)[s.which]), rows, cols, pitch);
            *to = called(made, "cublasLtMatrixLayoutCreate")?;
            let (batch, step) = (told.batch as i32, told.steps[s.which] as i64);
            let both = [
                (In::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, raw(&batch)),
                (In::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, raw(&step)),
            ];
            for (which, (at, bytes)) in both {
                // SAFETY: as above.
                let set = unsafe { result::set_matrix_layout_attribute(*to, which, at, bytes) };
                called(set, "cublasLtMatrixLayoutSetAttribute")?;
            }
        }
        if let Some(algorithm) = self.choose(k, &told, product, layouts)? {
            return Ok(Some(Known { told, product, layouts, algorithm }));
        }
        // SAFETY: made above, and used no more.
        unsafe { destroy(product, layouts) };
        Ok(None)
    }

    /// The way that the library takes to be the fastest, if it has one.
    fn choose(
        &self,
        k: &Gemm,
        told: &ProductCall,
        product: sys::cublasLtMatmulDesc_t,
        layouts: [sys::cublasLtMatrixLayout_t; 3],
    ) -> Result<Option<sys::cublasLtMatmulAlgo_t>> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Is;
        let wish = called(result::create_matmul_pref(), "cublasLtMatmulPreferenceCreate")?;
        // Parts of a sum are added in the type of the computation, behind the product.
        let (room, scheme) = (WORKSPACE as u64, 2u32);
        let aligned = told.sides.map(|s| {
            let bytes = |n: usize| n * elems(k)[s.which].bytes();
            let places = told.calls.iter().map(|c| bytes(c[s.which]));
            let all = places.chain([bytes(told.steps[s.which])]).fold(ALIGN, |a, b| a | b);
            1u32 << all.trailing_zeros()
        });
        let all = [
            (Is::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, raw(&room)),
            (Is::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, raw(&scheme)),
            (Is::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, raw(&aligned[0])),
            (Is::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, raw(&aligned[1])),
            (Is::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, raw(&aligned[2])),
            (Is::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, raw(&aligned[2])),
        ];
        let set = |(which, (at, bytes))| {
            // SAFETY: the descriptor is alive, and copies the number.
            let set = unsafe { result::set_matmul_pref_attribute(wish, which, at, bytes) };
            called(set, "cublasLtMatmulPreferenceSetAttribute")
        };
        let [a, b, c] = layouts;
        let found = all.into_iter().try_for_each(set).and_then(|()| {
            // SAFETY: all descriptors are alive.
            let found = unsafe {
                result::get_matmul_algo_heuristic(self.handle, product, a, b, c, c, wish)
            };
            if found.as_ref().is_err_and(|e| e.0 == NONE) {
                return Ok(None);
            }
            let what = format!("cublasLtMatmulAlgoGetHeuristic of {}x{}x{}", k.m, k.n, k.k);
            called(found, &what).map(|found| Some(found.algo))
        });
        // SAFETY: made above, and used no more.
        let _ = unsafe { result::destroy_matmul_pref(wish) };
        found
    }
}

/// # Safety
/// Both are used no more.
unsafe fn destroy(product: sys::cublasLtMatmulDesc_t, layouts: [sys::cublasLtMatrixLayout_t; 3]) {
    // SAFETY: by the caller.
    unsafe {
        for l in layouts {
            let _ = result::destroy_matrix_layout(l);
        }
        let _ = result::destroy_matmul_desc(product);
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        let _ = self.stream.wait();
        for p in self.known.values().flatten() {
            // SAFETY: made by `make`, and no queued work uses them any more.
            unsafe { destroy(p.product, p.layouts) };
        }
        // SAFETY: made by `open`.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}
