package install

import (
	"bufio"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// listed is a row of the table in docs/reference/files.md.
type listed struct {
	path string // may contain *; a folder ends with /
	mode fs.FileMode
	by   string
	seen bool
}

var row = regexp.MustCompile("^\\| `(/[^`]*)` \\| ([0-7]{4}) \\| ([a-z. ]+) \\|")

// table returns the rows of docs/reference/files.md for one of the two installers.
func table(t *testing.T, by string) []*listed {
	t.Helper()
	f, err := os.Open("../../docs/reference/files.md")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var all []*listed
	for s := bufio.NewScanner(f); s.Scan(); {
		m := row.FindStringSubmatch(s.Text())
		if m == nil || m[3] != by && m[3] != "both" {
			continue
		}
		mode, err := strconv.ParseUint(m[2], 8, 32)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, &listed{path: m[1], mode: fs.FileMode(mode), by: m[3]})
	}
	if len(all) < 10 {
		t.Fatalf("the table of files in docs/reference/files.md has %d rows for %s", len(all), by)
	}
	return all
}

// find returns the row for a path, or nil.
func find(rows []*listed, at string, folder bool) *listed {
	i := slices.IndexFunc(rows, func(r *listed) bool {
		ok, err := path.Match(strings.TrimSuffix(r.path, "/"), at)
		return err == nil && ok && strings.HasSuffix(r.path, "/") == folder
	})
	if i < 0 {
		return nil
	}
	return rows[i]
}

// entries returns all files and folders of the machine.
func (m *machine) entries() map[string]fs.FileInfo {
	m.t.Helper()
	all := map[string]fs.FileInfo{}
	err := filepath.WalkDir(m.root, func(p string, d fs.DirEntry, err error) error {
		if err == nil {
			all[strings.TrimPrefix(p, m.root)], err = d.Info()
		}
		return err
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return all
}

// hold compares everything that was added since before with the table.
func (m *machine) hold(rows []*listed, before map[string]fs.FileInfo) {
	m.t.Helper()
	for at, info := range m.entries() {
		if _, was := before[at]; was || at == "/active" || at == "/var/lib/keelson/controlplane/pki" ||
			at == "/var/lib/keelson/controlplane/cluster.json" {
			continue // added by the fakes
		}
		r := find(rows, at, info.IsDir())
		if r == nil {
			m.t.Errorf("%s (%v) is written, and the table of docs/reference/files.md does not name it", at, info.Mode())
			continue
		}
		r.seen = true
		if !info.IsDir() && !info.Mode().IsRegular() || info.Mode()&^fs.ModeDir != r.mode {
			m.t.Errorf("%s has mode %v, and docs/reference/files.md says %v", at, info.Mode(), r.mode)
		}
		if s, ok := info.Sys().(*syscall.Stat_t); !ok || int(s.Uid) != os.Geteuid() || int(s.Gid) != os.Getegid() {
			m.t.Errorf("%s is not of who installs, but of %v", at, info.Sys())
		}
	}
}

// system creates the folders that every machine has, and a release that a user has unpacked with
// open permissions.
func (m *machine) system(unpacked string) {
	m.t.Helper()
	for _, d := range []string{"etc", "opt", "usr/bin", "usr/lib/systemd/system", "var/cache", "var/lib", "run"} {
		if err := os.MkdirAll(filepath.Join(m.root, d), 0o755); err != nil {
			m.t.Fatal(err)
		}
	}
	err := filepath.WalkDir(unpacked, func(p string, d fs.DirEntry, err error) error {
		if err == nil {
			err = os.Chmod(p, 0o777)
		}
		if err == nil && os.Geteuid() == 0 {
			err = os.Chown(p, 1234, 1234)
		}
		return err
	})
	if err != nil {
		m.t.Fatal(err)
	}
}

// under runs install.sh with a umask.
func (m *machine) under(umask, script string, args ...string) {
	m.t.Helper()
	cmd := exec.Command("sh", append([]string{"-c", "umask " + umask + "; exec sh \"$@\"", "sh", script}, args...)...)
	cmd.Env = []string{"PATH=" + m.bin, "DESTDIR=" + m.root, "TMPDIR=" + filepath.Join(m.root, "tmp"),
		"MOUNTINFO=" + filepath.Join(m.root, "mountinfo")}
	if out, err := cmd.CombinedOutput(); err != nil {
		m.t.Fatalf("%v under umask %s: %v\n%s", args, umask, err, out)
	}
}

// install.sh creates files with the modes and owners in docs/reference/files.md, whatever the
// caller's umask and the permissions of the release's folder. The table and the files match in both
// directions. Another run restores modes that were changed.
func TestModesOfWhatIsInstalled(t *testing.T) {
	rows := table(t, "install.sh")
	for _, umask := range []string{"0000", "0022", "0077"} {
		for _, role := range []string{"server", "agent"} {
			t.Run(role+" "+umask, func(t *testing.T) {
				m := newMachine(t)
				unpacked, packed := m.release()
				m.system(unpacked)
				brought := t.TempDir()
				settings, admin := filepath.Join(brought, "settings"), filepath.Join(brought, "admin")
				m.file(settings, "name: a\n", 0o644)
				m.file(admin, "a kubeconfig\n", 0o644)
				script := filepath.Join(unpacked, "install.sh")
				common := []string{role, "--server", "192.0.2.11", "--token", "keelson1.node.a"}
				if role == "server" {
					common = append(common, "--admin", admin)
				} else {
					common = append(common, "--images", filepath.Join(packed, "keelson-v1-linux-amd64-images.tar"))
				}
				before := m.entries()
				m.under(umask, script, common...)
				m.hold(rows, before)
				again := []string{role, "--token", "keelson1.node.a", "--settings", settings}
				m.under(umask, script, again...)
				m.hold(rows, before)
				for at, info := range m.entries() {
					if _, was := before[at]; !was && info.Mode().IsRegular() && strings.HasSuffix(at, ".yaml") {
						if err := os.Chmod(filepath.Join(m.root, at), 0o666); err != nil {
							t.Fatal(err)
						}
					}
				}
				m.under(umask, script, again...)
				m.hold(rows, before)
			})
		}
	}
	for _, r := range rows {
		if !r.seen {
			t.Errorf("docs/reference/files.md says that %s is written by %s: it is not", r.path, r.by)
		}
	}
}
