//! Kimi K2 (Kimi Team, 2025): the model of DeepSeek-V3 under another name.

use super::*;

pub(super) const FAMILY: Family = Family { model_type: "kimi_k2", ..deepseek_v3::FAMILY };
