package node

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
)

// procSwaps is the file in which the kernel lists the active swap areas, after a header line.
const procSwaps = "/proc/swaps"

// checkSwap returns an error if the machine has an active swap area. file is the path of
// /proc/swaps. A kernel without swap has no such file.
func checkSwap(file string) error {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, 1<<20))
	if err != nil {
		return err
	}
	_, areas, _ := strings.Cut(string(text), "\n")
	var on []string
	for line := range strings.Lines(areas) {
		if columns := strings.Fields(line); len(columns) > 0 {
			on = append(on, columns[0])
		}
	}
	if len(on) == 0 {
		return nil
	}
	return fmt.Errorf("swap is on at %s: turn swap off with 'swapoff -a', or start the agent without --fail-swap-on",
		strings.Join(on, ", "))
}
