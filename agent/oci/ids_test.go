package oci

import (
	"keelson.dev/keelson/agent/oci/shimclient"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// IDs have the 64 hexadecimal digits that log shippers match in log file names. A shim's socket
// path still fits into a socket address if the data directory's path has 60 characters. F16
func TestIDsHave64Digits(t *testing.T) {
	id := newID()
	if !regexp.MustCompile(`^[a-z0-9]{64}$`).MatchString(id) || id == newID() {
		t.Errorf("ID %q, want 64 random hexadecimal digits", id)
	}
	root := t.TempDir()
	dir := filepath.Join(root, strings.Repeat("d", max(1, 60-len(root)-1)), "oci", "sandboxes", id)
	if err := os.MkdirAll(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	socket, err := shimclient.Listen(dir)
	if err != nil {
		t.Fatalf("a folder with a path of %d bytes: %v", len(dir), err)
	}
	socket.Close()
	if _, err := os.Stat(filepath.Join(dir, shimclient.SocketName)); err != nil {
		t.Error(err)
	}
}
