//! Requests for shared leases whose futures are dropped.
//!
//! Promises: 9.

use super::*;

/// Checks that a future leaves nothing behind when it is dropped at any point: no share and no
/// entry.
async fn leaves_nothing(what: &str, act: impl AsyncFn(&CancelFixture, Point) -> bool) {
    let fixture = CancelFixture::new().await;
    let pool = fixture.db.pool_of(1).await;
    everywhere(async |point| {
        let done = act(&fixture, point).await;
        fixture.is_clean().await;
        until(what, async || places(&pool).await == 0).await;
        done
    })
    .await;
}

#[tokio::test]
async fn dropped_share_request_leaves_nothing_behind() {
    leaves_nothing("the end of its place", async |fixture, point| {
        drop_at(point, reading(&fixture.ours).acquire()).await.map(|lease| lease.expect("acquire")).is_some()
    })
    .await;
    leaves_nothing("the end of its place", async |fixture, point| {
        let tried = drop_at(point, reading(&fixture.ours).try_acquire()).await;
        tried.map(|lease| lease.expect("try").expect("free")).is_some()
    })
    .await;
}

#[tokio::test]
async fn dropped_waiting_share_request_leaves_nothing_behind() {
    leaves_nothing("the end of its place", async |fixture, point| {
        let holder = taken(writing(&fixture.theirs)).await;
        let leaves = tokio::spawn(async move {
            sleep(Duration::from_millis(20)).await;
            holder.release().await
        });
        let done =
            drop_at(point, reading(&fixture.ours).acquire()).await.map(|lease| lease.expect("acquire")).is_some();
        leaves.await.expect("no panic").expect("ours to the end");
        done
    })
    .await;
    leaves_nothing("the end of its place", async |fixture, point| {
        let holder = taken(writing(&fixture.theirs)).await;
        let request = reading(&fixture.ours).wait(Duration::from_millis(30));
        let done = drop_at(point, request.acquire()).await.map(|lease| lease.expect_err("held")).is_some();
        holder.release().await.expect("ours to the end");
        done
    })
    .await;
}

#[tokio::test]
async fn dropped_release_downgrade_or_resume_leaves_nothing() {
    leaves_nothing("the end of the share", async |fixture, point| {
        let lease = taken(reading(&fixture.ours)).await;
        drop_at(point, lease.release()).await.map(|verdict| verdict.expect("ours to the end")).is_some()
    })
    .await;
    leaves_nothing("the end of the share", async |fixture, point| {
        let mut lease = taken(writing(&fixture.ours)).await;
        let done = drop_at(point, lease.downgrade()).await.map(|verdict| verdict.expect("downgrade")).is_some();
        drop(lease);
        done
    })
    .await;
    leaves_nothing("the end of the share", async |fixture, point| {
        let exported = taken(reading(&fixture.theirs)).await.export().expect("export");
        let done = match drop_at(point, fixture.ours.resume(exported.clone())).await {
            Some(lease) => return lease.expect("resume").release().await.is_ok(),
            None => false,
        };
        fixture.ours.resume(exported).await.expect("it can be resumed again").release().await.expect("ours to the end");
        done
    })
    .await;
}
