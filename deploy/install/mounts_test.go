package install

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// File system tables of machines on which installation must succeed: that of Debian cloud images,
// and one with mounts unrelated to Keelson's data.
const (
	cloudTable = "/dev/vda /  ext4 rw,discard,errors=remount-ro,x-systemd.growfs 0 1\n"
	otherTable = "# /dev/sdz1 /var/lib/keelson ext4 defaults 0 0\n\n  #LABEL=x\t/var " +
		"ext4\nUUID=0a1b-2c\t/\text4\terrors=remount-ro\t0\t1\n/swapfile none swap sw 0 0\n/dev/sda5 " +
		"swap swap sw 0 0\n" +
		"UUID=5 /var/lib/keelsonette ext4 nofail 0 2\n/srv/pool /srv/data none bind,nofail 0 0\n/dev/sr0 " +
		"/media/cdrom0 udf,iso9660 user,noauto 0 0\nproc /proc proc defaults 0 0\n"
	mountsOf = "/dev/vda / ext4 rw 0 0\nproc /proc proc rw 0 0\n"
)

// write creates files below the machine's root; a mount point is an empty folder.
func (m *machine) write(files map[string]string) {
	m.t.Helper()
	for path, content := range files {
		at := filepath.Join(m.root, path)
		if to, link := strings.CutPrefix(content, "-> "); link {
			if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
				m.t.Fatal(err)
			}
			if err := os.Symlink(to, at); err != nil {
				m.t.Fatal(err)
			}
		} else if strings.HasSuffix(path, "/") {
			if err := os.MkdirAll(at, 0o755); err != nil {
				m.t.Fatal(err)
			}
		} else {
			m.file(at, content, 0o644)
		}
	}
}

const takeOut = ", or take it out of /etc/fstab, or its unit out of /etc/systemd/system\n"

// withoutDisk are machines with a missing disk for their data.
var withoutDisk = []struct {
	name  string
	args  string // of install.sh
	files map[string]string
	want  string
}{
	{"a new machine", "server --init",
		map[string]string{"etc/fstab": otherTable + "LABEL=k\t/var/lib/keelson\text4\tdefaults,nofail 0 2\n"},
		"nothing was changed: a disk is to be mounted at /var/lib/keelson and is not: 'mount /var/lib/keelson'" +
			takeOut},
	{"a new worker", "agent --server h --token t",
		map[string]string{"etc/fstab": cloudTable + "/dev/vdb /var/lib/keelson/local-volumes ext4 nofail 0 2\n",
			"var/lib/keelson/local-volumes/": ""},
		"at /var/lib/keelson/local-volumes and is not: 'mount /var/lib/keelson/local-volumes'" + takeOut},
	{"a replica whose data are on the disk, without a token", "server --server h",
		map[string]string{"etc/fstab": "LABEL=k /var/lib/keelson/controlplane/ ext4 nofail 0 2\n"},
		"at /var/lib/keelson/controlplane and is not: 'mount /var/lib/keelson/controlplane'"},
	{"a replica that runs without it", "server --server h",
		map[string]string{"etc/fstab": "LABEL=k /var/lib/keelson/controlplane ext4 nofail 0 2\n", "active": "",
			"var/lib/keelson/controlplane/cluster.json": "{}"},
		"at /var/lib/keelson/controlplane and is not, and would cover what lies in /var/lib/keelson/controlplane: " +
			"where that is to stay, take it out of /etc/fstab"},
	{"a node that runs without one above", "agent --server h",
		map[string]string{"etc/fstab": "LABEL=v /var ext4 nofail 0 2\n", "active": "",
			"var/lib/keelson/session/node.pem": "x"},
		"at /var and is not, and would cover what lies in /var/lib/keelson: "},
	{"one that is mounted on demand", "server --init",
		map[string]string{"etc/fstab": "LABEL=k /var/lib/keelson ext4 noauto 0 2\n"}, "at /var/lib/keelson and is not"},
	{"a bind mount", "server --init",
		map[string]string{"etc/fstab": "/data/keelson /var/lib/keelson none bind,nofail 0 0\n", "data/keelson/": ""},
		"at /var/lib/keelson and is not"},
	{"a unit", "server --init",
		map[string]string{
			"etc/systemd/system/var-lib-keelson-images.mount": "[Mount]\nWhat=/dev/sdb1\nWhere=/var/lib/keelson/images\n"}, "at /var/lib/keelson/images and is not"},
	{"an automount with nothing mounted", "server --init",
		map[string]string{"etc/fstab": "LABEL=k /var/lib/keelson ext4 noauto,x-systemd.automount 0 2\n",
			"proc/mounts": mountsOf + "systemd-1 /var/lib/keelson autofs rw 0 0\n"}, "at /var/lib/keelson and is not"},
	{"one behind a link", "server --init", map[string]string{"etc/fstab": "LABEL=k /data ext4 nofail 0 2\n",
		"data/keelson/": "", "var/lib/keelson": "-> ../../data/keelson"}, "at /data and is not: 'mount /data'"},
}

// Nothing is installed and no daemon is restarted. Otherwise systemd would mount the disk over
// running data, or the installed data would be hidden once the disk is mounted.
func TestADiskThatIsNotMounted(t *testing.T) {
	for _, c := range withoutDisk {
		t.Run(c.name, func(t *testing.T) {
			m := newMachine(t)
			unpacked, _ := m.release()
			m.write(map[string]string{"proc/mounts": mountsOf})
			m.write(c.files)
			m.refuses(c.want, filepath.Join(unpacked, "install.sh"), strings.Fields(c.args)...)
		})
	}
}

// refuses runs a script that must fail with a reason and without any effect.
func (m *machine) refuses(want, script string, args ...string) {
	m.t.Helper()
	before := m.tree()
	said, called, err := m.run(script, args...)
	if err == nil || !strings.Contains(said, want) {
		m.t.Errorf("%v: %s\nwant %s", err, said, want)
	}
	if !equal(before, m.tree()) || len(called) > 0 {
		m.t.Errorf("something was done: %q, and there is now %v", called, m.tree())
	}
}

// The package refuses too, new or as an upgrade, because its postinst would restart the daemons.
func TestThePackageLooksForDisks(t *testing.T) {
	for _, c := range withoutDisk {
		t.Run(c.name, func(t *testing.T) {
			m := newMachine(t)
			m.write(map[string]string{"proc/mounts": mountsOf})
			m.write(c.files)
			m.refuses(c.want, "deb/preinst", "install")
			m.refuses(c.want, "deb/preinst", "upgrade", "1.0.0", "1.1.0")
			if said, _, err := m.run("deb/preinst", "abort-upgrade", "1.1.0"); err != nil {
				t.Errorf("going back is refused: %v: %s", err, said)
			}
			if err := os.RemoveAll(filepath.Join(m.root, "run/systemd")); err != nil {
				t.Fatal(err)
			}
			if said, _, err := m.run("deb/preinst", "install"); err != nil {
				t.Errorf("a root that is made into an image: %v: %s", err, said)
			}
		})
	}
	// The scripts are separate, but contain the same check.
	look := func(file, until string) string {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		_, from, found := strings.Cut(string(raw), "\nreal() {")
		part, _, ended := strings.Cut(from, until)
		if !found || !ended || !strings.Contains(part, "unmounted() {") {
			t.Fatalf("%s has no look for disks that ends before %q", file, until)
		}
		return part
	}
	if look("install.sh", "\n# joining is an error") != look("deb/preinst", "\nmounted\n") {
		t.Error("deb/preinst and install.sh do not look for disks by the same functions")
	}
}

// Installation succeeds if the disks are mounted, do not concern Keelson's data, or if there is no
// table.
func TestDisksThatAreMounted(t *testing.T) {
	for name, files := range map[string]map[string]string{
		"no table": {"proc/mounts": mountsOf},
		// nothing tells
		"a table and no more":  {"etc/fstab": cloudTable + "LABEL=k /var/lib/keelson ext4 nofail 0 2\n"},
		"a machine in a cloud": {"etc/fstab": cloudTable, "proc/mounts": mountsOf},
		"an empty table":       {"etc/fstab": "# UNCONFIGURED FSTAB FOR BASE SYSTEM\n", "proc/mounts": mountsOf},
		"disks of others": {"etc/fstab": otherTable, "proc/mounts": mountsOf,
			"etc/systemd/system/srv.mount":             "[Mount]\nWhere=/srv\n",
			"etc/systemd/system/var-lib-keelson.mount": "-> /dev/null"},
		"a disk": {"etc/fstab": otherTable + "UUID=7\t/var/lib/keelson/\text4 nofail 0 2\n",
			"proc/mounts": mountsOf + "/dev/sdb1 /var/lib/keelson ext4 rw 0 0\n"},
		"disks above and below": {"etc/fstab": cloudTable +
			"LABEL=v /var ext4 defaults 0 2\nLABEL=k /var/lib/keelson/controlplane ext4 nofail 0 2\n",
			"proc/mounts": mountsOf + "/dev/sdb1 /var ext4 rw 0 0\n/dev/sdc1 " +
				"/var/lib/keelson/controlplane ext4 rw 0 0\n"},
		"a bind mount": {"etc/fstab": "/data/keelson /var/lib/keelson none bind 0 0\n",
			"proc/mounts": mountsOf + "/dev/vda /var/lib/keelson ext4 rw 0 0\n"},
		"one that was automounted": {"etc/fstab": "LABEL=k /var/lib/keelson ext4 noauto,x-systemd.automount 0 2\n",
			"proc/mounts": mountsOf + "systemd-1 /var/lib/keelson autofs rw 0 0\n/dev/sdb1 " +
				"/var/lib/keelson ext4 rw 0 0\n"},
		"one behind a link": {"etc/fstab": "LABEL=k /var/lib/keelson/controlplane ext4 nofail 0 2\n",
			"data/controlplane/": "", "var/lib/keelson": "-> ../../data",
			"proc/mounts": mountsOf + "/dev/sdb1 /data/controlplane ext4 rw 0 0\n"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			unpacked, _ := m.release()
			m.write(files)
			if said, _, err := m.run(filepath.Join(unpacked, "install.sh"), "server", "--init"); err != nil ||
				!strings.Contains(said, "install: done;") {
				t.Errorf("%v: %s", err, said)
			}
			if said, _, err := m.run("deb/preinst", "install"); err != nil || said != "" {
				t.Errorf("the package: %v: %s", err, said)
			}
		})
	}
}
