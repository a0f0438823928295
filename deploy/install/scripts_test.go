package install

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// machine is a folder that the scripts use as the machine's root, with fake programs that record
// their calls.
type machine struct {
	t    *testing.T
	root string
	bin  string // first in PATH
	log  string
}

// fake creates a program that records its call and runs body.
func (m *machine) fake(name, body string) {
	m.t.Helper()
	script := "#!/bin/sh\necho \"" + filepath.Base(name) + " $*\" >>" + m.log + "\n" + body + "\n"
	if !filepath.IsAbs(name) {
		name = filepath.Join(m.bin, name)
	}
	m.file(name, script, 0o755)
}

func (m *machine) file(path, content string, mode fs.FileMode) {
	m.t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		m.t.Fatal(err)
	}
}

// newMachine returns a machine that Keelson can be installed on: systemd, cgroup v2, root.
func newMachine(t *testing.T) *machine {
	t.Helper()
	dir := t.TempDir()
	m := &machine{t: t, root: filepath.Join(dir, "root"), bin: filepath.Join(dir, "bin"),
		log: filepath.Join(dir, "log")}
	for _, d := range []string{"run/systemd/system", "tmp"} {
		if err := os.MkdirAll(filepath.Join(m.root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	m.file(filepath.Join(m.root, "sys/fs/cgroup/cgroup.controllers"), "cpu memory pids\n", 0o644)
	m.file(m.log, "", 0o644)
	m.fake("id", "echo 0")
	m.fake("sleep", "")
	m.fake("uname", "[ $1 = -m ] && echo x86_64 || echo cp1")
	m.fake("ip", `case "$*" in *"route get"*) echo "192.0.2.1 via 192.0.2.254 dev eth0 src 192.0.2.11 uid 0";; esac`)
	// No other program is in PATH, so that accidental calls fail.
	for _, name := range []string{"awk", "cat", "chmod", "cmp", "cp", "cut", "diff", "dirname", "env", "find", "flock",
		"grep", "gzip", "head", "kill", "ls", "mkdir", "mktemp", "mv", "readlink",
		"rm", "rmdir", "sed", "sh", "sha256sum", "sort", "tar", "touch", "tr"} {
		path, err := exec.LookPath(name)
		if err == nil {
			err = os.MkdirAll(m.bin, 0o755)
		}
		if err == nil {
			err = os.Symlink(path, filepath.Join(m.bin, name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"nft", "iptables-save", "ip6tables-save", "umount", "apt-get", "dpkg-query"} {
		m.fake(name, "")
	}
	m.fake("systemctl", `case $1 in
is-active) [ -e `+m.root+`/active ] ;;
start) touch `+m.root+`/active ;;
esac`)
	return m
}

// run runs a script, and returns its output and the called programs.
func (m *machine) run(script string, args ...string) (said string, called []string, err error) {
	m.t.Helper()
	if err := os.WriteFile(m.log, nil, 0o644); err != nil {
		m.t.Fatal(err)
	}
	cmd := exec.Command("sh", append([]string{script}, args...)...)
	cmd.Env = []string{"PATH=" + m.bin, "DESTDIR=" + m.root, "DPKG_ROOT=" + m.root,
		"TMPDIR=" + filepath.Join(m.root, "tmp"), "MOUNTINFO=" + filepath.Join(m.root, "mountinfo")}
	out, err := cmd.CombinedOutput()
	raw, _ := os.ReadFile(m.log)
	for line := range strings.Lines(string(raw)) {
		called = append(called, strings.TrimSpace(line))
	}
	return string(out), called, err
}

// tree returns all files below the root, except the kernel's and temporary ones, with modes and
// contents.
func (m *machine) tree() map[string]string {
	m.t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(m.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if to, err := os.Readlink(path); err == nil {
			all[strings.TrimPrefix(path, m.root)] = "-> " + to
			return nil
		}
		content, err := os.ReadFile(path)
		info, err2 := d.Info()
		if err == nil && err2 == nil {
			all[strings.TrimPrefix(path, m.root)] = fmt.Sprintf("%v %s", info.Mode().Perm(), content)
		}
		return err
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return all
}

// release creates an unpacked release, and the folder of its tarball and sums. Its programs record
// their calls.
func (m *machine) release() (unpacked, packed string) {
	m.t.Helper()
	packed = m.t.TempDir()
	name := "keelson-v1-linux-amd64"
	unpacked = filepath.Join(packed, name)
	for _, p := range []string{"kctl", "keelson-agent", "keelson-csi-local", "keelson-oci", "keelson-pause",
		"keelson-shim"} {
		m.fake(filepath.Join(unpacked, "usr/bin", p), "")
	}
	m.fake(filepath.Join(unpacked, "usr/bin/keelson-controlplane"),
		`case $1 in init | join) [ ! -e `+m.root+`/fail ] || exit 1; mkdir -p `+m.root+
			`/var/lib/keelson/controlplane/pki; touch `+m.root+`/var/lib/keelson/controlplane/cluster.json ;; esac`)
	m.fake(filepath.Join(unpacked, "opt/cni/bin/bridge"), "")
	for at, from := range map[string]string{"etc/keelson/agent.yaml": "agent.yaml",
		"etc/keelson/controlplane.yaml":                       "controlplane.yaml",
		"usr/lib/systemd/system/keelson-agent.service":        "keelson-agent.service",
		"usr/lib/systemd/system/keelson-controlplane.service": "keelson-controlplane.service",
		"usr/lib/systemd/system/keelson-pods.service":         "keelson-pods.service",
		"usr/lib/systemd/system/keelson.slice":                "keelson.slice", "install.sh": "install.sh",
		"uninstall.sh": "uninstall.sh"} {
		raw, err := os.ReadFile(from)
		if err != nil {
			m.t.Fatal(err)
		}
		m.file(filepath.Join(unpacked, at), string(raw), 0o755)
	}
	m.file(filepath.Join(packed, "entry.tar"), "an image", 0o644)
	sums := ""
	for file, args := range map[string][]string{name + ".tar.gz": {"-czf", name + ".tar.gz", name},
		name + "-images.tar": {"-cf", name + "-images.tar", "entry.tar"}} {
		cmd := exec.Command("tar", args...)
		cmd.Dir = packed
		if out, err := cmd.CombinedOutput(); err != nil {
			m.t.Fatalf("%v\n%s", err, out)
		}
		raw, err := os.ReadFile(filepath.Join(packed, file))
		if err != nil {
			m.t.Fatal(err)
		}
		sums += fmt.Sprintf("%x  %s\n", sha256.Sum256(raw), file)
	}
	m.file(filepath.Join(packed, "SHA256SUMS"), sums, 0o644)
	return unpacked, packed
}

func TestScriptsAreShell(t *testing.T) {
	for _, s := range []string{"install.sh", "uninstall.sh", "deb/preinst", "deb/postinst", "deb/prerm", "deb/postrm"} {
		if out, err := exec.Command("sh", "-n", s).CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", s, err, out)
		}
		if path, err := exec.LookPath("shellcheck"); err == nil {
			if out, err := exec.Command(path, "-s", "sh", s).CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s", s, err, out)
			}
		}
	}
}

// Every problem is reported in one sentence, and nothing is changed.
func TestRefusals(t *testing.T) {
	gone := func(path string) func(*machine) {
		return func(m *machine) {
			if err := os.RemoveAll(filepath.Join(m.root, path)); err != nil {
				m.t.Fatal(err)
			}
		}
	}
	for _, c := range []struct {
		name   string
		args   string
		damage func(*machine)
		want   string
	}{
		{"no role", "", nil, "install.sh server --init"},
		{"another role", "worker", nil, "worker: want server or agent"},
		{"a flag that is none", "agent --sever x", nil, "--sever is no flag"},
		{"no value", "agent --server", nil, "--server needs a value"},
		{"no server", "agent --token t", nil, "--server is missing"},
		{"no token", "server --server h", nil, "--token is missing"},
		{"both tokens", "agent --server h --token t --token-file /dev/null", nil, "give one of them"},
		{"no such token file", "agent --server h --token-file /none", nil, "--token-file /none cannot be read"},
		{"init and join", "server --init --server h", nil, "--init makes a new cluster"},
		{"init of an agent", "agent --init", nil, "are of a server"},
		{"images of a server", "server --init --images f", nil, "are of an agent"},
		{"init's flags without it", "server --server h --token t --init-flag=--cluster-cidr=10.0.0.0/8", nil,
			"--init-flag goes with --init"},
		{"a shell in a value", "agent --token t --server h;reboot", nil,
			"there are characters in it that no such value has"},
		{"settings and a name", "server --init --settings /dev/null --name x", nil,
			"--settings has all settings: --name"},
		{"settings and servers of an agent", "agent --settings /dev/null --server h", nil,
			"an agent's servers stand in the file"},
		{"settings that are not there", "agent --settings /none --token t", nil, "/none cannot be read"},
		{"settings and no token", "agent --settings /dev/null", nil, "--token is missing"},
		{"an administrator of an agent", "agent --server h --token t --admin /dev/null", nil,
			"--admin and --advertise-address are of a server"},
		{"a standby that makes a cluster", "server --init --standby", nil, "--standby is of a machine that joins one"},
		{"a standby that is an agent", "agent --server h --token t --standby", nil,
			"--standby, --admin and --advertise-address are of a server"},
		{"not root", "server --init", func(m *machine) {
			m.fake("id", "echo 1000")
		}, "root is needed: run it with sudo"},
		{"no systemd", "server --init", gone("run/systemd"), "not run by systemd"},
		{"no cgroup v2", "server --init", gone("sys/fs/cgroup"), "has no cgroup v2"},
		{"another processor", "server --init", func(m *machine) {
			m.fake("uname", "echo riscv64")
		}, "this machine is riscv64"},
		{"a release of another processor", "server --init --from DIR/keelson-v1-linux-arm64.tar.gz", nil,
			"is of another architecture: this machine needs keelson-...-linux-amd64.tar.gz"},
		{"no release", "server --init --from DIR/x.tar.gz", nil, "want keelson-VERSION-linux-amd64.tar.gz"},
		{"a release that is not there", "server --init --from DIR/none/keelson-v2-linux-amd64.tar.gz", nil,
			"SHA256SUMS cannot be read"},
		{"a release of other sums", "server --init --from DIR/keelson-v2-linux-amd64.tar.gz", func(m *machine) {},
			"cannot be read"},
		{"no nft", "agent --server h --token t", func(m *machine) {
			if err := os.Remove(filepath.Join(m.bin, "nft")); err != nil {
				m.t.Fatal(err)
			}
		}, "nft is missing"},
		{"a host's name that is none of a replica", "server --init", func(m *machine) {
			m.fake("uname", "[ $1 = -m ] && echo x86_64 || echo cp1.example.com")
		}, "this one would be cp1.example.com: give --name"},
		{"a name that is none of a replica", "server --server h --token t --name Cp1", nil,
			"this one would be Cp1: give --name"},
		{"no default route", "server --init", func(m *machine) { m.fake("ip", "exit 2") }, "give --advertise-address"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMachine(t)
			unpacked, packed := m.release()
			if c.damage != nil {
				c.damage(m)
			}
			before := m.tree()
			said, called, err := m.run(filepath.Join(unpacked, "install.sh"),
				strings.Fields(strings.ReplaceAll(c.args, "DIR", packed))...)
			if err == nil || !strings.Contains(said, c.want) {
				t.Errorf("%v: %s\nwant %s", err, said, c.want)
			}
			if !equal(before, m.tree()) {
				t.Errorf("something has changed: %v", m.tree())
			}
			if slices.ContainsFunc(called, func(s string) bool {
				return strings.HasPrefix(s, "systemctl") || strings.Contains(s, "reboot")
			}) {
				t.Errorf("called %q", called)
			}
		})
	}
}

func equal(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if b[k] != v {
			return false
		}
	}
	return true
}

// A tarball with a wrong sum is not even unpacked.
func TestSumsAreChecked(t *testing.T) {
	m := newMachine(t)
	unpacked, packed := m.release()
	tarball := filepath.Join(packed, "keelson-v1-linux-amd64.tar.gz")
	raw, err := os.ReadFile(tarball)
	if err != nil {
		t.Fatal(err)
	}
	m.file(tarball, string(append(raw, 0)), 0o644)
	before := m.tree()
	said, _, err := m.run(filepath.Join(unpacked, "install.sh"), "server", "--init", "--from", tarball)
	if err == nil || !strings.Contains(said, "keelson-v1-linux-amd64.tar.gz is not what its release has") ||
		!equal(before, m.tree()) {
		t.Errorf("%v: %s", err, said)
	}
	m.file(filepath.Join(packed, "SHA256SUMS"), strings.Repeat("0", 64)+"  other.tar.gz\n", 0o644)
	if said, _, err = m.run(filepath.Join(unpacked, "install.sh"), "server", "--init", "--from", tarball); err == nil ||
		!strings.Contains(said, "is not in the sums") {
		t.Errorf("%v: %s", err, said)
	}
}

func TestAServerIsInstalled(t *testing.T) {
	m := newMachine(t)
	_, packed := m.release()
	tarball := filepath.Join(packed, "keelson-v1-linux-amd64.tar.gz")
	args := []string{"server", "--init", "--name=cp1", "--init-flag=--cluster-cidr=10.1.0.0/16", "--from", tarball}
	said, called, err := m.run("install.sh", args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	tree := m.tree()
	for file, want := range map[string]string{
		"/usr/bin/keelson-agent": "-rwxr-xr-x", "/opt/cni/bin/bridge": "-rwxr-xr-x",
		"/usr/lib/systemd/system/keelson.slice": "-rw-r--r--", "/usr/lib/keelson/uninstall.sh": "-rwxr-xr-x",
		"/etc/keelson/controlplane.yaml": "-rw-------",
	} {
		if !strings.HasPrefix(tree[file], want) {
			t.Errorf("%s: %.20q, want %s", file, tree[file], want)
		}
	}
	if got := tree["/etc/keelson/controlplane.yaml"]; !strings.Contains(got,
		"\nadvertise-address: \"192.0.2.11\"\nname: \"cp1\"\n") {
		t.Errorf("the settings are %s", got)
	}
	inOrder(t, called, "keelson-controlplane init --config "+m.root+
		"/etc/keelson/controlplane.yaml --cluster-cidr=10.1.0.0/16",
		"systemctl daemon-reload", "systemctl enable --quiet keelson-controlplane.service",
		"systemctl start keelson-controlplane.service")

	said, called, err = m.run("install.sh", args...)
	if err != nil || !strings.Contains(said, "nothing has changed") ||
		!equal(tree, without(m.tree(), "/active")) && !equal(m.tree(), tree) {
		t.Errorf("the second time: %v\n%s", err, said)
	}
	for _, call := range called {
		if strings.Contains(call, "controlplane init") || strings.HasPrefix(call, "systemctl start") ||
			strings.HasPrefix(call, "systemctl restart") {
			t.Errorf("the second time it calls %s", call)
		}
	}

	m.file(filepath.Join(m.root, "usr/bin/kctl"), "older", 0o755)
	if said, called, err = m.run("install.sh", args...); err != nil ||
		!slices.Contains(called, "systemctl restart keelson-controlplane.service") ||
		!strings.Contains(said, "installed /usr/bin/kctl\n") || strings.Count(said, "installed ") != 1 {
		t.Errorf("an upgrade of one program: %v %q\n%s", err, called, said)
	}

	m.file(filepath.Join(m.root, "etc/keelson/controlplane.yaml"), "advertise-address: 192.0.2.99\n", 0o600)
	if said, _, err = m.run("install.sh", args...); err != nil ||
		!strings.Contains(said, "kept /etc/keelson/controlplane.yaml") ||
		!strings.Contains(m.tree()["/etc/keelson/controlplane.yaml"], "192.0.2.99") {
		t.Errorf("somebody's own settings: %v\n%s", err, said)
	}
}

func TestAReplicaJoins(t *testing.T) {
	m := newMachine(t)
	unpacked, _ := m.release()
	said, called, err := m.run(filepath.Join(unpacked, "install.sh"), "server", "--server", "192.0.2.11",
		"--server=192.0.2.12:7444", "--token", "keelson1.controlplane.abc", "--advertise-address", "192.0.2.13")
	if err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	i := slices.IndexFunc(called, func(s string) bool { return strings.Contains(s, "controlplane join") })
	if i < 0 || !strings.HasSuffix(called[i], "--server 192.0.2.11 --server 192.0.2.12:7444") ||
		strings.Contains(strings.Join(called, " "), "keelson1.controlplane.abc") {
		t.Errorf("it calls %q: want a join, and the token on no command line", called)
	}
	if left, _ := os.ReadDir(filepath.Join(m.root, "tmp")); len(left) > 0 {
		t.Errorf("%v is left: it holds the token", left)
	}
	standby := newMachine(t)
	unpacked, _ = standby.release()
	said, called, err = standby.run(filepath.Join(unpacked, "install.sh"), "server", "--standby", "--server",
		"192.0.2.11", "--token", "keelson1.controlplane.abc", "--advertise-address", "192.0.2.14")
	i = slices.IndexFunc(called, func(s string) bool { return strings.Contains(s, "controlplane join") })
	if err != nil || i < 0 || !strings.HasSuffix(called[i], " --standby --server 192.0.2.11") {
		t.Errorf("a standby: %v, it calls %q\n%s", err, called, said)
	}
}

func TestAnAgentIsInstalledAndTakenAway(t *testing.T) {
	m := newMachine(t)
	_, packed := m.release()
	before := m.tree()
	foreign := filepath.Join(m.root, "opt/cni/bin/macvlan")
	m.file(foreign, "of somebody else", 0o755)
	said, called, err := m.run("install.sh", "agent", "--server", "192.0.2.11", "--server", "2001:db8::1",
		"--server=[2001:db8::2]:7444", "--token", "keelson1.node.a+b=_-c", "--node-ip=192.0.2.21",
		"--from", filepath.Join(packed, "keelson-v1-linux-amd64.tar.gz"), "--images",
		filepath.Join(packed, "keelson-v1-linux-amd64-images.tar"))
	if err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	tree := m.tree()
	for file, want := range map[string]string{
		"/etc/keelson/agent.yaml": "server: [\"192.0.2.11:6444\", \"[2001:db8::1]:6444\", " +
			"\"[2001:db8::2]:7444\"]\ntoken-file: /var/lib/keelson/join-token\nnode-ip: [\"192.0.2.21\"]\n",
		"/var/lib/keelson/join-token":         "-rw------- keelson1.node.a+b=_-c\n",
		"/var/lib/keelson/images.d/entry.tar": "an image",
	} {
		if !strings.Contains(tree[file], want) {
			t.Errorf("%s: %q, want %q", file, tree[file], want)
		}
	}
	inOrder(t, called, "systemctl daemon-reload", "systemctl enable --quiet keelson-agent.service",
		"systemctl start keelson-agent.service")
	// A node that has certificates refuses another token.
	m.file(filepath.Join(m.root, "var/lib/keelson/session/node.pem"), "a certificate", 0o600)
	said, _, err = m.run("install.sh", "agent", "--server", "192.0.2.11", "--server", "2001:db8::1",
		"--server=[2001:db8::2]:7444", "--token", "keelson1.node.another", "--node-ip=192.0.2.21",
		"--from", filepath.Join(packed, "keelson-v1-linux-amd64.tar.gz"))
	if err != nil || !strings.Contains(said, "is a node already, and has no use for the token") ||
		strings.Contains(m.tree()["/var/lib/keelson/join-token"], "another") {
		t.Errorf("another token for a node: %v\n%s\n%s", err, said, m.tree()["/var/lib/keelson/join-token"])
	}
	m.file(filepath.Join(m.root, "mountinfo"),
		"1 0 0:1 / / rw - x x rw\n2 1 0:2 / "+m.root+"/run/keelson/oci/a rw - x x rw\n3 2 0:3 / "+m.root+
			"/run/keelson/oci/a/b\\040c rw - x x rw\n"+
			"4 1 0:2 / "+m.root+"/run/keelsonite rw - x x rw\n5 1 0:2 / "+m.root+
			"/var/lib/kubelet/pods/x rw - x x rw\n",
		0o644)
	m.fake("nft", `[ "$1" = delete ] || printf 'table inet keelson\ntable ip keelson-policy\ntable inet other\ntable `+
		`inet cni_hostport\n'`)
	m.fake("ip", `case "$*" in *master*) ;; "-o link show") printf '1: lo: <UP>\n2: keelson0: <UP>\n3: `+
		`keelson-vx@eth0: <UP>\n4: eth0: <UP>\n';; esac`)
	m.file(filepath.Join(m.root, "sys/fs/cgroup/keelson.slice/pods/cgroup.events"), "populated 0\n", 0o644)
	m.file(filepath.Join(m.root, "run/keelson/dns-addresses.json"), `["169.254.20.10","10.96.0.10"]`, 0o644)

	if said, _, err = m.run("uninstall.sh", "--keep-dat"); err == nil ||
		!strings.Contains(said, "--keep-dat is no flag") {
		t.Errorf("%v: %s", err, said)
	}
	if err := os.RemoveAll(filepath.Join(m.root, "sys/fs/cgroup/keelson.slice")); err != nil {
		t.Fatal(err)
	}
	said, called, err = m.run(filepath.Join(m.root, "usr/lib/keelson/uninstall.sh"), "--keep-data")
	if err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	inOrder(t, called, "systemctl disable --quiet --now keelson-agent.service",
		"systemctl disable --quiet --now keelson-pods.service", "keelson-agent remove-network",
		"ip link delete keelson0", "ip link delete keelson-vx", "ip address delete 169.254.20.10 dev lo",
		"ip address delete 10.96.0.10 dev lo", "nft delete table inet keelson", "nft delete table ip keelson-policy",
		"nft delete table inet cni_hostport", "umount -l "+m.root+"/var/lib/kubelet/pods/x",
		"umount -l "+m.root+"/run/keelson/oci/a/b c", "umount -l "+m.root+"/run/keelson/oci/a",
		"systemctl daemon-reload")
	for _, call := range called {
		if strings.HasSuffix(call, " other") || strings.Contains(call, "eth0") || strings.Contains(call, "keelsonite") {
			t.Errorf("it takes away what is not Keelson's: %s", call)
		}
	}
	tree = m.tree()
	if tree["/etc/keelson/agent.yaml"] == "" || tree["/var/lib/keelson/join-token"] == "" ||
		tree["/usr/bin/kctl"] != "" {
		t.Errorf("--keep-data leaves %v", tree)
	}
	m.fake("umount", "exit 1")
	m.file(filepath.Join(m.root, "etc/cni/net.d/other.conf"), "", 0o644)
	if said, _, err = m.run("uninstall.sh", "--keep-data"); err == nil || !strings.Contains(said, "stays mounted") ||
		!strings.Contains(said, "not everything is gone") {
		t.Errorf("with mounts that stay: %v\n%s", err, said)
	}
	if err := os.RemoveAll(filepath.Join(m.root, "etc/cni")); err != nil {
		t.Fatal(err)
	}
	m.fake("umount", "")
	for _, at := range []string{"run/keelson-changed/keelson-agent",
		"var/cache/keelson/keelson-v1-linux-amd64.tar.gz"} {
		m.file(filepath.Join(m.root, at), "", 0o600)
	}
	if said, _, err = m.run("uninstall.sh"); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	if tree = without(m.tree(), "/active", "/mountinfo", "/opt/cni/bin/macvlan"); !equal(tree, before) {
		t.Errorf("left: %v", tree)
	}
	if _, err := os.Stat(foreign); err != nil {
		t.Errorf("a plugin of somebody else is gone: %v", err)
	}
}

func without(tree map[string]string, files ...string) map[string]string {
	for _, f := range files {
		delete(tree, f)
	}
	return tree
}

// inOrder checks that calls occurred in an order, possibly with others in between.
func inOrder(t *testing.T, called []string, want ...string) {
	t.Helper()
	for _, call := range called {
		if len(want) > 0 && call == want[0] {
			want = want[1:]
		}
	}
	if len(want) > 0 {
		t.Errorf("no call of %q, or not in this order, in %q", want[0], called)
	}
}

// An interrupted init leaves unused keys, so the next run starts again. If a store exists, it does
// not.
func TestAnInitThatWasCutOff(t *testing.T) {
	m := newMachine(t)
	unpacked, _ := m.release()
	args := []string{"server", "--init", "--advertise-address", "192.0.2.11"}
	m.file(filepath.Join(m.root, "var/lib/keelson/controlplane/pki/ca.crt"), "of before", 0o600)
	m.file(filepath.Join(m.root, "var/lib/keelson/controlplane/raft/log"), "data", 0o600)
	said, called, err := m.run(filepath.Join(unpacked, "install.sh"), args...)
	if err == nil || !strings.Contains(said, "has a store and no cluster.json") ||
		m.tree()["/var/lib/keelson/controlplane/pki/ca.crt"] == "" {
		t.Errorf("%v: %s", err, said)
	}
	if err := os.RemoveAll(filepath.Join(m.root, "var/lib/keelson/controlplane/raft")); err != nil {
		t.Fatal(err)
	}
	said, called, err = m.run(filepath.Join(unpacked, "install.sh"), args...)
	if err != nil || !strings.Contains(said, "it is begun again") ||
		m.tree()["/var/lib/keelson/controlplane/pki/ca.crt"] != "" {
		t.Errorf("%v: %s", err, said)
	}
	if !slices.ContainsFunc(called, func(s string) bool { return strings.HasPrefix(s, "keelson-controlplane init") }) {
		t.Errorf("no init among %q", called)
	}
}
