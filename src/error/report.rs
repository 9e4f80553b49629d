//! Texts of errors: the message with those of its sources, and durations in it.

use std::error::Error as StdError;
use std::time::Duration;

/// Joins the messages of an error and of its sources. Skips a message with which the previous one
/// ends, as in sqlx.
pub(crate) fn report(error: &(dyn StdError + 'static)) -> String {
    let mut report = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let message = source.to_string();
        if !report.ends_with(&message) {
            report = format!("{report}: {message}");
        }
        next = source.source();
    }
    report
}

/// Returns the reason of a request that was not answered within this time.
pub(crate) fn no_answer_within(within: Duration) -> String {
    format!("no answer came within {:?}", rounded(within))
}

/// Rounds a duration for messages.
pub(crate) fn rounded(duration: Duration) -> Duration {
    match duration.as_millis() {
        0 => duration,
        _ => Duration::new(duration.as_secs(), duration.subsec_millis() * 1_000_000),
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, reason = "tests")]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::{ConcurrentChange, Error, FenceError, LossCause, RowError};
    use crate::name::LockName;
    use crate::token::FencingToken;

    /// Returns an error of every variant that has a source or names another error.
    fn errors() -> Vec<(Error, &'static str)> {
        let refused = || sqlx::Error::Protocol("no such thing".into());
        let broken = || sqlx::Error::Io(std::io::Error::other("broken pipe"));
        let name = || LockName::new("a").expect("a name");
        let token = FencingToken::new(7).expect("a token");
        let json = || serde_json::from_str::<u8>("x").expect_err("no number");
        vec![
            (Error::Timeout { name: name(), waited: Duration::ZERO }, "timed out after 0ns waiting for \"a\""),
            (Error::Lost { name: name(), token, cause: LossCause::Expired }, "it expired before it was renewed"),
            (
                Error::SessionLost { name: name(), cause: LossCause::Disconnected },
                "its connection to the database was lost",
            ),
            (Error::from_sqlx("acquire", broken()), "broken pipe"),
            (Error::Unavailable { attempted: "acquire", reason: "no answer".into(), source: None }, "no answer"),
            (
                Error::Unavailable { attempted: "acquire", reason: "busy".into(), source: Some(refused()) },
                "busy: encountered unexpected or invalid data: no such thing",
            ),
            (Error::NotMigrated { source: refused() }, "no such thing"),
            (Error::Migrate { source: sqlx::migrate::MigrateError::Execute(refused()) }, "no such thing"),
            (Error::Database { attempted: "acquire", source: refused() }, "no such thing"),
            (Error::CommitUnknown { source: broken() }, "broken pipe"),
            (Error::Fence { name: name(), cause: FenceError::InSavepoint }, "as its first statement"),
            (Error::Row { table: "t".into(), cause: RowError::NoSuchRow }, "there is no row with this key"),
            (
                Error::Conflict { table: "t".into(), expected: Some(1), found: Some(2), cause: ConcurrentChange },
                "has updated, deleted or inserted the row",
            ),
            (Error::Sealed { attempted: "open", what: "the stored result", source: "no key".into() }, "no key"),
            (Error::Json { what: "a result", source: json() }, "expected value at line 1 column 1"),
        ]
    }

    #[test]
    fn message_does_not_repeat_that_of_its_source() {
        for (error, _) in errors() {
            let message = error.to_string();
            if let Some(source) = error.source() {
                let source = source.to_string();
                assert!(!message.contains(&source), "{message} / {source}");
            }
        }
    }

    #[test]
    fn report_has_every_message_once() {
        for (error, end) in errors() {
            let report = error.report().to_string();
            assert!(report.starts_with(&error.to_string()) && report.ends_with(end), "{report}");
            assert_eq!(report.matches(end).count(), 1, "{report}");
        }
    }

    #[test]
    fn anyhow_prints_the_reason_once() {
        let error = anyhow::Error::from(Error::from_sqlx("acquire", sqlx::Error::PoolClosed));
        let reason = sqlx::Error::PoolClosed.to_string();
        assert_eq!(format!("{error:#}"), format!("the database is unavailable while trying to acquire: {reason}"));
    }

    #[test]
    fn durations_are_rounded_to_milliseconds() {
        let shown = |nanos| format!("{:?}", rounded(Duration::from_nanos(nanos)));
        assert_eq!(shown(685_089_132), "685ms");
        assert_eq!(shown(12_000_999_999), "12s");
        assert_eq!(shown(8_000), "8µs");
        assert_eq!(rounded(Duration::MAX).as_secs(), u64::MAX);
    }
}
