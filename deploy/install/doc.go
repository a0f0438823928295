// Package install contains the systemd units, example settings, and the installation and
// uninstallation scripts, with their tests. deploy/dist packages them.
package install
