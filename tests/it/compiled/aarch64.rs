//! The printed kernels on another processor: by a cross compiler for aarch64, run by an emulator.

use super::*;
use shardc_ir::kernel::Rows;
use shardc_testing::{Tool, skip};
use std::process::{Command, Stdio};

/// Reads kernels with their memory from the standard input, runs them, and writes the memory: by 8-byte numbers, the
/// place in the table of kernels, parameters, tasks, operands, and of each of these the 4-byte words.
const MAIN: &str = r#"
#include <stdio.h>
#include <stdlib.h>
static word number(void) { word x; return fread(&x, 8, 1, stdin) == 1 ? x : -1; }
static char *words(word n) { char *x = malloc(4 * n + 64); if (fread(x, 4, n, stdin) != n) exit(3); return x; }
int main(void) {
    for (word k; (k = number()) >= 0;) {
        float *params = (float *)words(number());
        word tasks = number(), n = number(), size[64];
        char *m[64];
        for (word i = 0; i < n; i++) m[i] = words(size[i] = number());
        kernels[k](m, params, 0, tasks);
        for (word i = 0; i < n; i++) fwrite(m[i], 4, size[i], stdout);
    }
    return 0;
}
"#;

/// The one kernel of a program, if it is one that runs in one go.
fn alone(program: &[Kernel]) -> Option<&Rows> {
    match program {
        [Kernel::Rows(k)] if k.in_parts().is_none() => Some(k),
        _several => None,
    }
}

/// The same bits as here, where the interpreter runs them.
#[test]
fn printed_kernels_run_on_aarch64() {
    let cross = "aarch64-linux-gnu-gcc";
    let here = |tool: &str| Command::new(tool).arg("--version").output().is_ok();
    if !here(cross) || !here("qemu-aarch64-static") {
        skip(Tool::Aarch64, "kernels over rows would be compiled for aarch64, and run");
        return;
    }
    let (mesh, lab) = (Mesh::default(), crate::lab::Lab::new("aarch64"));
    let sizes = [(3, 5), (18, 100)];
    let all: Vec<(Func, usize)> =
        PROGRAMS.iter().flat_map(|p| sizes.map(|s| (function(p, s), s.1))).collect();
    let lower = |f: &Func| -> Vec<Kernel> {
        let all = launches(f);
        let one = |x| shardc_codegen::launch(&mesh, f, x, &[]).expect("a kernel");
        all.iter().map(one).collect()
    };
    let programs: Vec<Vec<Kernel>> = all.iter().map(|(f, _)| lower(f)).collect();
    let kernels: Vec<&Rows> = programs.iter().filter_map(|p| alone(p)).collect();
    assert!(kernels.len() > 30, "{} kernels are alone", kernels.len());
    let text = shardc_codegen::c::print(programs.iter().filter(|p| alone(p).is_some()).flatten());
    let table: Vec<&str> = kernels.iter().map(|k| &*k.symbol).collect();
    let table = format!(
        "\nstatic void (*kernels[])(char *const *, const float *, word, word) = {{{}}};\n",
        table.join(", ")
    );
    lab.write("kernels.c", text + &table + MAIN);
    // As on that processor, but for the flag that names the one at hand.
    let flags = ["-std=gnu11", "-O2", "-ffp-contract=off", "-ftree-vectorize", "-static"];
    let files = ["-o", "kernels", "kernels.c", "-lm"];
    let made = Command::new(cross).current_dir(&lab.0).args(flags).args(files).output();
    let made = made.expect("the compiler starts");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let (stream, mut next) = (Stream::new(6, "aarch64", 0), 0);
    let mut rng = || {
        next += 1;
        stream.uniform(next)
    };
    let (mut input, mut want) = (vec![], vec![]);
    let mut number = 0;
    for ((f, cols), program) in all.iter().zip(&programs) {
        let Some(k) = alone(program) else { continue };
        let args = draw(f, *cols, &mut rng);
        let memory = memory(f, &args);
        let x = &launches(f)[0];
        let operands: Vec<Value> = x.ins.iter().chain(&x.outs).copied().collect();
        let mut put = |n: usize| input.extend((n as u64).to_le_bytes());
        [number, k.params.len()].into_iter().for_each(&mut put);
        input.extend(k.params.iter().flat_map(|x| x.to_le_bytes()));
        let mut put = |n: usize| input.extend((n as u64).to_le_bytes());
        [k.tasks(), operands.len()].into_iter().for_each(&mut put);
        for v in &operands {
            let own = &memory[v.0 as usize];
            input.extend((own.len() as u64).to_le_bytes());
            input.extend(own.iter().flat_map(|x| x.to_le_bytes()));
        }
        number += 1;
        let interpreted = results(f, program, &args, None, 1, &[]);
        want.push((f, operands.iter().map(|v| memory[v.0 as usize].len()).collect(), interpreted));
    }
    let file = lab.write("input", input);
    let mut run = Command::new("qemu-aarch64-static");
    let run = run.arg(lab.path("kernels")).stdin(std::fs::File::open(file).expect("a file"));
    let out = run.stderr(Stdio::inherit()).output().expect("the emulator starts");
    assert!(out.status.success(), "{}", out.status);
    compare(&out.stdout, &want);
}

/// A function, the words of its operands, and what the interpreter makes of them.
type Wanted<'a> = (&'a Func, Vec<usize>, Vec<Vec<f32>>);

/// Bits of results beside those of the interpreter: of each function, the words of its operands. Powers are those of
/// the C library, whose last bit is not the same everywhere.
fn compare(found: &[u8], want: &[Wanted]) {
    let word = |w: &[u8]| u32::from_le_bytes(w.try_into().expect("4 bytes"));
    let mut words = found.chunks_exact(4).map(word);
    for (f, sizes, want) in want {
        let found: Vec<Vec<u32>> =
            sizes.iter().map(|&n| words.by_ref().take(n).collect()).collect();
        let x = &launches(f)[0];
        for (r, want) in f.results.iter().zip(bits(want)) {
            let mut all = x.ins.iter().chain(&x.outs);
            let at = all.position(|v| *v == r.value).expect("it is an operand");
            let most = if text_of(f).contains("pow[1.3]") { 1 } else { 0 };
            let near = found[at].iter().zip(&want).all(|(a, b)| a.abs_diff(*b) <= most);
            assert!(near && found[at].len() == want.len(), "{}", text_of(f));
        }
    }
    assert_eq!(words.next(), None);
}
