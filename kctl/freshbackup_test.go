package kctl

import (
	"bytes"
	"io"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"k8s.io/cli-runtime/pkg/genericclioptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/internal/diskroom"
)

// A backup that a drill makes for itself on a replica's machine leaves the store the room that it needs, or goes again.
func TestFreshBackupLeavesRoom(t *testing.T) {
	p := newPlane()
	p.backup = append(bytes.Clone(p.backup), make([]byte, 2*diskroom.Step)...)
	server := httptest.NewServer(p)
	defer server.Close()
	flags := genericclioptions.NewConfigFlags(false)
	flags.APIServer = &server.URL
	dir, free := t.TempDir(), int64(1<<30)
	in := diskroom.Place{Folder: dir, Beside: dir, Look: func(string) (diskroom.Usage, error) { return diskroom.Usage{Free: free, Total: 2 << 30}, nil }}
	path, done, err := freshBackup(t.Context(), cmdutil.NewFactory(flags), io.Discard, in)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Size() != int64(len(p.backup)) {
		t.Errorf("of the backup there is %v, %v", info, err)
	}
	done()
	free = 100 << 20
	if _, _, err := freshBackup(t.Context(), cmdutil.NewFactory(flags), io.Discard, in); err == nil || !strings.Contains(err.Error(), dir+" lies on that disk") {
		t.Errorf("where there is too little room it says %v", err)
	}
	only(t, dir, "", "")
}
