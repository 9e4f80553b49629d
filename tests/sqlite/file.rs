//! A file that another one replaces while clients use it.
//!
//! Promises: 1.

use std::fs::{remove_file, rename};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use sqlock::LossCause;
use sqlx::AssertSqlSafe;

use crate::support::{LONG, TestDatabase, fresh, soon};

fn path(db: &TestDatabase) -> PathBuf {
    let (path, _) = db.url.trim_start_matches("sqlite://").split_once('?').expect("a path");
    path.into()
}

fn at(path: &Path) -> TestDatabase {
    TestDatabase::at(format!("sqlite://{}?mode=rwc", path.display()))
}

/// Puts another file with empty tables in the place of this one, and deletes the files that belong
/// to the old one. Meanwhile nobody writes: a journal would be applied to the new file.
async fn replace(db: &TestDatabase) {
    let (path, other) = (path(db), path(db).with_extension("new"));
    at(&other).locks().await.migrate().await.expect("migrate");
    let tx = db.pool_of(1).await.begin_with("BEGIN IMMEDIATE").await.expect("the write lock");
    for suffix in ["wal", "shm"] {
        let _ = remove_file(format!("{}-{suffix}", path.display()));
    }
    rename(&other, &path).expect("in one directory");
    tx.rollback().await.expect("the end of it");
}

#[tokio::test]
async fn lease_in_a_replaced_file_is_lost() {
    for mode in ["WAL", "DELETE"] {
        let db = fresh().await;
        let pool = db.pool_of(1).await;
        sqlx::query(AssertSqlSafe(format!("PRAGMA journal_mode = {mode}"))).execute(&pool).await.expect(mode);
        pool.close().await;
        let (ours, theirs) = (db.locks().await, db.locks().await);
        let lease = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
        replace(&db).await;
        let next = soon("the grant", theirs.lease("a").ttl(LONG).acquire()).await.expect("acquire");
        assert_eq!(soon("the loss", lease.lost()).await, LossCause::Superseded, "{mode}");
        // The client goes on in the new file.
        assert!(ours.lease("a").try_acquire().await.expect("try").is_none(), "{mode}");
        ours.lease("b").acquire().await.expect("acquire").release().await.expect("ours to the end");
        next.release().await.expect("theirs to the end");
    }
}

#[tokio::test]
async fn replaced_file_with_rollback_journal_blocks_no_client() {
    let db = fresh().await;
    let locks = db.locks().await;
    locks.lease("a").acquire().await.expect("acquire").release().await.expect("release");
    replace(&db).await;
    let lease = soon("the grant", locks.lease("a").acquire()).await.expect("acquire");
    lease.release().await.expect("release");
}

#[tokio::test]
async fn lease_behind_a_redirected_link_is_lost() {
    let (old, new) = (fresh().await, fresh().await);
    let [link, other] = ["link.db", "other.db"].map(|name| path(&old).with_file_name(name));
    symlink(path(&old), &link).expect("a link");
    let locks = at(&link).locks().await;
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    symlink(path(&new), &other).expect("a link");
    rename(&other, &link).expect("in one directory");
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Superseded);
}
