#!/bin/sh
# Exports read the catalogue, any number of them at once; an import changes it, and has it alone. All stand in one line: an
# import that waits lets those finish which are at work, and keeps later exports out until it is done.
set -eu

case $1 in
    export) sqlock run --shared catalogue -- export-catalogue ;;
    import) sqlock run catalogue -- import-catalogue ;;
esac
