// Package install contains the files that install Keelson on a machine: systemd units, example
// settings, install.sh, and uninstall.sh. Its Go code is only tests of these. Package deploy/dist
// puts the files into releases.
package install
