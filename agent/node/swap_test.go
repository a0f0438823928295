package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// --fail-swap-on prevents the agent from starting on a machine with active swap, like the kubelet's failSwapOn.
func TestFailSwapOn(t *testing.T) {
	const header = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
	for name, c := range map[string]struct {
		swaps string
		want  string // substring of the error; "" = none
	}{
		"no swap":       {header, ""},
		"an empty file": {"", ""},
		"a partition": {header + "/dev/sda2                               partition\t976892\t\t0\t\t-2\n",
			"swap is on at /dev/sda2: turn swap off with 'swapoff -a', or start the agent without --fail-swap-on"},
		"two of them": {header + "/dev/sda2 partition 1 0 -2\n/swapfile file 1 0 -3\n",
			"swap is on at /dev/sda2, /swapfile"},
		"without the file": {"-", ""},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "swaps")
			if c.swaps != "-" {
				if err := os.WriteFile(file, []byte(c.swaps), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			err := checkSwap(file)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
	if c, err := parseConfig(t, "fail-swap-on: true\n"); err != nil || !c.Node.FailSwapOn {
		t.Errorf("fail-swap-on in the file of settings: %v", err)
	}
}

// F115: the node reports its swap, and none where there is none.
func TestSwapOfNode(t *testing.T) {
	for text, want := range map[string]int64{
		"MemTotal: 5 kB\nSwapCached: 1 kB\nSwapTotal:       2048 kB\nSwapFree: 7 kB\n": 2048 << 10,
		"SwapTotal: 0 kB\n":                       0,
		"SwapTotal: 99999999999999999999999 kB\n": 0,
		"SwapTotal: 9223372036854775807 kB\n":     0,
		"SwapTotal:\nMemTotal: 5 kB\n":            0,
		"":                                        0,
	} {
		got := int64(0)
		if s := parseSwap(text); s != nil {
			got = *s.Capacity
		}
		if got != want {
			t.Errorf("%q: swap of %d bytes, want %d", text, got, want)
		}
	}
}
