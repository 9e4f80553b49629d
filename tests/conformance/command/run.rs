//! `sqlock run`: a command under a lease.

use crate::support::command::run;
use crate::support::empty;

#[tokio::test]
async fn run_passes_stdout_and_exit_code() {
    let db = empty().await;
    let ended = run(&db, &["run", "job", "--", "sh", "-c", "echo $SQLOCK_NAME; exit 3"]).await.expect(3);
    assert_eq!(ended.stdout, "job\n");
    assert_eq!(ended.stderr, "");
}
