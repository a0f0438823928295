package install

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// real makes a program of this machine available under a name.
func (m *machine) real(program, name string) {
	m.t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		m.t.Skipf("needs: %s, which releases are fetched with", program)
	}
	if err := os.Symlink(path, filepath.Join(m.bin, name)); err != nil {
		m.t.Fatal(err)
	}
}

// bounded returns a copy of install.sh with other download limits.
func bounded(t *testing.T, bounds ...string) string {
	t.Helper()
	raw, err := os.ReadFile("install.sh")
	if err != nil {
		t.Fatal(err)
	}
	script := string(raw)
	for i := 0; i < len(bounds); i += 2 {
		if strings.Count(script, bounds[i]) != 1 {
			t.Fatalf("install.sh has %q %d times, not once", bounds[i], strings.Count(script, bounds[i]))
		}
		script = strings.Replace(script, bounds[i], bounds[i+1], 1)
	}
	path := filepath.Join(t.TempDir(), "install.sh")
	if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// A release is downloaded with whichever program the machine has. A download that is not a release,
// is too large, or never ends is an error that names it, and leaves nothing.
func TestAReleaseIsFetched(t *testing.T) {
	const tarball, sums = "/keelson-v1-linux-amd64.tar.gz", "/SHA256SUMS"
	endless := func(w http.ResponseWriter, _ *http.Request) {
		piece := make([]byte, 1<<16) // without a content length
		for range 1 << 10 {
			if _, err := w.Write(piece); err != nil {
				return
			}
		}
	}
	stops := func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte("x"))
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
	other := func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(strings.Repeat("0", 64) + "  " + tarball[1:] + "\n"))
	}
	for _, c := range []struct {
		name   string
		wrong  map[string]http.HandlerFunc
		bounds []string
		want   string // an error, or ""
	}{
		{name: "a release"},
		{name: "no sums", wrong: map[string]http.HandlerFunc{sums: http.NotFound},
			want: "/SHA256SUMS could not be fetched"},
		{name: "no tarball", wrong: map[string]http.HandlerFunc{tarball: http.NotFound},
			want: tarball + " could not be fetched"},
		{name: "other sums", wrong: map[string]http.HandlerFunc{sums: other}, want: "is not what its release has"},
		{name: "endless sums", wrong: map[string]http.HandlerFunc{sums: endless},
			bounds: []string{"most=2000000000", "most=1000000"},
			want:   "/SHA256SUMS has more than 1000000 bytes"},
		{name: "an endless tarball", wrong: map[string]http.HandlerFunc{tarball: endless},
			bounds: []string{"most=2000000000", "most=1000000"},
			want:   tarball + " has more than 1000000 bytes"},
		{name: "a server that goes to sleep", wrong: map[string]http.HandlerFunc{sums: stops},
			bounds: []string{"longest=1800", "longest=1"},
			want:   "/SHA256SUMS could not be fetched, or not within 1 seconds"},
	} {
		for client, program := range map[string]string{"curl": "curl", "wget": "wget", "busybox": "wget"} {
			t.Run(c.name+" by "+client, func(t *testing.T) {
				m := newMachine(t)
				_, packed := m.release()
				mux := http.NewServeMux()
				mux.Handle("/", http.FileServer(http.Dir(packed)))
				for at, handler := range c.wrong {
					mux.HandleFunc(at, handler)
				}
				server := httptest.NewServer(mux)
				defer server.Close()
				m.real(client, program)
				m.real("timeout", "timeout")
				m.real("wc", "wc")
				before := m.tree()
				said, _, err := m.run(bounded(t, c.bounds...), "server", "--init", "--from", server.URL+tarball)
				if c.want == "" {
					if err != nil || m.tree()["/usr/bin/keelson-agent"] == "" {
						t.Errorf("%v: %s", err, said)
					}
				} else if err == nil || !strings.Contains(said, c.want) || !equal(before, m.tree()) {
					t.Errorf("%v: %s\nwant %s", err, said, c.want)
				}
				for _, folder := range []string{"tmp", "var/cache"} {
					if left, _ := os.ReadDir(filepath.Join(m.root, folder)); len(left) > 0 {
						t.Errorf("%v is left in /%s", left, folder)
					}
				}
			})
		}
	}
	m := newMachine(t)
	if said, _, err := m.run("install.sh", "server", "--init", "--from", "https://keelson.dev"+tarball); err == nil ||
		!strings.Contains(said, "neither curl nor wget is here") {
		t.Errorf("nothing to fetch with: %v: %s", err, said)
	}
}
