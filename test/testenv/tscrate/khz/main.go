// Command khz prints the frequency of this machine's time stamp counter in kHz, or nothing if it is
// unknown. It is for scripts.
package main

import (
	"fmt"

	"keelson.dev/keelson/test/testenv/tscrate"
)

func main() {
	if khz, ok := tscrate.KHz(); ok {
		fmt.Println(khz)
	}
}
