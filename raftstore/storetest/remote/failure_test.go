package remote

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"testing"

	"keelson.dev/keelson/raftstore"
)

// Every error of the vocabulary crosses as itself, also several in one.
func TestErrorsCross(t *testing.T) {
	for _, k := range kinds {
		got := Err(StatusOf(fmt.Errorf("call of \xff\x00 at 7: %w: %w", k.err, context.DeadlineExceeded)))
		if !errors.Is(got, k.err) || !errors.Is(got, context.DeadlineExceeded) {
			t.Errorf("%v arrives as %v", k.err, got)
		}
		if errors.Is(got, raftstore.ErrFenced) != (k.err == raftstore.ErrFenced) {
			t.Errorf("%v arrives as %v, which it is not", k.err, got)
		}
	}
	if err := Err(StatusOf(nil)); err != nil {
		t.Errorf("no error arrives as %v", err)
	}
}

// No error of the vocabulary is forgotten.
func TestAllErrorsAreKnown(t *testing.T) {
	source, err := os.ReadFile("../../store.go")
	if err != nil {
		t.Fatal(err)
	}
	known := make(map[string]bool)
	for _, k := range kinds {
		known[k.err.Error()] = true
	}
	all := regexp.MustCompile(`Err\w+\s*= errors\.New\("([^"]*)"\)`).FindAllSubmatch(source, -1)
	if len(all) < 13 {
		t.Fatalf("found only %d errors", len(all))
	}
	for _, m := range all {
		if !known[string(m[1])] {
			t.Errorf("%q does not cross", m[1])
		}
	}
}
