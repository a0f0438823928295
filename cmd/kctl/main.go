// kctl is the command line of a Keelson cluster.
package main

import (
	"os"

	"keelson.dev/keelson/kctl"
)

func main() { os.Exit(kctl.Main()) }
