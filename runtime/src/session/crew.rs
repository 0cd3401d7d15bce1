//! What the ranks of this process are doing, for those who ask when the job fails.

use crate::alarm::Alarm;
use crate::control::Witness;
use crate::flight::Flight;
use crate::wiring::Wiring;
use std::path::PathBuf;
use std::sync::Arc;

/// What the ranks of this process are doing.
pub(super) struct Crew {
    pub wiring: Arc<Wiring>,
    pub flights: Vec<(usize, Arc<Flight>)>,
    pub alarm: Arc<Alarm>,
    pub records: PathBuf,
}

impl Witness for Crew {
    fn whereabouts(&self) -> String {
        let waits = self.alarm.waits();
        let oldest = self.alarm.oldest();
        let one =
            |(rank, f): &(usize, Arc<Flight>)| f.whereabouts(&self.wiring, *rank, &waits, oldest);
        self.flights.iter().map(one).collect::<Vec<_>>().join("; ")
    }
    #[expect(clippy::disallowed_methods, reason = "a folder of ours, of a job that has failed")]
    fn record(&self) -> Option<String> {
        std::fs::create_dir_all(&self.records).ok()?;
        for (rank, f) in &self.flights {
            let file = self.records.join(format!("rank-{rank:05}.txt"));
            std::fs::write(file, f.lines(&self.wiring, *rank)).ok()?;
        }
        Some(self.records.display().to_string())
    }
}
