package filewatch

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A file that is written, replaced or removed is reported; so is a change between reading the file
// and the first check.
func TestChangesAreTold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	write(t, path, "one")
	before := TakeSnapshot(path, "")
	write(t, path, "another")
	signaled := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- Follow(ctx, time.Millisecond, before, func() { signaled <- struct{}{} })
	}()
	expect := func(what string) {
		t.Helper()
		select {
		case <-signaled:
		case <-time.After(time.Minute):
			t.Fatalf("%s: no change was reported", what)
		}
	}
	expect("changed before the first look")
	write(t, path+".new", "another")
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	expect("replaced")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	expect("removed")
	cancel()
	if err := <-done; err != context.Canceled {
		t.Error(err)
	}
}

// A file above the limit, a directory and a device are not read.
func TestReadIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	write(t, path, "12345")
	if data, err := Read(path, 5); err != nil || string(data) != "12345" {
		t.Errorf("%q, %v", data, err)
	}
	if _, err := Read(path, 4); err == nil {
		t.Error("more than the bound was read")
	}
	if _, err := Read(filepath.Dir(path), 4); err == nil {
		t.Error("a folder was read")
	}
	if _, err := Read("/dev/zero", 4); err == nil {
		t.Error("a device was read")
	}
}
