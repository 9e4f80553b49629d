//! Notes of holders about their work.

use std::time::Duration;

use sqlock::{Error, Locks, LossCause, Owner};
use sqlx::{AssertSqlSafe, Pool};

use crate::Sql;
use crate::support::{LONG, fresh, soon, until};

/// Returns the note of the holder, by inspection.
async fn noted(locks: &Locks, name: &str) -> Option<String> {
    locks.inspect(name).await.expect("inspect").expect("held").note
}

async fn last(locks: &Locks, name: &str) -> Option<String> {
    locks.last_note(name).await.expect("read")
}

async fn stored(pool: &Pool<Sql>) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM sqlock_note").fetch_one(pool).await.expect("count the notes")
}

#[tokio::test]
async fn note_is_shown_until_the_next_holder() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    assert_eq!(last(&theirs, "a").await, None, "a name that nobody ever asked for");
    let lease = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    assert_eq!(noted(&theirs, "a").await, None);
    lease.set_note("page 1").await.expect("note");
    assert_eq!(noted(&theirs, "a").await.as_deref(), Some("page 1"));
    lease.set_note("page 2: 'ünïcode' \\ \"quoted\"\n%").await.expect("note");
    assert_eq!(noted(&theirs, "a").await.as_deref(), Some("page 2: 'ünïcode' \\ \"quoted\"\n%"));
    assert_eq!(theirs.list("").await.expect("list")[0].note, noted(&theirs, "a").await);
    lease.set_note("").await.expect("note");
    assert_eq!(noted(&theirs, "a").await.as_deref(), Some(""));
    lease.set_note(String::from("page 3")).await.expect("note");
    lease.release().await.expect("release");
    assert_eq!(theirs.inspect("a").await.expect("inspect"), None);
    assert_eq!(last(&theirs, "a").await.as_deref(), Some("page 3"), "it stays for the next holder");

    let next = theirs.lease("a").ttl(LONG).acquire().await.expect("acquire");
    assert_eq!((noted(&ours, "a").await, last(&ours, "a").await), (None, None));
    next.set_note("from the beginning").await.expect("note");
    assert_eq!(last(&ours, "a").await.as_deref(), Some("from the beginning"));
    assert!(matches!(ours.last_note("").await, Err(Error::InvalidName { .. })));
}

#[tokio::test]
async fn evicted_or_expired_holder_cannot_write_notes() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let evicted = ours.lease("a").ttl(LONG).renew(false).acquire().await.expect("acquire");
    evicted.set_note("before").await.expect("note");
    assert!(theirs.evict("a", evicted.token()).await.expect("evict"));
    assert!(evicted.is_held(), "no heartbeat tells it");
    let error = evicted.set_note("after").await.expect_err("evicted");
    assert!(matches!(error, Error::Lost { cause: LossCause::Superseded, .. }), "{error}");
    assert_eq!(last(&theirs, "a").await.as_deref(), Some("before"));
    assert_eq!(soon("the loss", evicted.lost()).await, LossCause::Superseded);

    let expired = ours.lease("b").ttl(Duration::from_millis(200)).renew(false).acquire().await.expect("acquire");
    soon("the loss", expired.lost()).await;
    assert!(expired.set_note("after").await.expect_err("expired").is_lost());
    assert_eq!(last(&theirs, "b").await, None);
}

#[tokio::test]
async fn expiry_in_the_database_refuses_note() {
    let db = fresh().await;
    let (locks, pool) = (db.locks().await, db.pool().await);
    for request in [locks.lease("a"), locks.lease("a").shared()] {
        let lease = request.ttl(LONG).renew(false).acquire().await.expect("acquire");
        for table in ["sqlock_lease", "sqlock_entry"] {
            let sql = format!("UPDATE {table} SET expires_at = 1");
            sqlx::query(AssertSqlSafe(sql)).execute(&pool).await.expect("update");
        }
        assert!(lease.set_note("late").await.expect_err("the row has expired").is_lost());
        let _ = lease.release().await;
    }
    assert_eq!(stored(&pool).await, 0);
}

#[tokio::test]
async fn each_sharing_holder_has_its_own_note() {
    let db = fresh().await;
    let (ours, theirs, pool) = (db.locks().await, db.locks().await, db.pool().await);
    let first = ours.lease("a").ttl(LONG).shared().acquire().await.expect("acquire");
    let second = theirs.lease("a").ttl(LONG).shared().acquire().await.expect("acquire");
    first.set_note("one").await.expect("note");
    second.set_note("two").await.expect("note");
    let notes = async || {
        let holders = ours.holders("a").await.expect("holders");
        holders.into_iter().map(|held| held.note).collect::<Vec<_>>()
    };
    assert_eq!(notes().await, [Some("one".into()), Some("two".into())]);
    let shown = "SELECT note FROM sqlock_holders WHERE name = 'a' ORDER BY token";
    let shown: Vec<Option<String>> = sqlx::query_scalar(shown).fetch_all(&pool).await.expect("the view");
    assert_eq!(shown, notes().await);
    // A sweeper leaves the notes of all holders.
    ours.sweeper().retention(Duration::ZERO).sweep().await.expect("sweep");
    assert_eq!(notes().await, [Some("one".into()), Some("two".into())]);
    second.release().await.expect("release");
    assert_eq!(notes().await, [Some("one".into())]);
    first.set_note("one more").await.expect("an older token that still holds");
    assert_eq!(notes().await, [Some("one more".into())]);
    first.release().await.expect("release");

    let permit = ours.semaphore("s", 2).ttl(LONG).acquire().await.expect("acquire");
    permit.set_note("a permit").await.expect("note");
    assert_eq!(noted(&theirs, "s").await.as_deref(), Some("a permit"));
}

#[tokio::test]
async fn reentrant_and_converted_leases_keep_one_note() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let owner = Owner::random();
    let outer = ours.lease("a").ttl(LONG).owner(owner).acquire().await.expect("acquire");
    let inner = theirs.lease("a").ttl(LONG).owner(owner).acquire().await.expect("acquire");
    outer.set_note("outer").await.expect("note");
    inner.set_note("inner").await.expect("note");
    assert_eq!(noted(&ours, "a").await.as_deref(), Some("inner"));
    inner.release().await.expect("release");
    let mut outer = outer;
    outer.downgrade().await.expect("downgrade");
    assert_eq!(noted(&theirs, "a").await.as_deref(), Some("inner"));
    outer.set_note("shared").await.expect("note");
    let resumed = theirs.resume(outer.export().expect("export")).await.expect("resume");
    assert_eq!(noted(&ours, "a").await.as_deref(), Some("shared"));
    resumed.set_note("resumed").await.expect("note");
    assert_eq!(noted(&ours, "a").await.as_deref(), Some("resumed"));
}

#[tokio::test]
async fn note_has_bounds() {
    let db = fresh().await;
    let locks = db.locks().await;
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let longest = "é".repeat(2048);
    lease.set_note(longest.as_str()).await.expect("4096 bytes");
    assert_eq!(noted(&locks, "a").await, Some(longest.clone()));
    let error = lease.set_note(longest.clone() + "!").await.expect_err("too long");
    assert!(matches!(error, Error::NoteTooLong { bytes: 4097 }), "{error}");
    let error = lease.set_note("a\0b").await.expect_err("no text of a database");
    assert!(matches!(error, Error::NulInNote), "{error}");
    assert_eq!(noted(&locks, "a").await, Some(longest));
}

#[tokio::test]
async fn fenced_holder_can_write_notes() {
    let db = fresh().await;
    let (locks, pool) = (db.locks().await, db.pool().await);
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut tx = pool.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    if crate::DATABASE != crate::support::Database::Sqlite {
        soon("the note", lease.set_note("fenced")).await.expect("note");
        assert_eq!(noted(&locks, "a").await.as_deref(), Some("fenced"));
    }
    tx.commit().await.expect("commit");
    lease.set_note("free").await.expect("note");
    lease.release().await.expect("release");
}

#[tokio::test]
async fn note_replaces_those_of_former_holders() {
    let db = fresh().await;
    let (ours, theirs, pool) = (db.locks().await, db.locks().await, db.pool().await);
    let other = ours.lease("b").ttl(LONG).acquire().await.expect("acquire");
    other.set_note("another name").await.expect("note");
    for holder in 0..3 {
        let lease = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
        let before = (holder > 0).then(|| format!("{} ends", holder - 1));
        assert_eq!(
            (last(&theirs, "a").await, stored(&pool).await),
            (None, 1 + i64::from(holder > 0)),
            "after {before:?}"
        );
        lease.set_note(format!("{holder} begins")).await.expect("note");
        lease.set_note(format!("{holder} ends")).await.expect("note");
        lease.release().await.expect("release");
        assert_eq!(last(&theirs, "a").await, Some(format!("{holder} ends")));
        assert_eq!(stored(&pool).await, 2, "one of each name");
    }

    // Current holders keep their notes.
    let first = ours.lease("a").ttl(LONG).shared().acquire().await.expect("acquire");
    let second = theirs.lease("a").ttl(LONG).shared().acquire().await.expect("acquire");
    let third = theirs.lease("a").ttl(LONG).shared().acquire().await.expect("acquire");
    second.set_note("second").await.expect("note");
    first.set_note("first").await.expect("note");
    third.set_note("third").await.expect("note");
    let holders = ours.holders("a").await.expect("holders");
    let notes: Vec<_> = holders.into_iter().filter_map(|held| held.note).collect();
    assert_eq!(notes, ["first", "second", "third"]);
    first.release().await.expect("release");
    third.set_note("third goes on").await.expect("note");
    let fourth = ours.lease("a").ttl(LONG).shared().acquire().await.expect("acquire");
    fourth.set_note("fourth").await.expect("note");
    assert_eq!(stored(&pool).await, 4, "second, third, fourth, and that of the other name");
}

#[tokio::test]
async fn sweep_deletes_notes_of_former_holders() {
    let db = fresh().await;
    let (locks, pool) = (db.locks().await, db.pool().await);
    for name in ["a", "b", "c"] {
        let lease = locks.lease(name).ttl(LONG).acquire().await.expect("acquire");
        lease.set_note(name).await.expect("note");
        lease.release().await.expect("release");
    }
    // The next holder of this one writes none.
    locks.lease("c").ttl(LONG).acquire().await.expect("acquire").release().await.expect("release");
    assert_eq!(stored(&pool).await, 3);
    assert_eq!(locks.sweeper().batch(1).sweep().await.expect("sweep"), 0, "the names are remembered for an hour");
    assert_eq!(stored(&pool).await, 2, "that of the latest holder of each name");
    for (name, note) in [("a", Some("a")), ("b", Some("b")), ("c", None)] {
        assert_eq!(last(&locks, name).await.as_deref(), note);
    }
    // The state after an earlier sweeper that did not delete the notes.
    sqlx::query("DELETE FROM sqlock_lease WHERE name <> 'a'").execute(&pool).await.expect("delete");
    locks.sweeper().sweep().await.expect("sweep");
    assert_eq!(stored(&pool).await, 1, "names without a row have no notes");
    until("the purge", async || locks.sweeper().retention(Duration::ZERO).sweep().await.expect("sweep") > 0).await;
    assert_eq!((stored(&pool).await, last(&locks, "a").await), (0, None));
}
