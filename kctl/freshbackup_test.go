package kctl

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/diskheadroom"
)

// A backup that a drill makes for itself on a replica's machine leaves the store the room that it needs, or goes again.
func TestFreshBackupLeavesRoom(t *testing.T) {
	p := newPlane()
	p.backup = append(bytes.Clone(p.backup), make([]byte, 2*diskheadroom.CheckInterval)...)
	server := httptest.NewServer(p)
	defer server.Close()
	flags := genericclioptions.NewConfigFlags(false)
	flags.APIServer = &server.URL
	dir, free := t.TempDir(), int64(1<<30)
	in := diskheadroom.Target{Dir: dir, ProtectedPath: dir, Stat: func(string) (diskheadroom.Usage, error) {
		return diskheadroom.Usage{Free: free, Total: 2 << 30}, nil
	}}
	path, done, err := createTemporaryBackup(t.Context(), cmdutil.NewFactory(flags), io.Discard, in)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Size() != int64(len(p.backup)) {
		t.Errorf("of the backup there is %v, %v", info, err)
	}
	done()
	free = 100 << 20
	if _, _, err := createTemporaryBackup(t.Context(), cmdutil.NewFactory(flags), io.Discard, in); err == nil ||
		!strings.Contains(err.Error(), dir+" is on the same disk") {
		t.Errorf("where there is too little room it says %v", err)
	}
	only(t, dir, "", "")
}

// A backup by hand leaves the store whose disk it is written to the room that it needs: it is refused before a replica is asked where one like
// the former would not fit, and ends on the way otherwise. The refusal names file, room and remedy, and nothing of the backup stays.
func TestBackupLeavesRoomForTheStore(t *testing.T) {
	p := newPlane()
	p.backup = append(bytes.Clone(p.backup), make([]byte, 2*diskheadroom.CheckInterval)...)
	asked := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		p.ServeHTTP(w, r)
	}))
	defer server.Close()
	flags := genericclioptions.NewConfigFlags(false)
	flags.APIServer = &server.URL
	streams, _, _, _ := genericiooptions.NewTestIOStreams()
	for name, c := range map[string]struct {
		former  string
		free    []int64 // each time that somebody asks, in MiB; the last counts on
		another bool    // disk
		asks    bool
		refused string
	}{
		"room enough": {former: api.BackupMagic, free: []int64{1 << 10}, asks: true},
		"less than another one would leave": {former: api.BackupMagic + strings.Repeat("-", 20<<20),
			free: []int64{210}, refused: "21 MiB would be written, 210 MiB are free"},
		"what is there goes on the way": {former: api.BackupMagic, free: []int64{1 << 10, 100}, asks: true,
			refused: "100 MiB are free"},
		"another disk, filled to the last": {former: api.BackupMagic, free: []int64{100}, another: true, asks: true},
		"another disk, too small for another": {former: api.BackupMagic + strings.Repeat("-", 20<<20),
			free: []int64{10}, another: true, refused: "10 MiB are free"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "today")
			if err := os.WriteFile(path, []byte(c.former), 0o600); err != nil {
				t.Fatal(err)
			}
			asked = 0
			on := diskheadroom.Target{ProtectedPath: "/store", Stat: func(at string) (diskheadroom.Usage, error) {
				u := diskheadroom.Usage{Device: 1, Free: c.free[0] << 20, Total: 2 << 30}
				if at == "/store" {
					return u, nil
				}
				if c.another {
					u.Device = 2
				}
				if len(c.free) > 1 {
					c.free = c.free[1:]
				}
				return u, nil
			}}
			err := writeBackup(cmdutil.NewFactory(flags), streams, path, nil, on)
			if c.refused == "" && err != nil {
				t.Fatal(err)
			}
			if c.refused != "" {
				for _, words := range []string{"cannot back up to " + path, c.refused,
					"remove files there, or choose a directory on another disk"} {
					if err == nil || !strings.Contains(err.Error(), words) {
						t.Errorf("%v does not say %q", err, words)
					}
				}
			}
			if (asked > 0) != c.asks {
				t.Errorf("a replica was asked %d times", asked)
			}
			want := map[bool]string{true: string(p.backup), false: c.former}[c.refused == ""]
			only(t, dir, "today", want)
		})
	}
}
