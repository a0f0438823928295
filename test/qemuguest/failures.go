package qemuguest

import (
	"slices"
	"strings"
)

// transcript reads the output of a test binary and keeps the output of its failed tests, which is a
// small part of thousands of lines.
type transcript struct {
	test        string              // name of the test that prints the current lines
	lines       map[string][]string // the last lines of each running test
	last        []string            // the last lines of the program
	failedLines []string            // lines of failed tests
}

// maxLines is the number of last lines that a transcript keeps per test.
const maxLines = 40

func (tr *transcript) addLine(line string) {
	tr.last = appendBounded(tr.last, line)
	words := strings.Fields(line)
	if len(words) >= 3 && words[0] == "===" {
		tr.test = words[len(words)-1]
		return
	}
	// "--- FAIL: NAME (1.00s)", with any indentation (subtests).
	if len(words) >= 3 && words[0] == "---" {
		name := words[2]
		if words[1] == "FAIL:" {
			tr.failedLines = append(append(tr.failedLines, tr.lines[name]...), line)
		}
		delete(tr.lines, name)
		return
	}
	if tr.lines == nil {
		tr.lines = map[string][]string{}
	}
	tr.lines[tr.test] = appendBounded(tr.lines[tr.test], line)
}

func appendBounded(lines []string, line string) []string {
	if lines = append(lines, line); len(lines) > maxLines {
		lines = slices.Delete(lines, 0, 1)
	}
	return lines
}

// failedOutput returns the output of the failed tests. If no test reported a failure, because the
// program was killed or panicked, it returns the program's last lines.
func (tr *transcript) failedOutput() string {
	if len(tr.failedLines) > 0 {
		return strings.Join(tr.failedLines, "\n")
	}
	return strings.Join(tr.last, "\n")
}
