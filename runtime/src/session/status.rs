//! What the ranks of this process are doing, for those who ask when the job fails.

use crate::alarm::Alarm;
use crate::control::StatusSource;
use crate::flight_recorder::FlightRecorder;
use crate::wiring::Wiring;
use shardc_ir::diag::Diag;
use shardc_ir::files::make::Folder;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

/// What the ranks of this process are doing.
pub(super) struct RankStatus {
    pub wiring: Arc<Wiring>,
    pub recorders: Vec<(usize, Arc<FlightRecorder>)>,
    pub alarm: Arc<Alarm>,
    pub records: PathBuf,
}

impl RankStatus {
    /// Adds where the other ranks were when one failed.
    pub fn explain(&self, rank: usize, mut cause: Diag) -> Diag {
        /// More ranks than this are not listed.
        const LISTED: usize = 8;
        for (other, recorder) in self.recorders.iter().filter(|f| f.0 != rank).take(LISTED) {
            cause = cause.why(recorder.whereabouts(&self.wiring, *other, &[], None));
        }
        cause
    }
}

impl StatusSource for RankStatus {
    fn whereabouts(&self) -> String {
        let waits = self.alarm.waits();
        let oldest = self.alarm.oldest();
        let one = |(rank, f): &(usize, Arc<FlightRecorder>)| {
            f.whereabouts(&self.wiring, *rank, &waits, oldest)
        };
        self.recorders.iter().map(one).collect::<Vec<_>>().join("; ")
    }
    fn record(&self) -> Option<String> {
        let folder = Folder::at(&self.records).ok()?;
        for (rank, f) in &self.recorders {
            let (name, lines) = (format!("rank-{rank:05}.txt"), f.lines(&self.wiring, *rank));
            let new = |folder: &Folder, beside: &str| folder.file(beside);
            folder.replace(&name, new, |mut out| out.write_all(lines.as_bytes())).ok()?;
        }
        Some(self.records.display().to_string())
    }
}
