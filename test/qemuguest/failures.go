package qemuguest

import (
	"slices"
	"strings"
)

// transcript reads along with what a test binary of the guest says, and keeps what its failed tests said: thousands of lines
// come before and after them.
type transcript struct {
	test  string              // whose lines come
	lines map[string][]string // the last ones of each test that has not ended
	last  []string            // of the program
	told  []string            // by tests that failed
}

// kept is how many lines of a test are.
const kept = 40

func (tr *transcript) note(line string) {
	tr.last = keep(tr.last, line)
	words := strings.Fields(line)
	if len(words) >= 3 && words[0] == "===" {
		tr.test = words[len(words)-1]
		return
	}
	// "--- FAIL: NAME (1.00s)", at any depth.
	if len(words) >= 3 && words[0] == "---" {
		name := words[2]
		if words[1] == "FAIL:" {
			tr.told = append(append(tr.told, tr.lines[name]...), line)
		}
		delete(tr.lines, name)
		return
	}
	if tr.lines == nil {
		tr.lines = map[string][]string{}
	}
	tr.lines[tr.test] = keep(tr.lines[tr.test], line)
}

func keep(lines []string, line string) []string {
	if lines = append(lines, line); len(lines) > kept {
		lines = slices.Delete(lines, 0, 1)
	}
	return lines
}

// failed is what the failed tests said, or the program's last lines where no test tells that it failed: it was killed, or panicked.
func (tr *transcript) failed() string {
	if len(tr.told) > 0 {
		return strings.Join(tr.told, "\n")
	}
	return strings.Join(tr.last, "\n")
}
