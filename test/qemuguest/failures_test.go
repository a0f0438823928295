package qemuguest

import (
	"strings"
	"testing"
)

func TestTranscript(t *testing.T) {
	for name, c := range map[string]struct{ said, want string }{
		"one of three fails": {
			"=== RUN   TestA\n    a.go:1: fine\n--- PASS: TestA (0.10s)\n=== RUN   TestB\n    b.go:1: why\n--- FAIL: " +
				"TestB (0.20s)\n=== RUN   TestC\n--- PASS: TestC (0.00s)\nFAIL",
			"    b.go:1: why\n--- FAIL: TestB (0.20s)"},
		"side by side": {
			"=== RUN   TestA\n=== PAUSE TestA\n=== RUN   TestB\n=== PAUSE TestB\n=== CONT  TestA\n    a.go:1: " +
				"one\n=== CONT  TestB\n    b.go:1: two\n=== NAME  TestA\n    a.go:2: three\n--- FAIL: TestA " +
				"(0.10s)\n--- PASS: TestB (0.20s)",
			"    a.go:1: one\n    a.go:2: three\n--- FAIL: TestA (0.10s)"},
		"a part of a test": {
			"=== RUN   TestA\n=== RUN   TestA/x\n    a.go:1: why\n--- FAIL: TestA (0.10s)\n    --- " +
				"FAIL: TestA/x (0.10s)",
			"--- FAIL: TestA (0.10s)\n    a.go:1: why\n    --- FAIL: TestA/x (0.10s)"},
		"a panic": {"=== RUN   TestA\npanic: oh", "=== RUN   TestA\npanic: oh"},
	} {
		t.Run(name, func(t *testing.T) {
			var tr transcript
			for line := range strings.SplitSeq(c.said, "\n") {
				tr.addLine(line)
			}
			if got := tr.failedOutput(); got != c.want {
				t.Errorf("got:\n%s\nwant:\n%s", got, c.want)
			}
		})
	}
}

func TestTranscriptIsBounded(t *testing.T) {
	var tr transcript
	for range 10 * maxLines {
		tr.addLine("a line")
	}
	tr.addLine("--- FAIL: TestA (1.00s)")
	if got := strings.Count(tr.failedOutput(), "a line"); got > maxLines {
		t.Errorf("%d lines of a test are kept, want %d at most", got, maxLines)
	}
}
