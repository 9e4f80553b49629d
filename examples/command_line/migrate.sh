#!/bin/sh
# Brings the database up to date. Start it from as many hosts as you like: they take turns, and all but the first find
# nothing left to do. Any migration tool will do in the place of sqlx; both read DATABASE_URL.
set -eu

# Wait for up to ten minutes. Another process may be migrating, and a migration may take long.
sqlock run --timeout 10m --label "migration on $(uname -n)" migrate -- sqlx migrate run
