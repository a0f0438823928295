package bugs

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// bug is one row of the table.
type bug struct {
	name     string
	file     string // below the module's root
	old, new string
	finder   string // package and test that must fail, as ./package:TestName/Part, with its flags after it
	symptom  string // symptom that reveals the bug
	// test with random clients whose history the checker rejects, written like finder; "" if they
	// do not find the bug
	harness          string
	harnessNeedsLuck bool // the harness needs luck: raft does not run the same way twice, whatever the seed
}

// atOnce is how many rows are built and run at the same time.
const atOnce = 2

// patience bounds one row; a warm cache needs a few seconds.
const patience = 6 * time.Minute

func TestOldBugsAreFound(t *testing.T) {
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	verdicts := make(map[string]string)
	slots := make(chan struct{}, atOnce)
	t.Run("bugs", func(t *testing.T) {
		for _, b := range table {
			t.Run(strings.ReplaceAll(b.name, " ", "-"), func(t *testing.T) {
				t.Parallel()
				slots <- struct{}{}
				defer func() { <-slots }()
				began := time.Now()
				symptoms := b.findWithTests(t, root)
				mu.Lock()
				defer mu.Unlock()
				verdicts[b.name] = fmt.Sprintf("%5.1f s  %s", time.Since(began).Seconds(),
					strings.Join(symptoms, " | "))
			})
		}
	})
	var out strings.Builder
	for _, b := range table {
		fmt.Fprintf(&out, "\n%-44s | %-76s | %s\n%-44s |   %s", b.name, b.finder, b.symptom, "", verdicts[b.name])
	}
	t.Logf("bug | found by | how%s", out.String())
}

// findWithTests applies the bug and returns the symptoms that its finders report.
func (b bug) findWithTests(t *testing.T, root string) []string {
	overlay, err := b.writeOverlay(root, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	out, amiss := runFinder(t, root, overlay, b.finder)
	if amiss != nil {
		t.Error(amiss)
	}
	said := []string{firstFailure(out)}
	if b.harness == "" {
		return said
	}
	out, amiss = runFinder(t, root, overlay, b.harness)
	_, verdict, found := strings.Cut(string(out), "the store violated its contract:")
	switch {
	case found:
		first, _, _ := strings.Cut(strings.TrimSpace(verdict), "\n")
		return append(said, fmt.Sprintf("%.140s", first))
	case !b.harnessNeedsLuck || !errors.Is(amiss, errPassed):
		t.Errorf("%s: the checker reports no violation: %v", b.harness, amiss)
	}
	return append(said, "the harness had no luck this time")
}

// errPassed is a finder that does not find the bug.
var errPassed = errors.New("it does not find it")

// runFinder runs one finder on the source with the bug. Its error is the reason why the finder did
// not find the bug.
func runFinder(t *testing.T, root, overlay, with string) ([]byte, error) {
	finder, flags, _ := strings.Cut(with, " ")
	pkg, test, ok := strings.Cut(finder, ":")
	if !ok {
		t.Fatalf("finder %q is not a package and a test", with)
	}
	parts := strings.Split(test, "/")
	for i := range parts {
		parts[i] = "^" + regexp.QuoteMeta(parts[i]) + "$"
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	args := []string{"test", "-overlay", overlay, "-count=1", "-vet=off", "-failfast", "-timeout", "60s", "-run",
		strings.Join(parts, "/"), pkg}
	cmd := exec.CommandContext(ctx, "go", append(args, strings.Fields(flags)...)...)
	cmd.Dir = root
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil && bytes.Contains(out, []byte("no tests to run")):
		return out, fmt.Errorf("%s does not exist", with)
	case err == nil:
		return out, fmt.Errorf("%s: %w", with, errPassed)
	case !errors.As(err, &exit):
		return out, fmt.Errorf("running %s: %w\n%s", with, err, out)
	case !bytes.Contains(out, []byte("--- FAIL: "+parts[0][1:len(parts[0])-1])) &&
		!bytes.Contains(out, []byte("panic: test timed out")):
		return out, fmt.Errorf("%s did not come to fail:\n%.4000s", with, out)
	}
	return out, nil
}

// firstFailure returns the first line of a test's output that reports a failure.
func firstFailure(out []byte) string {
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSpace(line)
		file, what, ok := strings.Cut(line, ": ")
		if ok && strings.Contains(file, "_test.go:") || ok && strings.Contains(file, "conform") {
			if !strings.Contains(what, "level=") {
				return fmt.Sprintf("%.140s", what)
			}
		}
	}
	return "the test hangs"
}

// writeOverlay writes the source with the bug, and the overlay file for the go command.
func (b bug) writeOverlay(root, dir string) (string, error) {
	path := filepath.Join(root, b.file)
	source, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	if n := strings.Count(string(source), b.old); n != 1 {
		return "",
			fmt.Errorf("%s has %d places that read\n%s\nwant 1: the source has moved on, and the row %q of the table "+
				"must follow it", b.file, n, b.old, b.name)
	}
	spoilt := filepath.Join(dir, filepath.Base(b.file))
	if err := os.WriteFile(spoilt, []byte(strings.Replace(string(source), b.old, b.new, 1)), 0o600); err != nil {
		return "", err
	}
	data, err := json.Marshal(map[string]map[string]string{"Replace": {path: spoilt}})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, data, 0o600)
}

// A replaced text that is missing from the source, or occurs twice, is an error.
func TestSourceThatMovedOnIsTold(t *testing.T) {
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "a.go"), []byte("one two two"), 0o600); err != nil {
		t.Fatal(err)
	}
	for old, found := range map[string]bool{"one": true, "two": false, "three": false} {
		if _, err := (bug{file: "a.go", old: old}).writeOverlay(root, t.TempDir()); (err == nil) != found {
			t.Errorf("piece %q: %v", old, err)
		}
	}
}
