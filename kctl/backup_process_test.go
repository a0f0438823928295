package kctl

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/await"
)

// asProgram makes the test's own program one that is kctl.
const asProgram = "KCTL_TEST_IS_KCTL"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Exit(Main())
	}
	// A test that was started under nohup would hand its deafness to SIGHUP on to the processes that it starts.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	os.Exit(m.Run())
}

// process is a kctl that runs.
type process struct {
	*exec.Cmd
	stderr bytes.Buffer
}

func startKctl(t *testing.T, server string, args ...string) *process {
	t.Helper()
	none := filepath.Join(t.TempDir(), "none")
	if err := os.WriteFile(none, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{Cmd: exec.Command(self, append([]string{"--kubeconfig", none, "--server", server}, args...)...)}
	p.Env = append(os.Environ(), asProgram+"=1", "HOME="+t.TempDir())
	p.Stderr = &p.stderr
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Process.Kill(); _ = p.Wait() })
	return p
}

// ended waits for the end and returns the exit code and the only line that was said.
func (p *process) ended(t *testing.T) (code int, said string) {
	t.Helper()
	over := time.AfterFunc(time.Minute, func() { _ = p.Process.Kill() })
	defer over.Stop()
	err := p.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	said = p.stderr.String()
	if strings.Count(said, "\n") != 1 {
		t.Errorf("not one line: %q", said)
	}
	return p.ProcessState.ExitCode(), strings.TrimSpace(said)
}

// aSlowPlane sends half of a backup, and the rest when goOn is closed.
type aSlowPlane struct {
	*aPlane
	goOn chan struct{}
}

// ServeHTTP implements http.Handler.
func (p *aSlowPlane) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != api.PathClusterBackup {
		p.aPlane.ServeHTTP(w, r)
		return
	}
	w.Header().Set("Trailer", api.HeaderBackupSum)
	half := len(p.backup) / 2
	_, _ = w.Write(p.backup[:half])
	_ = http.NewResponseController(w).Flush()
	select {
	case <-p.goOn:
	case <-r.Context().Done():
		return
	}
	_, _ = w.Write(p.backup[half:])
	p.good(w)
}

// slowPlane serves a backup that stays under way until the test lets it end.
func slowPlane(t *testing.T) (p *aSlowPlane, url string) {
	p = &aSlowPlane{newPlane(), make(chan struct{})}
	s := httptest.NewServer(p)
	t.Cleanup(s.Close)
	return p, s.URL
}

// underWay waits until something of a backup is in its partial file.
func underWay(t *testing.T, path string) {
	t.Helper()
	await.Until(t.Context(), t, await.Patience, 5*time.Millisecond, "data in "+path+".partial", func() error {
		info, err := os.Stat(path + ".partial")
		if err == nil && info.Size() == 0 {
			err = errors.New("it is empty")
		}
		return err
	})
}

// only checks that a folder holds nothing but a file with a content; "" = nothing at all.
func only(t *testing.T, dir, name, content string) {
	t.Helper()
	found, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range found {
		raw, _ := os.ReadFile(filepath.Join(dir, e.Name()))
		if e.Name() != name || content == "" || string(raw) != content {
			t.Errorf("%s is there, with %d bytes", e.Name(), len(raw))
		}
	}
	if content != "" && len(found) != 1 {
		t.Errorf("%d files, want %s alone", len(found), name)
	}
}

// A signal in the middle of a backup leaves what was there before and nothing
// else, says so in a line, and gives the exit code that shells expect of it.
func TestInterruptedBackup(t *testing.T) {
	yesterday := api.BackupMagic + " of yesterday"
	for _, c := range []struct {
		signal syscall.Signal
		before string
		code   int
	}{
		{syscall.SIGINT, "", 130},
		{syscall.SIGINT, yesterday, 130},
		{syscall.SIGTERM, yesterday, 143},
		{syscall.SIGHUP, "", 129},
	} {
		t.Run(fmt.Sprintf("%s, before %q", c.signal, c.before), func(t *testing.T) {
			_, url := slowPlane(t)
			dir := t.TempDir()
			path := filepath.Join(dir, "today")
			if c.before != "" {
				if err := os.WriteFile(path, []byte(c.before), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			p := startKctl(t, url, "cluster", "backup", path)
			underWay(t, path)
			if err := p.Process.Signal(c.signal); err != nil {
				t.Fatal(err)
			}
			code, said := p.ended(t)
			if code != c.code ||
				!strings.HasPrefix(said, "kctl cluster backup: stopped by a signal ("+c.signal.String()+") after ") ||
				!strings.HasSuffix(said, path+" was not written") {
				t.Errorf("exit code %d, %q", code, said)
			}
			only(t, dir, "today", c.before)
		})
	}
}

// Under nohup a backup outlives the terminal: SIGHUP is ignored, as the person has asked.
func TestBackupUnderNohup(t *testing.T) {
	plane, url := slowPlane(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "today")
	signal.Ignore(syscall.SIGHUP) // what nohup does to the program that it starts
	p := startKctl(t, url, "cluster", "backup", path)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	underWay(t, path)
	if err := p.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	close(plane.goOn)
	if code, said := p.ended(t); code != 0 || !strings.Contains(said, "checked") {
		t.Errorf("exit code %d, %q", code, said)
	}
	only(t, dir, "today", string(plane.backup))
}

// Two backups to one name do not write into each other, and what a killed one
// leaves is no hindrance to the next.
func TestBackupsToOneName(t *testing.T) {
	plane, url := slowPlane(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "today")
	killed := startKctl(t, url, "cluster", "backup", path)
	underWay(t, path)
	if code, said := startKctl(t, url, "cluster", "backup", path).ended(t); code != 1 ||
		!strings.Contains(said, "another backup to "+path+" is in progress") {
		t.Errorf("a second one at the same time: exit code %d, %q", code, said)
	}
	_ = killed.Process.Kill()
	_ = killed.Wait()
	if _, err := os.Stat(path + ".partial"); err != nil {
		t.Fatalf("this test wants a process that could not tidy up: %v", err)
	}
	if err := os.Chmod(path+".partial", 0o644); err != nil {
		t.Fatal(err)
	}
	close(plane.goOn)
	if code, said := startKctl(t, url, "cluster", "backup", path).ended(t); code != 0 ||
		!strings.Contains(said, "checked") {
		t.Errorf("after it was killed: exit code %d, %q", code, said)
	}
	only(t, dir, "today", string(plane.backup))
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("others can read the cluster's secrets: %v, %v", info.Mode(), err)
	}
}

// A connection that breaks off in the middle.
func TestBackupWhoseConnectionBreaks(t *testing.T) {
	p := newPlane()
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != api.PathClusterBackup {
			p.ServeHTTP(w, r)
			return
		}
		_, _ = w.Write(p.backup)
		_ = http.NewResponseController(w).Flush()
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		_ = conn.(*net.TCPConn).SetLinger(0) // a reset, as of a host that is gone
		conn.Close()
	}))
	defer broken.Close()
	dir := t.TempDir()
	code, said := startKctl(t, broken.URL, "cluster", "backup", filepath.Join(dir, "today")).ended(t)
	if code != 1 || !strings.Contains(said, "the backup was interrupted after 17.6 KiB") {
		t.Errorf("exit code %d, %q", code, said)
	}
	only(t, dir, "today", "")
}

// A disk that fills up on the way.
func TestBackupToAFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("keelson-test", dir, "tmpfs", 0, "size=64k,mode=700"); err != nil {
		t.Skipf("a file system of 64 KiB cannot be mounted here: %v", err)
	}
	defer func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("unmounting %s: %v", dir, err)
		}
	}()
	p := newPlane()
	server := httptest.NewServer(p)
	defer server.Close()
	path := filepath.Join(dir, "today")
	if code, said := startKctl(t, server.URL, "cluster", "backup", path).ended(t); code != 0 {
		t.Fatalf("a backup that fits: exit code %d, %q", code, said)
	}
	whole := string(p.backup)
	p.backup = append(bytes.Clone(p.backup), make([]byte, 256<<10)...)
	code, said := startKctl(t, server.URL, "cluster", "backup", path).ended(t)
	if code != 1 || !strings.Contains(said, "no space left on device") || !strings.Contains(said, path) {
		t.Errorf("exit code %d, %q", code, said)
	}
	only(t, dir, "today", whole)
}

// What is at the name already is replaced when it is a backup, or empty; anything
// else stays, and a link goes on pointing to where it did.
func TestBackupOverWhatIsThere(t *testing.T) {
	p := newPlane()
	server := httptest.NewServer(p)
	defer server.Close()
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	for name, content := range map[string]string{"backup": api.BackupMagic + "...", "empty": "",
		"kubeconfig": "apiVersion: v1\n", "short": "x", "far": ""} {
		if err := os.WriteFile(in(name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(in("folder"), 0o700); err != nil {
		t.Fatal(err)
	}
	for link, to := range map[string]string{"link": "far", "trap.partial": "kubeconfig"} {
		if err := os.Symlink(in(to), in(link)); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		"backup": "", "empty": "", "link": "", "new": "",
		"kubeconfig": "exists and is not a backup", "short": "exists and is not a backup",
		"folder": "is not a regular file", "trap": "too many levels of symbolic links",
		"absent/today": "no such file or directory",
	} {
		code, said := startKctl(t, server.URL, "cluster", "backup", in(name)).ended(t)
		if ok := want == ""; (code == 0) != ok || !strings.Contains(said, want) {
			t.Errorf("%s: exit code %d, %q, want %q", name, code, said, want)
		}
		if raw, err := os.ReadFile(in(name)); want == "" && (err != nil || !bytes.Equal(raw, p.backup)) {
			t.Errorf("%s: %d bytes, %v", name, len(raw), err)
		}
	}
	if raw, _ := os.ReadFile(in("kubeconfig")); string(raw) != "apiVersion: v1\n" {
		t.Errorf("a file that is no backup has become %q", raw)
	}
	if to, err := os.Readlink(in("link")); err != nil || to != in("far") {
		t.Errorf("the link: %q, %v", to, err)
	}
	if info, err := os.Stat(in("backup")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the mode of what was replaced: %v, %v", info.Mode(), err)
	}
}
