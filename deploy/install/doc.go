// Package install holds what a machine gets beside the programs: units, examples of settings, and the scripts that install and
// take away. deploy/dist packs it.
package install
