//! Three nodes elect a leader. The leader is killed with `kill -9`, and another node takes over;
//! then the new leader resigns.
//!
//! The leader writes a journal, each entry in a fenced transaction. The journal shows that no two
//! nodes led at the same time: its fencing tokens only rise.
//!
//! ```text
//! cargo run --example leader_election
//! DATABASE_URL=postgres://… cargo run --all-features --example leader_election
//! ```

mod shared;

use shared::*;

const TTL: Duration = Duration::from_secs(2);

any_database! {
    /// Runs a node: it joins the election, leads until it loses the lease, and joins again. It
    /// resigns when its stdin ends.
    async fn node(pool: Pool<Db>, name: &str) -> Result<()> {
        let locks = Locks::new(pool.clone());
        let election = locks.election("leader_election/node").ttl(TTL).label(name);
        tokio::select! {
            led = async {
                loop {
                    let leadership = election.campaign().await?;
                    println!("{name} leads");
                    if let Err(error) = lead(&pool, &leadership, name).await {
                        println!("{name} is deposed: {error}");
                    }
                }
            } => led,
            () = until_stdin_ends() => {
                println!("{name} goes");
                Ok(locks.shutdown().await?)
            }
        }
    }

    /// Does the leader's work until a fence fails.
    async fn lead(pool: &Pool<Db>, leadership: &Lease, name: &str) -> Result<()> {
        loop {
            let mut tx = pool.begin().await?;
            leadership.fence(&mut tx).await?;
            let entry = format!(
                "INSERT INTO sqlock_example_term (entry, token, node)
                 SELECT COALESCE(MAX(entry), 0) + 1, {}, '{name}' FROM sqlock_example_term",
                leadership.token(),
            );
            sqlx::query(sqlx::AssertSqlSafe(entry)).execute(&mut *tx).await?;
            tx.commit().await?;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn example(pool: Pool<Db>, database: &Database) -> Result<()> {
        if let Some([name]) = arguments().as_deref() {
            return node(pool, name).await;
        }
        let locks = Locks::new(pool.clone());
        let turn = take_turns(&locks, "leader_election").await?;
        sqlx::query("DROP TABLE IF EXISTS sqlock_example_term").execute(&pool).await?;
        sqlx::query("CREATE TABLE sqlock_example_term (entry BIGINT PRIMARY KEY, token BIGINT, node VARCHAR(20))")
            .execute(&pool)
            .await?;

        let election = locks.election("leader_election/node");
        let mut changes = election.changes().every(Duration::from_millis(50));
        let mut nodes = Vec::new();
        for name in ["alpha", "beta", "gamma"] {
            nodes.push(Node { name, process: database.process(name)? });
        }
        let first = next_leader(&mut changes).await?;
        let start = Instant::now();
        find(&mut nodes, &first)?.process.kill().await?; // with -9
        println!("{first} was killed");
        let second = next_leader(&mut changes).await?;
        println!("{second} took over after {:.1?}; the TTL is {TTL:?}", start.elapsed());
        let start = Instant::now();
        drop(find(&mut nodes, &second)?.process.stdin.take());
        let third = next_leader(&mut changes).await?;
        println!("{third} took over from {second}, which resigned, after {:.1?}", start.elapsed());
        for mut node in nodes {
            drop(node.process.stdin.take());
            node.process.wait().await?;
        }

        let journal: Vec<(i64, String)> =
            sqlx::query_as("SELECT token, node FROM sqlock_example_term ORDER BY entry").fetch_all(&pool).await?;
        sqlx::query("DROP TABLE sqlock_example_term").execute(&pool).await?;
        turn.release().await?;
        locks.shutdown().await?;
        if !journal.is_sorted_by_key(|(token, _)| token) {
            return Err(format!("two have led at a time: {journal:?}").into());
        }
        let mut leaders: Vec<_> = journal.into_iter().map(|(_, node)| node).collect();
        let entries = leaders.len();
        leaders.dedup();
        println!("The journal has {entries} entries, and its leaders one after the other: {}.", leaders.join(", "));
        Ok(())
    }

    struct Node {
        name: &'static str,
        process: tokio::process::Child,
    }

    fn find<'a>(nodes: &'a mut [Node], name: &str) -> Result<&'a mut Node> {
        Ok(nodes.iter_mut().find(|node| node.name == name).ok_or("a leader that is no candidate")?)
    }

    /// Waits for a new leader.
    async fn next_leader(changes: &mut sqlock::election::Changes) -> Result<String> {
        loop {
            let change = tokio::time::timeout(Duration::from_secs(60), changes.next());
            if let Some(leader) = change.await.map_err(|_| "there is no new leader")?? {
                return Ok(leader.label);
            }
        }
    }
}
