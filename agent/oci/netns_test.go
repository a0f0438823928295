package oci

import (
	"os"
	"path/filepath"
	"testing"
)

// P9: the file of a namespace that was never pinned goes, so that its sandbox can; a namespace that is pinned stays.
func TestUnpinnedNamespaceIsRemoved(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("namespaces need root")
	}
	path := filepath.Join(t.TempDir(), "ns")
	if err := removeUnpinned(path); err != nil {
		t.Errorf("nothing: %v", err)
	}
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := removeUnpinned(path); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the file that pins nothing is there: %v", err)
	}
	if err := makeNetns(path); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := removeNetns(path); err != nil {
			t.Error(err)
		}
	}()
	if err := removeUnpinned(path); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the namespace that is pinned: %v", err)
	}
}
