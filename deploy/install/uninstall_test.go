package install

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// An operator's disk with data stays mounted: if it were unmounted, it would return with the next
// boot, with its data.
func TestDisksOfDataStayMounted(t *testing.T) {
	const own, disk = "own", "disk" // of the agent, or of the operator
	mounts := []struct{ at, root, whose string }{
		{"/var/lib/keelson", "/", disk},
		{"/var/lib/keelson/controlplane", "/", disk},
		{"/var/lib/keelson/controlplane/backups", "/", "below data"},
		{"/var/lib/keelson/local-volumes", "/volumes", disk},
		{"/var/lib/keelson/images", "/", disk},
		{"/var/lib/keelson/images", "/var/lib/keelson/images", own},
		{"/var/lib/keelson/images", "/images", own}, // on a disk at /var/lib/keelson
		{"/var/lib/keelson/volumes/u/a\\040b", "/", own},
		{"/var/lib/keelson/kubelet/x/globalmount", "/", own},
		{"/var/lib/keelsonite", "/", disk},
	}
	for _, c := range mounts {
		for _, flag := range []string{"--keep-data", ""} {
			t.Run(c.at+" of "+c.root+" "+flag, func(t *testing.T) {
				m := newMachine(t)
				m.file(filepath.Join(m.root, "mountinfo"),
					"1 0 8:1 / / rw - ext4 x rw\n2 1 8:2 "+c.root+" "+m.root+c.at+" rw - ext4 x rw\n", 0o644)
				said, called, err := m.run("uninstall.sh", strings.Fields(flag)...)
				if err != nil {
					t.Fatalf("%v\n%s", err, said)
				}
				umount := slices.Contains(called, "umount -l "+m.root+strings.ReplaceAll(c.at, "\\040", " "))
				if want := c.whose == own || c.whose == "below data" && flag == ""; umount != want {
					t.Errorf("unmounted: %v, want %v: %q", umount, want, called)
				}
			})
		}
	}
}

// What an agent that was killed has mounted on a disk of images goes, and that alone: not what somebody mounted there afterwards.
func TestADiskOfImagesStaysMounted(t *testing.T) {
	for name, c := range map[string]struct {
		mounts []string // device and root, one above the other
		want   int      // of those that go
	}{
		"the agent's own on a disk": {[]string{"8:2 /", "8:2 /"}, 1},
		"on a folder of a disk":     {[]string{"8:2 /of/node", "8:2 /of/node"}, 1},
		"two disks":                 {[]string{"8:2 /", "8:3 /"}, 0},
		"a disk on the agent's own": {[]string{"8:1 /var/lib/keelson/images", "8:2 /"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			at, lines := m.root+"/var/lib/keelson/images", "1 0 8:1 / / rw - ext4 x rw\n"
			for i, mount := range c.mounts {
				lines += strconv.Itoa(i+2) + " " + strconv.Itoa(i+1) + " " + mount + " " + at + " rw - ext4 x rw\n"
			}
			m.file(filepath.Join(m.root, "mountinfo"), lines, 0o644)
			said, called, err := m.run("uninstall.sh")
			if err != nil {
				t.Fatalf("%v\n%s", err, said)
			}
			got := 0
			for _, call := range called {
				if call == "umount -l "+at {
					got++
				}
			}
			if got != c.want {
				t.Errorf("unmounted %d times, want %d: %q", got, c.want, called)
			}
		})
	}
}

// On a real disk at /var/lib/keelson nothing is left but the disk, which stays mounted, as one below it does; with --keep-data all is left.
func TestDataOnADiskOfItsOwn(t *testing.T) {
	if out, err := exec.Command("unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", t.TempDir()).CombinedOutput(); err !=
		nil {
		t.Skipf("mounting needs root: %v: %s", err, out)
	}
	m := newMachine(t)
	script, err := filepath.Abs("uninstall.sh")
	if err != nil {
		t.Fatal(err)
	}
	umount, err := exec.LookPath("umount")
	if err != nil {
		t.Fatal(err)
	}
	m.fake("umount", "exec "+umount+` "$@"`)
	cmd := exec.Command("unshare", "-m", "sh", "-ec", `
d=$DESTDIR/var/lib/keelson
mkdir -p "$d" && mount -t tmpfs disk "$d"
mkdir "$d/lost+found" "$d/controlplane" && mount -t tmpfs disk "$d/controlplane"
mkdir -p "$d/volumes/uid/nfs" "$d/images/layer" "$d/controlplane/raft" && mount -t tmpfs server "$d/volumes/uid/nfs" && mount --bind "$d/images" "$d/images"
touch "$d/controlplane/cluster.json" "$d/controlplane/raft/log" "$d/volumes/uid/nfs/of a server" "$d/images/layer/file"
exec 8<"$d/volumes/uid/nfs"
of() { echo "$1: $(cd "$d" && find . -type f | sort | tr '\n' ' ')"; sed -n "s|^[^ ]* [^ ]* [^ ]* [^ ]* $DESTDIR\(/var/lib/keelson[^ ]*\) .*|mounted \1|p" /proc/self/mountinfo; }
PATH=$BIN sh "$SCRIPT" --keep-data >/dev/null
of kept
PATH=$BIN sh "$SCRIPT" >/dev/null
of gone
ls /proc/self/fd/8/`)
	cmd.Env = append(os.Environ(), "DESTDIR="+m.root, "TMPDIR="+filepath.Join(m.root, "tmp"),
		"SCRIPT="+script, "BIN="+m.bin)
	out, err := cmd.CombinedOutput()
	const disks = "mounted /var/lib/keelson\nmounted /var/lib/keelson/controlplane\n"
	if want := "kept: ./controlplane/cluster.json ./controlplane/raft/log ./images/layer/file \n" + disks + "gone: \n" +
		disks + "of a server\n"; err != nil || string(out) != want {
		t.Errorf("%v: got\n%s\nwant\n%s", err, out, want)
	}
}

// Where the folder of data is a link, what it leads to may be more than Keelson's.
func TestDataElsewhereAreNamed(t *testing.T) {
	m := newMachine(t)
	kept := []string{"/srv/data/file", "/srv/data/controlplane/raft", "/srv/data/images/sha256/a"}
	for _, name := range kept {
		m.file(filepath.Join(m.root, name), "", 0o600)
	}
	m.file(filepath.Join(m.root, "mountinfo"), "", 0o600)
	at := filepath.Join(m.root, "var/lib/keelson")
	if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o755),
		os.Symlink(filepath.Join(m.root, "srv/data"), at)); err != nil {
		t.Fatal(err)
	}
	if said, _, err := m.run("uninstall.sh"); err == nil ||
		!strings.Contains(said, at+" was a link to another folder: what is there stays") {
		t.Errorf("%v: %s", err, said)
	}
	if said, _, err := m.run("uninstall.sh"); err != nil {
		t.Errorf("the second time: %v: %s", err, said)
	}
	for _, name := range kept {
		if _, there := m.tree()[name]; !there {
			t.Errorf("the link led to %s, and it is gone", name)
		}
	}
}

// Virtual servers of IPVS are the agent's to take away, with the interface that says there are any: those of others stay, and what
// an agent does not do is said. The interface goes in any case.
func TestVirtualServersAreTheAgents(t *testing.T) {
	const with, header = "keelson0 keelson-ipvs0",
		"IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n  -> " +
			"RemoteAddress:Port Forward Weight ActiveConn InActConn\n"
	const server = "TCP  0A60000A:0050 rr \n  -> 0AF40002:1F90      Masq    1      0          0         \n"
	const stay = "virtual servers of Services may be in IPVS still"
	for _, c := range []struct {
		name, links, servers string
		agent                string // does this; "": there is none
		want                 string // what is said to stay; "": nothing
	}{
		{"an agent that takes them away", with, header + server, "rm LINKS/keelson-ipvs0", ""},
		{"an agent that fails", with, header + server, "exit 1", stay},
		{"an agent of a release before", with, header + server, "true", stay},
		{"no agent", with, header + server, "", stay},
		{"no server, and an agent of a release before", with, header, "true", ""},
		{"no IPVS any more, and no agent", with, "", "", ""},
		{"a node of another mode, with servers of others", "keelson0", header + server, "true", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMachine(t)
			links := filepath.Join(m.root, "links")
			m.file(filepath.Join(m.root, "mountinfo"), "", 0o600)
			for name := range strings.FieldsSeq(c.links) {
				m.file(filepath.Join(links, name), "", 0o600)
			}
			if c.servers != "" {
				m.file(filepath.Join(m.root, "proc/net/ip_vs"), c.servers, 0o600)
			}
			if c.agent != "" {
				m.fake(filepath.Join(m.root, "usr/bin/keelson-agent"), strings.ReplaceAll(c.agent, "LINKS", links))
			}
			m.fake("ipvsadm", "")
			m.fake("ip", `cd `+links+`
case "$*" in
*master*) ;;
"-o link show") n=0; for l in *; do n=$((n + 1)); [ ! -e "$l" ] || echo "$n: $l: <UP>"; done ;;
"link show "*) [ -e "$3" ] ;;
"link delete "*) rm "$3" ;;
esac`)
			said, called, err := m.run("uninstall.sh")
			if (err != nil) != (c.want != "") || !strings.Contains(said, c.want) ||
				c.want == "" && strings.Contains(said, stay) {
				t.Errorf("%v: %s\nwant %q", err, said, c.want)
			}
			if asked := slices.Contains(called, "keelson-agent remove-network"); asked != (c.agent != "") {
				t.Errorf("the agent was asked: %v: %q", asked, called)
			}
			if slices.ContainsFunc(called, func(s string) bool { return strings.HasPrefix(s, "ipvsadm") }) {
				t.Errorf("servers of others may be gone: %q", called)
			}
			if left, _ := os.ReadDir(links); len(left) > 0 {
				t.Errorf("%v are left", left)
			}
		})
	}
}

// The agent ends the iSCSI sessions of volumes, once those are unmounted and while it knows of them. What it does not end is named, and
// the note of it stays for whoever does; a machine that has none needs no such agent.
func TestSessionsOfVolumesEnd(t *testing.T) {
	const one, other = "var/lib/kubelet/plugins/kubernetes.io/iscsi/default/iqn.2026-01.example:one/target.json",
		"var/lib/kubelet/plugins/kubernetes.io/iscsi/192.0.2.1:pv/eui.0123456789abcdef/target.json"
	const unknown = `echo "unexpected argument $1" >&2; exit 2`
	for _, c := range []struct {
		name  string
		notes []string
		agent string // is asked for the volumes, and does this; "": there is none
		left  []string
	}{
		{"an agent that ends them", []string{one, other}, "rm ROOT/" + one + " 'ROOT/" + other + "'", nil},
		{"one that stays", []string{one, other}, "rm ROOT/" + one + "; exit 1", []string{other}},
		{"an agent of a release before", []string{one}, unknown, []string{one}},
		{"no agent", []string{one, other}, "", []string{one, other}},
		{"no volumes, and an agent of a release before", nil, unknown, nil},
		{"no volumes, and no agent", nil, "", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMachine(t)
			const beside = "var/lib/kubelet/plugins/kubernetes.io/iscsi/default/iqn.2026-01.example:one/lun-0"
			m.file(filepath.Join(m.root, "mountinfo"), "1 0 8:1 / "+m.root+"/"+beside+" rw - ext4 x rw\n", 0o600)
			for _, note := range c.notes {
				m.file(filepath.Join(m.root, note), "{}", 0o600)
			}
			for _, name := range []string{"driver/csi.sock", "kubernetes.io/csi/x/vol_data.json",
				"kubernetes.io/iscsi/default/iqn.2026-01.example:one/lun-0/x",
				"kubernetes.io/iscsi/iface-default/x/iscsi.json"} {
				m.file(filepath.Join(m.root, "var/lib/kubelet/plugins", name), "", 0o600)
			}
			if c.agent != "" {
				m.fake(filepath.Join(m.root, "usr/bin/keelson-agent"),
					`[ "$1" = remove-volumes ] || exit 0; `+strings.ReplaceAll(c.agent, "ROOT", m.root))
			}
			said, called, err := m.run("uninstall.sh", "--keep-data")
			if (err != nil) != (len(c.left) > 0) {
				t.Errorf("%v: %s", err, said)
			}
			if c.agent != "" && len(c.notes) > 0 {
				inOrder(t, called, "systemctl disable --quiet --now keelson-agent.service",
					"umount -l "+m.root+"/"+beside, "keelson-agent remove-volumes", "systemctl daemon-reload")
			} else if slices.Contains(called, "keelson-agent remove-volumes") {
				t.Errorf("an agent was asked for nothing: %q", called)
			}
			var left []string
			for name := range m.tree() {
				if strings.HasPrefix(name, "/var/lib/kubelet/") {
					left = append(left, name[1:])
				}
			}
			want := slices.Sorted(slices.Values(c.left))
			if slices.Sort(left); !slices.Equal(left, want) {
				t.Errorf("left: %q, want %q", left, want)
			}
			for _, name := range want {
				if target := filepath.Base(filepath.Dir(name)); !strings.Contains(said,
					"sessions with iSCSI target "+target+" ") ||
					!strings.Contains(said, m.root+"/"+name+" says what was made") {
					t.Errorf("%s\ndoes not name %s", said, name)
				}
			}
			// Whoever has ended them by hand deletes the notes.
			if err := os.RemoveAll(filepath.Join(m.root, "var/lib/kubelet/plugins/kubernetes.io/iscsi")); err != nil {
				t.Fatal(err)
			}
			if said, _, err := m.run("uninstall.sh"); err != nil {
				t.Errorf("the second time: %v: %s", err, said)
			}
			if _, err := os.Stat(filepath.Join(m.root, "var/lib/kubelet")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("kubelet's folder, in the end: %v", err)
			}
		})
	}
}

// A file that was installed only in part leaves no remains: after the error, after the next run,
// and after uninstall.
func TestHalfAFileDoesNotStay(t *testing.T) {
	for _, c := range []struct{ target, role string }{
		{"/usr/bin/keelson-agent", "agent"}, {"/usr/lib/systemd/system/keelson-pods.service", "agent"},
		{"/opt/cni/bin/bridge", "agent"}, {"/usr/lib/keelson/uninstall.sh", "agent"},
		{"/etc/keelson/agent.yaml", "agent"}, {"/etc/keelson/controlplane.yaml", "server"},
		{"/var/lib/keelson/controlplane/admin.kubeconfig", "server"},
	} {
		t.Run(filepath.Base(c.target), func(t *testing.T) {
			m := newMachine(t)
			unpacked, _ := m.release()
			m.file(filepath.Join(m.root, "mountinfo"), "", 0o600)
			m.file(filepath.Join(m.root, "opt/cni/bin/bridge"), "of somebody else", 0o755)
			cp, err := os.Readlink(filepath.Join(m.bin, "cp"))
			if err == nil {
				err = os.Remove(filepath.Join(m.bin, "cp"))
			}
			if err != nil {
				t.Fatal(err)
			}
			copying := func(how string) {
				m.fake("cp", `if [ "$2" = `+m.root+c.target+`.new ]; then echo half >"$2"; `+how+`; fi
exec `+cp+` "$@"`)
			}
			admin := filepath.Join(m.root, "tmp/admin")
			m.file(admin, "a kubeconfig\n", 0o600)
			args := []string{c.role, "--server", "192.0.2.11", "--token", "keelson1.x"}
			if c.role == "server" {
				args = append(args, "--admin", admin)
			}
			left := func() bool { _, there := m.tree()[c.target+".new"]; return there }
			install, uninstall := filepath.Join(unpacked, "install.sh"), filepath.Join(unpacked, "uninstall.sh")
			copying("exit 1")
			if said, _, err := m.run(install, args...); err == nil ||
				!strings.Contains(said, c.target+" could not be written") {
				t.Errorf("%v: %s", err, said)
			}
			if !strings.HasSuffix(c.target, "admin.kubeconfig") && left() {
				t.Error("what could not be written is left in part")
			}
			cut := func() {
				t.Helper()
				copying("kill -9 $PPID")
				if _, _, err := m.run(install, args...); err == nil || !left() {
					t.Fatalf("it was not cut off (%v), or leaves nothing", err)
				}
				copying("true")
			}
			for _, flag := range []string{"", "--keep-data"} {
				cut()
				if said, _, err := m.run(uninstall, strings.Fields(flag)...); err != nil || left() {
					t.Errorf("uninstall.sh %s: %v: %s\nleft in part: %v", flag, err, said, left())
				}
			}
			if said, _, err := m.run(uninstall); err != nil {
				t.Fatalf("%v: %s", err, said)
			}
			cut()
			m.file(filepath.Join(m.root, "active"), "", 0o600)
			if said, _, err := m.run(install, args...); err != nil || left() {
				t.Errorf("the next install.sh: %v: %s\nleft in part: %v", err, said, left())
			}
			m.file(filepath.Join(m.root, c.target)+".new", "half", 0o600)
			if said, _, err := m.run(install, args...); err != nil ||
				left() != strings.HasSuffix(c.target, "admin.kubeconfig") {
				t.Errorf("install.sh where the whole file is there: %v: %s\nleft in part: %v", err, said, left())
			}
		})
	}
}
