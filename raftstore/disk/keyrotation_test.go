package disk

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestKeyExchanged: a key is added, activated, and the old key is removed, each step twice. The old
// key stays available for backups. F51
func TestKeyExchanged(t *testing.T) {
	dir := t.TempDir()
	path, former := filepath.Join(dir, "keys"), filepath.Join(dir, "former")
	if err := CreateKeyFile(path, "one"); err != nil {
		t.Fatal(err)
	}
	line, err := GenerateKeyFile("two")
	if err != nil {
		t.Fatal(err)
	}
	twice := func(step string, do func() error, want ...string) {
		t.Helper()
		for range 2 {
			if err := do(); err != nil {
				t.Fatalf("%s: %v", step, err)
			}
			k, err := LoadKeyring(path)
			if err != nil || !slices.Equal(k.IDs(), want) {
				t.Fatalf("%s: %v, %v", step, k.IDs(), err)
			}
		}
	}
	twice("believe", func() error { return AddDecryptionKey(path, line) }, "one", "two")
	twice("drop the current", func() error { return RemoveKey(path, "one", former) }, "one", "two")
	twice("use", func() error { return ActivateKey(path, line) }, "two", "one")
	twice("drop", func() error { return RemoveKey(path, "one", former) }, "two")
	k, err := LoadKeyring(former) // it rejects a file that other users can read
	if err != nil || !slices.Equal(k.IDs(), []string{"one"}) {
		t.Errorf("former keys: %v, %v", k.IDs(), err)
	}
	other, _ := GenerateKeyFile("two")
	if err := ActivateKey(path, other); err == nil || strings.Contains(err.Error(), strings.Fields(string(other))[1]) {
		t.Errorf("another key of the same id: %v", err)
	}
}
