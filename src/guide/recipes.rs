//! Set-ups for actix, SeaORM, Diesel, `AnyPool` and a `search_path`; and the platforms.
//!
//! The example `service` is a complete axum service, with metrics, a probe and an orderly shutdown.
//!
//! # `AnyPool`
//!
//! [`Locks::new`](crate::Locks::new) needs to know the database, which an `AnyPool` hides. A URL
//! tells it:
//!
//! ```
//! # async fn example(url: &str) -> sqlock::Result<()> {
//! let locks = sqlock::Locks::connect(url).await?; // beside sqlx::AnyPool::connect(url)
//! # Ok(())
//! # }
//! ```
//!
//! A transaction of an `AnyPool` can neither be fenced nor lock rows. Open such transactions on a
//! pool of the database itself.
//!
//! # SeaORM and Diesel
//!
//! SeaORM is built on sqlx. If its sqlx is the one of this crate (0.9), a client can share the
//! pool: `Locks::new(db.get_postgres_connection_pool().clone())`. Otherwise, and with Diesel, whose
//! connections are of its own kind, use [`Locks::connect`](crate::Locks::connect) with the same
//! URL: leases, semaphores and elections need nothing else.
//!
//! A fence belongs to a transaction of sqlx. In a transaction of another library the row that is
//! written can check the token instead. As the first statement, which must change one row:
//!
//! ```text
//! UPDATE document SET lock_token = $1 WHERE id = $2 AND lock_token <= $1
//! ```
//!
//! The row is locked then, and an earlier holder, whose token is smaller, changes no row and must
//! roll back. Read and write after it.
//!
//! # actix
//!
//! actix-web runs each worker on a tokio runtime of its own, and a client belongs to the runtime
//! that used it first. Use it once in `main`, before the server starts, and share it with
//! `web::Data`:
//!
//! ```text
//! #[actix_web::main]
//! async fn main() -> anyhow::Result<()> {
//!     let locks = sqlock::Locks::connect(&url).await?;      // here, on the runtime of main
//!     let shared = locks.clone();
//!     HttpServer::new(move || App::new().app_data(web::Data::new(shared.clone())).service(remind))
//!         .bind(("0.0.0.0", 8080))?
//!         .run()                                            // ends at SIGTERM, after its requests
//!         .await?;
//!     locks.shutdown().await?;
//!     Ok(())
//! }
//! ```
//!
//! # `search_path`
//!
//! The client's connections have the connect options of the pool, and none of its hooks. This fails
//! with [`Error::NotMigrated`](crate::Error::NotMigrated), or finds the tables of another schema:
//!
//! ```text
//! PgPoolOptions::new().after_connect(|conn, _| Box::pin(async move {
//!     conn.execute("SET search_path = app").await.map(|_| ())
//! }))
//! ```
//!
//! The option does the same, and costs no statement:
//!
//! ```
//! # #[cfg(feature = "postgres")]
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
//!
//! let options = "postgres://app@db/app".parse::<PgConnectOptions>()?.options([("search_path", "app")]);
//! let pool = PgPoolOptions::new().connect_with(options).await?;
//! let locks = sqlock::Locks::new(pool.clone());
//! # Ok(())
//! # }
//! ```
//!
//! In a URL it is `?options=-csearch_path%3Dapp`. A pooler may drop such options; `ALTER ROLE app
//! SET search_path = app` works everywhere.
//!
//! # Platforms
//!
//! | | Linux | macOS | Windows |
//! |---|---|---|---|
//! | library | tested | checked by the compiler | checked by the compiler |
//! | clock of deadlines counts the sleep of the machine | yes (`CLOCK_BOOTTIME`) | as its monotonic clock does | as its performance counter does |
//! | session locks on SQLite | yes, files are deleted after use | the same | yes, empty files stay |
//! | [`SessionRequest::holders`](crate::session::SessionRequest::holders) on SQLite | yes | no | no |
//! | command `sqlock` | tested | not tested; no parent-death signal, so a command can outlive a `sqlock` killed with -9 | no |
//!
//! Building the feature `sqlite` needs a C compiler for the target, because sqlx compiles SQLite.
