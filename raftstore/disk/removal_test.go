package disk

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/internal/durable"
)

// TestRemovedSnapshots: a reader of a snapshot can read all of it, even if it is removed
// concurrently. A snapshot without readers is removed in steps, and no file remains.
func TestRemovedSnapshots(t *testing.T) {
	b := newDiskEnv(t, t.TempDir(), LogBolt, nil)
	content := bytes.Repeat([]byte("keelson"), 3*truncateBytes/7)
	b.takeSnapshot(t, 1, 1, content)
	list, err := b.disk.Snapshots.List()
	if err != nil {
		t.Fatal(err)
	}
	oldest := list[0].ID
	_, read, err := b.disk.Snapshots.Open(oldest)
	if err != nil {
		t.Fatal(err)
	}
	begun := make([]byte, 1000)
	if _, err := io.ReadFull(read, begun); err != nil {
		t.Fatal(err)
	}
	for index := range uint64(3) { // the first of these keeps it, the second removes it
		b.takeSnapshot(t, 2+index, 1, content)
	}
	rest, err := io.ReadAll(read)
	if err != nil || !bytes.Equal(append(begun, rest...), content) {
		t.Errorf("of a snapshot that was removed while it was read %d bytes of %d came, error %v", len(begun)+len(rest),
			len(content), err)
	}
	if err := read.Close(); err != nil {
		t.Error(err)
	}
	if _, _, err := b.disk.Snapshots.Open(oldest); err == nil {
		t.Error("a snapshot that was removed opens")
	}
	files, err := os.ReadDir(b.disk.Snapshots.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if strings.HasSuffix(f.Name(), durable.TempSuffix) {
			t.Errorf("%s is left", f.Name())
		}
	}
	if len(files) != snapshotsKept || len(b.disk.Snapshots.readers.counts) != 0 || len(b.failed) > 0 {
		t.Errorf("%d files, readers %v, failures %v", len(files), b.disk.Snapshots.readers.counts, b.failed)
	}
	b.requireSame(t)
}

// TestListWhileRemoving: a concurrent list of snapshots never contains a truncated one.
func TestListWhileRemoving(t *testing.T) {
	b := newDiskEnv(t, t.TempDir(), LogBolt, nil)
	made, done := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			if _, err := b.disk.Snapshots.List(); err != nil {
				done <- err
				return
			}
			select {
			case <-made:
				done <- nil
				return
			default:
			}
		}
	}()
	content := make([]byte, 2*truncateBytes)
	for index := range uint64(5) {
		b.takeSnapshot(t, 1+index, 1, content)
	}
	close(made)
	if err := <-done; err != nil || len(b.failed) > 0 {
		t.Errorf("%v, failures %v", err, b.failed)
	}
}

func TestCutSlowly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for _, c := range []struct{ size, left int64 }{
		{0, 0}, {truncateBytes, truncateBytes}, {2*truncateBytes + 1, 1}, {3 * truncateBytes, truncateBytes},
	} {
		if err := os.WriteFile(path, make([]byte, c.size), 0o600); err != nil {
			t.Fatal(err)
		}
		truncateGradually(path)
		if info, err := os.Stat(path); err != nil || info.Size() != c.left {
			t.Errorf("of %d bytes %v are left, want %d, error %v", c.size, info.Size(), c.left, err)
		}
	}
	truncateGradually(path + "-that-is-not-there")
}
