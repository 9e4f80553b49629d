use std::time::Duration;

use sqlx::sqlite::SqliteRow;
use sqlx::{Connection as _, Executor as _, Row as _, SqliteConnection};
use tempfile::TempDir;
use tokio::time::timeout;

use super::super::differential::open;
use super::super::fence::fence;
use super::execute;
use crate::backend::fence::{FenceCheck, FenceOutcome};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{
    AcquisitionId, Claim, ClientId, CurrentHolder, Enqueue, Holder, HolderChange, Mode, Release, ReleaseOutcome,
    Request, Response, Seen, Transition,
};
use crate::token::FencingToken;

const TTL: Duration = Duration::from_secs(30);
const CLIENT: ClientId = ClientId::from_u128(1);

/// Opens two connections to a temporary file.
async fn two_connections() -> (TempDir, SqliteConnection, SqliteConnection) {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("store.db");
    let (one, other) = (open(&file).await, open(&file).await);
    (directory, one, other)
}

fn claim(name: &str, id: u128, mode: Mode) -> Claim {
    Claim {
        name: LockName::new(name).expect("a name"),
        id: AcquisitionId::from_u128(id),
        owner: Owner::random(),
        client: CLIENT,
        is_renewed: true,
        mode,
        ttl: TTL,
        holder: "store/1".into(),
        label: "".into(),
    }
}

fn release(claim: &Claim, token: FencingToken) -> Request {
    let (name, id) = (claim.name.clone(), claim.id);
    Request::Release(Release { name, id, token, keep_for: Duration::ZERO, next: None })
}

fn enqueue(claims: impl IntoIterator<Item = Claim>) -> Request {
    let age = Duration::ZERO;
    Request::Enqueue(claims.into_iter().map(|claim| Enqueue { claim, age }).collect())
}

async fn acquire(conn: &mut SqliteConnection, claim: &Claim) -> FencingToken {
    let response = execute(conn, &Request::Acquire(claim.clone())).await.expect("an answer");
    let Response::Acquired(Ok(token)) = response else { panic!("{response:?}") };
    token
}

/// Returns whether a connection gets the write lock at once.
async fn can_write(conn: &mut SqliteConnection) -> bool {
    conn.execute("PRAGMA busy_timeout = 0").await.expect("the setting");
    let begun = conn.execute("BEGIN IMMEDIATE; ROLLBACK").await.is_ok();
    conn.execute("PRAGMA busy_timeout = 5000").await.expect("the setting");
    begun
}

#[tokio::test]
async fn text_ends_with_its_first_row() {
    let (_directory, mut conn, _) = two_connections().await;
    let text = "SELECT 1 AS number; DELETE FROM sqlock_client; SELECT 2 AS number";
    conn.execute("INSERT INTO sqlock_client (id, beat_at) VALUES ('1', 0)").await.expect("a row");
    let row = super::until_row(&mut conn, sqlx::query(text)).await.expect("an answer").expect("a row");
    assert_eq!(row.try_get::<i64, _>(0).expect("a number"), 1);
    let left: Vec<SqliteRow> = conn.fetch_all("SELECT 1 FROM sqlock_client").await.expect("rows");
    assert_eq!(left.len(), 1, "the statements after the first row are not carried out");
}

#[tokio::test]
async fn refused_claim_needs_no_write_lock() {
    let (_directory, mut conn, mut writer) = two_connections().await;
    acquire(&mut conn, &claim("held", 1, Mode::Exclusive)).await;
    acquire(&mut conn, &claim("shared", 2, Mode::READ)).await;
    execute(&mut conn, &enqueue([claim("awaited", 3, Mode::Exclusive)])).await.expect("an answer");
    conn.execute("PRAGMA busy_timeout = 0").await.expect("the setting");
    writer.execute("BEGIN IMMEDIATE").await.expect("a transaction");
    for (name, mode, is_valid) in [
        ("held", Mode::Exclusive, true),
        ("held", Mode::READ, true),
        ("shared", Mode::Exclusive, false),
        ("awaited", Mode::Exclusive, false),
        ("awaited", Mode::READ, false),
    ] {
        let response = execute(&mut conn, &Request::Acquire(claim(name, 9, mode))).await.expect("an answer");
        let Response::Acquired(Err(holder)) = response else { panic!("{response:?}") };
        assert_eq!(matches!(holder, CurrentHolder::Valid { .. }), is_valid, "{name}: {holder:?}");
    }
    let refused = execute(&mut conn, &Request::Acquire(claim("shared", 9, Mode::READ))).await.expect_err("busy");
    let code = refused.as_database_error().and_then(|error| error.code().map(String::from));
    assert_eq!(code.as_deref(), Some("5"), "SQLITE_BUSY");
    writer.execute("ROLLBACK").await.expect("the end of it");
    acquire(&mut conn, &claim("shared", 9, Mode::READ)).await;
}

#[tokio::test]
async fn failed_text_leaves_no_transaction() {
    let (_directory, mut conn, mut other) = two_connections().await;
    let reject = "CREATE TRIGGER reject BEFORE INSERT ON sqlock_entry BEGIN SELECT RAISE(ABORT, 'rejected'); END";
    conn.execute(reject).await.expect("a trigger");
    execute(&mut conn, &enqueue([claim("a", 1, Mode::Exclusive)])).await.expect_err("rejected");
    execute(&mut conn, &Request::Acquire(claim("a", 2, Mode::READ))).await.expect_err("rejected");
    assert!(can_write(&mut other).await, "no transaction is open");
    let rows = other.fetch_all("SELECT 1 FROM sqlock_lease").await.expect("rows");
    assert!(rows.is_empty(), "nothing was written");
    // SQLite ends the transaction by itself.
    conn.execute("DROP TRIGGER reject").await.expect("no trigger");
    conn.execute(reject.replace("ABORT", "ROLLBACK").leak() as &'static str).await.expect("a trigger");
    execute(&mut conn, &enqueue([claim("a", 1, Mode::Exclusive)])).await.expect_err("rejected");
    conn.execute("DROP TRIGGER reject").await.expect("no trigger");
    execute(&mut conn, &enqueue([claim("a", 1, Mode::Exclusive)])).await.expect("an answer");
    assert!(can_write(&mut other).await, "no transaction is open");
}

#[tokio::test]
async fn dropped_request_leaves_no_transaction() {
    let (_directory, mut conn, mut other) = two_connections().await;
    for round in 0..400_u64 {
        // The drop comes directly after the request was sent, or at any later moment.
        let soon = Duration::from_micros(round % 40 * 25);
        let name = format!("name {round}");
        let first = claim(&name, 1, Mode::Exclusive);
        let second = claim(&name, 2, Mode::Exclusive);
        let requests: Vec<Request> = match round % 4 {
            0 => vec![Request::Acquire(claim(&name, 1, Mode::READ))],
            1 => vec![enqueue([first.clone(), second.clone()])],
            2 => {
                let token = acquire(&mut conn, &first).await;
                vec![enqueue([second.clone()]), release(&first, token)]
            }
            _ => {
                execute(&mut conn, &enqueue([first.clone()])).await.expect("an answer");
                vec![Request::Transition(Transition {
                    name: first.name.clone(),
                    seen: Seen { holder: Holder::Nobody, token: 0, waiting: 0 },
                    given_up: None,
                    expired: Vec::new(),
                    change: HolderChange::Exclusive(crate::protocol::Grantee { id: first.id, ttl: TTL }),
                    is_last: true,
                })]
            }
        };
        for request in &requests {
            let _ = timeout(soon, execute(&mut conn, request)).await;
            // The connection carries out the earlier statements. After them, no transaction is open
            // on either connection.
            conn.ping().await.expect("the connection");
            assert!(can_write(&mut other).await, "round {round}: {request:?}");
        }
        let marks = "SELECT 1 FROM sqlock_lease AS l WHERE token < 0 OR id = 'entries' AND NOT EXISTS
                       (SELECT 1 FROM sqlock_entry AS e WHERE e.name = l.name AND e.token > 0)";
        assert!(other.fetch_all(marks).await.expect("rows").is_empty(), "round {round}: half a request");
    }
}

#[tokio::test]
async fn entries_of_one_millisecond_keep_arrival_order() {
    let (_directory, mut conn, mut other) = two_connections().await;
    let mut ids: Vec<u128> = (1..=60).collect();
    ids.reverse();
    for pair in ids.chunks(2) {
        let entries = pair.iter().map(|id| claim("a", *id, Mode::Exclusive));
        execute(&mut conn, &enqueue(entries)).await.expect("an answer");
        std::mem::swap(&mut conn, &mut other);
    }
    let read = Request::Read { name: LockName::new("a").expect("a name"), limit: 100 };
    let Response::Read(Some(queue)) = execute(&mut conn, &read).await.expect("an answer") else { panic!("a queue") };
    let found: Vec<AcquisitionId> = queue.waiting().map(|entry| entry.id).collect();
    assert_eq!(found, ids.into_iter().map(AcquisitionId::from_u128).collect::<Vec<_>>());
}

#[tokio::test]
async fn released_name_goes_to_the_first_live_entry() {
    let (_directory, mut conn, _) = two_connections().await;
    let (first, dead, next) =
        (claim("a", 1, Mode::Exclusive), claim("a", 2, Mode::Exclusive), claim("a", 3, Mode::Exclusive));
    let token = acquire(&mut conn, &first).await;
    execute(&mut conn, &enqueue([dead, next.clone()])).await.expect("an answer");
    let expire = format!("UPDATE sqlock_entry SET expires_at = 0 WHERE id = '{}'", AcquisitionId::from_u128(2));
    conn.execute(&*expire.leak() as &'static str).await.expect("a write");
    let response = execute(&mut conn, &release(&first, token)).await.expect("an answer");
    let Response::Released(ReleaseOutcome::ToEntry(granted)) = response else { panic!("{response:?}") };
    assert_eq!(granted.id, next.id);
    let row = conn.fetch_one("SELECT holder, acquired_at FROM sqlock_lease").await.expect("a row");
    assert_eq!(row.try_get::<String, _>(0).expect("a text"), "store/1", "who holds, for people");
    assert!(row.try_get::<i64, _>(1).expect("a number") > 0);
}

#[tokio::test]
async fn fenced_holding_stays_until_the_transaction_ends() {
    let (_directory, mut conn, mut fenced) = two_connections().await;
    for mode in [Mode::Exclusive, Mode::READ] {
        let claim = claim(&format!("{mode:?}"), 1, mode);
        let token = acquire(&mut conn, &claim).await;
        let (name, id) = (claim.name.to_string(), claim.id.to_string());
        let check = FenceCheck { name, id, token: token.get(), is_multi_primary: false };
        fenced.execute("BEGIN").await.expect("a transaction");
        assert_eq!(fence(&mut fenced, &check).await.expect("an answer"), FenceOutcome::Fenced);
        assert!(!can_write(&mut conn).await, "nobody else writes");
        fenced.execute("COMMIT").await.expect("the end of it");
        // A transaction that has read before another has committed.
        fenced.execute("BEGIN").await.expect("a transaction");
        fenced.fetch_all("SELECT 1 FROM sqlock_lease").await.expect("rows");
        let response = execute(&mut conn, &release(&claim, token)).await.expect("an answer");
        assert_eq!(response, Response::Released(ReleaseOutcome::Ended { awaited: false }));
        assert_eq!(fence(&mut fenced, &check).await.expect("an answer"), FenceOutcome::StaleSnapshot);
        fenced.execute("ROLLBACK").await.expect("the end of it");
        assert_eq!(fence(&mut fenced, &check).await.expect("an answer"), FenceOutcome::NoTransaction);
        fenced.execute("BEGIN").await.expect("a transaction");
        assert_eq!(fence(&mut fenced, &check).await.expect("an answer"), FenceOutcome::Superseded);
        fenced.execute("ROLLBACK").await.expect("the end of it");
    }
}
