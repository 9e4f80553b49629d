#!/bin/sh
# Exports read the catalogue, any number of them at once; an import changes it, and excludes the exports. All wait in one
# queue: a waiting import lets running exports finish, and keeps later exports out until it is done.
set -eu

case $1 in
    export) sqlock run --shared catalogue -- export-catalogue ;;
    import) sqlock run catalogue -- import-catalogue ;;
esac
