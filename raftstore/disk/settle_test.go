package disk

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/internal/durable"
)

// TestSettleData: settleTree changes no file, and ignores files that are created or removed
// concurrently.
func TestSettleData(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	if err := settleTree(dir, func(path string) bool {
		return strings.HasSuffix(path, durable.TempSuffix)
	}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"raft.db", "snapshots/1.snap", "wal/1.wal", "half.new"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(name), 0o400); err != nil {
			t.Fatal(err)
		}
	}
	if err := settleTree(dir, func(path string) bool {
		return strings.HasSuffix(path, durable.TempSuffix)
	}); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "wal/1.wal")); string(b) != "wal/1.wal" || err != nil {
		t.Errorf("read %q, error %v", b, err)
	}
}
