package provision

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spf13/pflag"

	"keelson.dev/keelson/test/testenv/sshd"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if dir := machineDir.Load(); dir != nil {
		if err := os.RemoveAll(*dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// machineDir is the folder of the program testdata/machine once a test has built it. TestMain removes the folder.
var machineDir atomic.Pointer[string]

// buildMachine builds testdata/machine once for all tests and returns its path.
var buildMachine = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "kctl-machine-")
	if err != nil {
		return "", err
	}
	machineDir.Store(&dir)
	to := filepath.Join(dir, "machine")
	cmd := exec.Command("go", "build", "-o", to, "./testdata/machine")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building testdata/machine: %w: %s", err, out)
	}
	return to, nil
})

// folderMachine is a machine that is a folder, reached by ssh.
type folderMachine struct {
	name, root string
	ssh        *sshd.Server
}

// site are machines of one cluster, and the file that names them.
type site struct {
	t       *testing.T
	dir     string
	shared  string // the file that the cluster is in
	program string
	file    string
	all     map[string]*folderMachine
	release string
	level   string // what programs that are packed say of the forms that they understand; "" = those of the model
}

func put(t *testing.T, path, content string, mode fs.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

// newSite returns a site without machines.
func newSite(t *testing.T) *site {
	t.Helper()
	program, err := buildMachine()
	if err != nil {
		t.Fatal(err)
	}
	s := &site{t: t, dir: t.TempDir(), program: program, all: map[string]*folderMachine{}}
	s.shared, s.file, s.release = filepath.Join(s.dir, "cluster"), filepath.Join(s.dir, "cluster.yaml"),
		filepath.Join(s.dir, "dist")
	t.Setenv("HOME", filepath.Join(s.dir, "home"))
	t.Setenv("KUBECONFIG", filepath.Join(s.dir, "home/.kube/config")) // the default was read from the real home already
	t.Setenv("SSH_AUTH_SOCK", "")
	s.pack("v1")
	return s
}

// pack makes a release, whose programs are the one that stands for them all.
func (s *site) pack(version string) {
	s.t.Helper()
	if err := os.RemoveAll(s.release); err != nil {
		s.t.Fatal(err)
	}
	name := "keelson-" + version + "-linux-amd64"
	tree := filepath.Join(s.release, name)
	for _, p := range []string{"kctl", "keelson-agent", "keelson-controlplane", "keelson-csi-local", "keelson-oci",
		"keelson-pause", "keelson-shim"} {
		put(s.t, filepath.Join(tree, "usr/bin", p),
			"#!/bin/sh\nVERSION="+version+" LEVEL="+s.level+" exec "+s.program+" "+p+" \"$@\"\n", 0o755)
	}
	put(s.t, filepath.Join(tree, "opt/cni/bin/bridge"), "a plugin", 0o755)
	for at, from := range map[string]string{"etc/keelson/agent.yaml": "agent.yaml",
		"etc/keelson/controlplane.yaml":                       "controlplane.yaml",
		"usr/lib/systemd/system/keelson-agent.service":        "keelson-agent.service",
		"usr/lib/systemd/system/keelson-controlplane.service": "keelson-controlplane.service",
		"usr/lib/systemd/system/keelson-pods.service":         "keelson-pods.service",
		"usr/lib/systemd/system/keelson.slice":                "keelson.slice", "install.sh": "install.sh",
		"uninstall.sh": "uninstall.sh"} {
		raw, err := os.ReadFile(filepath.Join("../../deploy/install", from))
		if err != nil {
			s.t.Fatal(err)
		}
		put(s.t, filepath.Join(tree, at), string(raw), 0o755)
	}
	put(s.t, filepath.Join(s.release, "entry.tar"), "images of "+version, 0o644)
	sums := ""
	for _, of := range [][]string{{name + ".tar.gz", "-czf", name}, {name + "-images.tar", "-cf", "entry.tar"}} {
		cmd := exec.Command("tar", of[1], of[0], of[2])
		cmd.Dir = s.release
		if out, err := cmd.CombinedOutput(); err != nil {
			s.t.Fatalf("%v: %s", err, out)
		}
		raw, err := os.ReadFile(filepath.Join(s.release, of[0]))
		if err != nil {
			s.t.Fatal(err)
		}
		sums += fmt.Sprintf("%x  %s\n", sha256.Sum256(raw), of[0])
	}
	put(s.t, filepath.Join(s.release, "SHA256SUMS"), sums, 0o644)
}

// machine makes one that is as a machine of Debian, without anything of Keelson's.
func (s *site) machine(name, address string) *folderMachine {
	s.t.Helper()
	m := &folderMachine{name: name, root: filepath.Join(s.dir, name)}
	bin := filepath.Join(s.dir, name+"-bin")
	for path, content := range map[string]string{
		"etc/machine-id": fmt.Sprintf("%x", sha256.Sum256([]byte(name)))[:32], "run/systemd/system/x": "",
		"sys/fs/cgroup/cgroup.controllers": "cpu io memory pids\n",
		"proc/net/tcp":                     "  sl  local_address rem_address   st\n",
		"proc/meminfo":                     "MemTotal:        2097152 kB\n",
		"tmp/x":                            "", "mountinfo": "",
	} {
		put(s.t, filepath.Join(m.root, path), content, 0o644)
	}
	for name, body := range map[string]string{
		// how fast the disk is depends on what else runs
		"id": "echo 0", "sleep": "", "modprobe": "", "nft": "", "firewall-cmd": "exit 252", "journalctl": "",
		"dd":    "exit 1",
		"uname": `case $1 in -n) echo ` + name + ` ;; -m) echo x86_64 ;; -r) echo 6.1.0-18-amd64 ;; esac`,
		"ip": `case "$*" in "-o address show") printf '2: eth0    inet ` + address +
			`/24 brd x scope global eth0\n' ;; esac`,
		"df":        `printf 'Filesystem 1024-blocks Used Available Capacity Mounted\n/dev/vda 1 1 20971520 1%% /\n'`,
		"systemctl": "exec " + s.program + " systemctl \"$@\"",
	} {
		put(s.t, filepath.Join(bin, name), "#!/bin/sh\n"+body+"\n", 0o755)
	}
	m.ssh = sshd.New(s.t, "PATH="+bin+":/usr/sbin:/usr/bin:/sbin:/bin", "DESTDIR="+m.root, "CLUSTER="+s.shared,
		"TMPDIR="+filepath.Join(m.root, "tmp"), "MOUNTINFO="+filepath.Join(m.root, "mountinfo"))
	s.all[name] = m
	return m
}

// write writes the cluster file; of each host it adds the way by ssh. A host is "NAME ADDRESS ROLES more".
func (s *site) write(head string, hosts ...string) {
	s.t.Helper()
	out := "apiVersion: keelson.dev/v1\nkind: Machines\nname: prod\nrelease: dist\n" + head + "hosts:\n"
	for _, h := range hosts {
		f := strings.SplitN(h, " ", 4)
		m := s.all[f[0]]
		if m == nil {
			m = s.machine(f[0], f[1])
		}
		out += fmt.Sprintf("- {name: %s, address: %s, roles: [%s], ssh: {address: 127.0.0.1, port: %d, key: %s, "+
			"knownHosts: %s}%s}\n", f[0], f[1], f[2], m.ssh.Port, m.ssh.Key, m.ssh.KnownHosts, strings.Join(f[3:], ""))
	}
	put(s.t, s.file, out, 0o644)
}

// kctl runs a verb of 'kctl cluster', and says what it said, without what differs from run to run.
func (s *site) kctl(verb string, args ...string) (string, error) {
	var out bytes.Buffer
	var err error
	ctx := context.WithoutCancel(s.t.Context())
	switch verb {
	case "up", "add":
		r := installFlags{file: s.file, newOnly: verb == "add"}
		for _, a := range args {
			switch a {
			case "--dry-run":
				r.dryRun = true
			case "--merge":
				r.merge = true
			default:
				if where, ok := strings.CutPrefix(a, "--release="); ok {
					r.release = where
				} else {
					r.names = append(r.names, a)
				}
			}
		}
		err = r.install(ctx, &out)
	case "upgrade":
		u := machineUpgrade{file: s.file}
		flags := pflag.NewFlagSet(verb, pflag.ContinueOnError)
		flags.StringVar(&u.to, "to", "", "")
		u.addFlags(flags)
		if err = flags.Parse(args); err == nil {
			err = u.upgradeMachines(ctx, &out)
		}
	case "remove":
		lost, dry := false, false
		for _, a := range args[1:] {
			lost, dry = lost || a == "--lost", dry || a == "--dry-run"
		}
		err = removeMachine(ctx, &out, s.file, args[0], lost, dry)
	case "reset":
		err = resetMachines(ctx, strings.NewReader(strings.Join(args, "")+"\n"), &out, s.file, "")
	}
	said := inOrder(out.String())
	for old, new := range map[*regexp.Regexp]string{
		regexp.MustCompile(`(?m)^ *\d+\.\ds  `): "   ?.?s  ", regexp.MustCompile(`done in \d+s`): "done in ?s",
		regexp.MustCompile(`iB  +[\d.]+[mµ]?s  +`):  "iB   ?ms   ",
		regexp.MustCompile(regexp.QuoteMeta(s.dir)): "DIR", regexp.MustCompile(`ROOM +FSYNC +`): "ROOM FSYNC ",
		regexp.MustCompile(`127\.0\.0\.1:\d+`): "127.0.0.1:PORT", regexp.MustCompile(`\d+\.\d+s +(.*nothing)`): "?s $1",
	} {
		said = old.ReplaceAllString(said, new)
	}
	return said, err
}

// besides are lines of things that are done side by side: they come in any order.
var besides = regexp.MustCompile(`has the release$|: (join as a node|change the agent|uninstall): done in`)

// inOrder sorts such lines where they follow each other, by machine.
func inOrder(said string) string {
	lines := strings.Split(said, "\n")
	for i := 0; i < len(lines); {
		n := i
		for n < len(lines) && besides.MatchString(lines[n]) {
			n++
		}
		slices.SortFunc(lines[i:n], func(a, b string) int { return strings.Compare(afterTime(a), afterTime(b)) })
		i = max(n, i+1)
	}
	return strings.Join(lines, "\n")
}

func afterTime(line string) string {
	_, after, _ := strings.Cut(line, "s  ")
	return after
}

// tree are all files of a machine but for what the model of systemd keeps, with modes and contents.
func (m *folderMachine) tree(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(m.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path)
		info, err2 := d.Info()
		if err == nil && err2 == nil {
			all[strings.TrimPrefix(path, m.root)] = fmt.Sprintf("%v %s", info.Mode().Perm(), raw)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}
